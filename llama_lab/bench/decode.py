"""Greedy decoding of a whole decoder, batch 1, ours and transformers': `python -m llama_lab.bench decode`.

Also measures the floor, the least time to read the weights and the KV cache, and how the time per token grows with the
text: only that of attention should.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch.utils.benchmark import Measurement

from llama_lab.evaluation.speed import NEW_TOKENS, decoding, inference
from llama_lab.formatting import in_bytes
from llama_lab.model import Decoder, Sampling, generate, measure_cost
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.plots import save
from llama_lab.timing import measurement, time_in_turn

from .charts import decode_chart
from .rows import Row, conditions, open_console, row_table, rows_of, write_csv
from .subjects import SMALL, TINY, build_decoder, choose_device, compose

EAGER, COMPILED, ATTENTION, REST = "ours, eager", "ours, compiled", "attention alone", "the rest"
COLUMNS = ("tokens_per_s", "bytes_read", "of_memory_floor", "of_cache_floor")


@dataclass(frozen=True)
class Preset:
    """A model and the sizes of its measurements.

    overrides: those of its config. max_seq_len: the longest text, over which the compiled step always attends.
    prompt, new_tokens: lengths of the text. contexts: further lengths at which a token is timed. buffer_bytes: of the
    buffer that measures the bandwidth.
    """

    overrides: Sequence[str]
    dtype: torch.dtype = torch.float32
    prompt: int = 32
    new_tokens: int = 200
    max_seq_len: int = 256
    contexts: Sequence[int] = (256, 1024, 4096)
    buffer_bytes: int = 512 * 2**20

    def build(self, max_seq_len: int, device: torch.device) -> Decoder:
        """The model, for texts of `max_seq_len` tokens."""
        return build_decoder(self.compose(max_seq_len), device, self.dtype)

    def compose(self, max_seq_len: int) -> DictConfig:
        """The model's config."""
        return compose(*self.overrides, f"model.max_seq_len={max_seq_len}")

    @property
    def size(self) -> str:
        """The lengths, as text."""
        return f"{self.new_tokens} after {self.prompt}"


PRESETS = {
    "small": Preset(SMALL),
    "tiny": Preset(TINY, prompt=4, new_tokens=8, max_seq_len=16, contexts=(8, 16), buffer_bytes=2**20),
    "1b": Preset(("arch=llama3", "size=llama3_1b", "embedding=tied"), torch.bfloat16),
}


def run(preset: str, compile: bool, device: str, rounds: int, out: Path) -> None:
    """Measure and print all; write `decode.csv` and `decode.png` into `out`."""
    sizes, here = PRESETS[preset], choose_device(device)
    where = conditions(here)
    console = open_console(where, str(sizes.dtype), f"{rounds} rounds")
    if find_spec("transformers") is None:
        console.print("transformers is not installed, so ours stand alone; pip install 'transformers>=5,<6'")
    model = sizes.build(sizes.max_seq_len, here)
    speeds, floors = measure_generation(model, sizes, compile, rounds, here)
    growth = [*measure_quarters(model, sizes, compile, rounds), *measure_contexts(sizes, rounds, here)]
    at_floors, reads = [], []
    for floor in floors:
        values = {**shares(floors, floor.seconds), "bytes_read": floor.bytes_per_token}
        at_floors.append(Row("decode", floor.name, sizes.size, "read", measurement([floor.seconds]), values))
        values = {"bytes_read": floor.buffer_bytes}
        reads.append(Row("decode", f"{floor.name}'s buffer", "", "read", floor.reading, values))
    title = f"Greedy text, batch 1, {sizes.new_tokens} tokens after {sizes.prompt}; time of a token"
    console.print(row_table(title, {"what": "what"}, [*speeds, *at_floors]))
    for floor in floors:
        console.print(
            f"{floor.name}: {in_bytes(floor.bytes_per_token)} per token, weights and KV cache, at "
            f"{floor.bytes_per_second / 1e9:.1f} GB/s, the best of reading {in_bytes(floor.buffer_bytes)}"
        )
    title = "Time of a token as the text grows, and of attention's kernels alone"
    console.print(row_table(title, {"what": "what", "where": "size"}, growth))
    write_csv([*speeds, *at_floors, *reads, *growth], COLUMNS, where, out / "decode.csv")
    save(decode_chart(speeds, at_floors, growth), out / "decode.png")
    console.print(f"wrote {out / 'decode.csv'} and {out / 'decode.png'}", soft_wrap=True)


def measure_generation(
    model: Decoder, preset: Preset, compiled: bool, rounds: int, device: torch.device
) -> tuple[list[Row], list["Floor"]]:
    """Seconds per token of every contender, prompt processing included; the first is transformers, if installed.

    The buffers for the floors are read in the same rounds, so that other load on the memory slows both.
    """
    contenders: dict[str, Callable[[], object]] = {}
    if find_spec("transformers") is not None:
        contenders["transformers"] = transformers_generation(model, preset, device)
    for name, is_compiled in ours(compiled).items():
        contenders[name] = partial(token_moments, model, preset, is_compiled)
    sizes = buffers(model, preset)
    timings = time_in_turn(contenders | {name: reading(n, device) for name, n in sizes.items()}, rounds)
    per_token = weight_bytes(model) + cache_bytes(model, preset.prompt, preset.new_tokens)
    floors = [Floor(name, per_token, n, timings[name]) for name, n in sizes.items()]
    speeds = {name: timings[name] for name in contenders}
    rows = rows_of("decode", preset.size, "generate", speeds, parts=preset.new_tokens)
    return [row.adding(**shares(floors, row.timing.median)) for row in rows], floors


def ours(compiled: bool) -> dict[str, bool]:
    """Our contenders: whether the step is compiled, by name. The compiled one is included if `compiled`."""
    return {EAGER: False, COMPILED: True} if compiled else {EAGER: False}


def token_moments(model: Decoder, preset: Preset, compiled: bool) -> list[float]:
    """Generate our greedy text, and note the time of each new token, in seconds."""
    text = generate(model, [range(preset.prompt)], preset.new_tokens, Sampling(temperature=0), compiled=compiled)
    return [time.perf_counter() for _ in text]


def transformers_generation(model: Decoder, preset: Preset, device: torch.device) -> Callable[[], None]:
    """A function that generates as many tokens with transformers' Llama of the same shape.

    Raises RuntimeError if the models differ in their number of parameters; the function does if the text ends early.
    """
    transformers: Any = import_module("transformers")  # not a dependency, and slow to import
    cfg = preset.compose(preset.max_seq_len).model
    with device:
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=cfg.vocab_size,
                hidden_size=cfg.dim,
                intermediate_size=cfg.hidden_dim,
                num_hidden_layers=cfg.n_layers,
                num_attention_heads=cfg.n_heads,
                num_key_value_heads=cfg.n_kv_heads,
                head_dim=cfg.head_dim,
                max_position_embeddings=preset.max_seq_len,
                tie_word_embeddings=cfg.embedding.tied,
            )
        )
        prompt = torch.arange(preset.prompt)[None]
    theirs = theirs.to(preset.dtype).eval()
    if sum(p.numel() for p in theirs.parameters()) != sum(p.numel() for p in model.parameters()):
        raise RuntimeError("transformers' model has another number of parameters than ours")
    theirs.generation_config.eos_token_id = None  # else the text might end early
    config = transformers.GenerationConfig(
        max_new_tokens=preset.new_tokens, do_sample=False, use_cache=True, pad_token_id=0
    )
    mask = torch.ones_like(prompt)

    def work() -> None:
        length = theirs.generate(prompt, config, attention_mask=mask).shape[1]
        if length != preset.prompt + preset.new_tokens:
            raise RuntimeError(f"transformers' text ended at {length} tokens")

    return work


@dataclass(frozen=True)
class Floor:
    """The least time per token: the bytes that must be read for it, divided by the bandwidth.

    There are two: at the bandwidth of a buffer far larger than the processor's caches, and at that of a buffer as large
    as the weights, since a small model may stay in a cache. A program may be faster than the first.
    reading: the timing of a buffer of `buffer_bytes`, which gives the bandwidth.
    """

    name: str
    bytes_per_token: float
    buffer_bytes: int
    reading: Measurement

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth in the fastest round."""
        return self.buffer_bytes / min(self.reading.times)

    @property
    def seconds(self) -> float:
        """Seconds per token."""
        return self.bytes_per_token / self.bytes_per_second

    def share(self, seconds: float) -> float:
        """The speed at `seconds` per token as a fraction of the floor's."""
        return self.seconds / seconds


def shares(floors: Sequence[Floor], seconds: float) -> dict[str, float]:
    """The speed at `seconds` per token, absolute and as a fraction of each floor's."""
    fractions = {f"of_{floor.name.replace(' ', '_')}": floor.share(seconds) for floor in floors}
    return {"tokens_per_s": 1 / seconds, **fractions}


def buffers(model: Decoder, preset: Preset) -> dict[str, int]:
    """Bytes of the buffers that measure the bandwidth, by the names of their floors."""
    return {"memory floor": preset.buffer_bytes, "cache floor": weight_bytes(model)}


def reading(n_bytes: int, device: torch.device) -> Callable[[], object]:
    """A function that reads a float32 buffer of `n_bytes` by summing it with all of PyTorch's threads."""
    return torch.ones(n_bytes // 4, device=device).sum


def weight_bytes(model: Decoder) -> int:
    """Bytes of the weights read for a token: all of blocks, norms and head, and one row of the token table.

    A tied table is the head, and read as a whole. Assumes position encodings without a table, such as RoPE.
    """
    table, head = model.embedding.tokens.weight, model.embedding.head.weight
    whole = sum(p.nbytes for p in model.parameters() if p is not table or p is head)
    return whole + table[0].nbytes


def cache_bytes(model: Decoder, prompt: int, new_tokens: int) -> float:
    """Bytes of keys and values read for a token, averaged over `new_tokens` after `prompt` tokens.

    The i-th new token, from 0, attends to the keys and values of `prompt + i` tokens.
    """
    cost = measure_cost(model, kv_dtype=model.embedding.tokens.weight.dtype)
    assert cost.kv_bytes_per_token is not None  # the peers are all of attention
    return cost.kv_bytes_per_token * (prompt + (new_tokens - 1) / 2)


def measure_quarters(model: Decoder, preset: Preset, compiled: bool, rounds: int) -> list[Row]:
    """Our seconds per token over the first and the last quarter of the text, without prompt processing."""
    n = preset.new_tokens // 4
    rows = []
    for name, is_compiled in ours(compiled).items():
        texts = [token_moments(model, preset, is_compiled) for _ in range(rounds + 1)][1:]  # the first warms up
        first, last = ([m[n] - m[0] for m in texts], [m[-1] - m[-1 - n] for m in texts])
        rows += [token_row(name, f"{k} {n} tokens", t, n) for k, t in (("first", first), ("last", last))]
    return rows


def measure_contexts(preset: Preset, rounds: int, device: torch.device) -> list[Row]:
    """Seconds per token at the end of each context, eager: of a step, of attention's kernels alone, and of the rest."""
    model = preset.build(max(preset.contexts), device)
    steps = {context: min(NEW_TOKENS, context) for context in preset.contexts}
    contenders: dict[str, Callable[[], object]] = {}
    for context, n in steps.items():
        contenders[f"step {context}"] = decoding(model, 1, context, n)
        contenders[f"attention {context}"] = attention_alone(model, context)
    found = time_in_turn(contenders, rounds)
    rows = []
    for context, n in steps.items():
        step = token_row(EAGER, f"at {context} tokens", found[f"step {context}"].times, n)
        attention = token_row(ATTENTION, step.size, found[f"attention {context}"].times)
        rest = measurement([step.timing.median - attention.timing.median])
        rows += [step, attention, Row("decode", REST, step.size, "decode", rest)]
    return rows


def token_row(what: str, where: str, seconds: Sequence[float], tokens: int = 1) -> Row:
    """The row of what takes `seconds` in each round for some tokens, at some length of the text (`where`)."""
    timing = measurement(seconds, parts=tokens)
    return Row("decode", what, where, "decode", timing, {"tokens_per_s": 1 / timing.median})


def attention_alone(model: Decoder, context: int) -> Callable[[], object]:
    """A function that runs only attention, from one token to `context` others, in all layers.

    A small KV cache then stays in the processor's cache; in a whole step, the weights would evict it.
    """
    layers, state, calls = cast(list[GroupedQueryAttention], model.mixers), model.new_state(1, context), []
    for layer, kept in zip(layers, state.layers, strict=True):
        key, value = kept.tensors
        query = torch.randn(1, layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim).to(key)
        calls.append(partial(F.scaled_dot_product_attention, query, key, value))
    return inference(lambda: [call() for call in calls])
