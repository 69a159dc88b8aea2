"""Greedy decoding of a whole decoder, batch 1, ours and transformers': `python -m benchmarks decode`.

Also measures the floor, the least time to read the weights and the KV cache, and how the time per token grows with the
text: only that of attention should.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pandas as pd
import torch
import torch.nn.functional as F

from llama_lab.evaluation.speed import NEW_TOKENS, decoding, inference
from llama_lab.formatting import in_bytes
from llama_lab.model import Decoder, Sampling, generate, measure_cost
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.plots import save
from llama_lab.timing import measurement, time_in_turn

from .charts import decode_chart
from .decoders import SMALL, TINY, build_decoder, compose
from .peers import shape_of
from .rows import row_table, rows_of, start, with_ratio, write_csv
from .side import continued, llama

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
        return build_decoder(compose(*self.overrides, f"model.max_seq_len={max_seq_len}"), device, self.dtype)


PRESETS = {
    "small": Preset(SMALL),
    "tiny": Preset(TINY, prompt=4, new_tokens=8, max_seq_len=16, contexts=(8, 16), buffer_bytes=2**20),
    "1b": Preset(("arch=llama3", "size=llama3_1b", "embedding=tied"), torch.bfloat16),
}


def run(preset: str, compile: bool, device: str, rounds: int, out: Path) -> None:
    """Measure and print all; write `decode.csv` and `decode.png` into `out`."""
    sizes = PRESETS[preset]
    here, where, console = start(device, str(sizes.dtype), f"{rounds} rounds")
    if find_spec("transformers") is None:
        console.print("transformers is not installed, so ours stand alone; pip install 'transformers>=5,<6'")
    model = sizes.build(sizes.max_seq_len, here)
    speeds, floors, reads = measure_generation(model, sizes, compile, rounds, here)
    growth = pd.concat([*measure_quarters(model, sizes, compile, rounds), *measure_contexts(sizes, rounds, here)])
    growth["tokens_per_s"] = (1 / growth.median_s).where(growth.what != REST)
    title = f"Greedy text, batch 1, {sizes.new_tokens} tokens after {sizes.prompt}; time of a token"
    console.print(row_table(title, {"what": "what"}, pd.concat([speeds, floors])))
    for floor, read in zip(floors.itertuples(), reads.itertuples(), strict=True):
        console.print(
            f"{floor.what}: {in_bytes(floor.bytes_read)} per token, weights and KV cache, at "
            f"{read.bytes_read / read.low_s / 1e9:.1f} GB/s, the best of reading {in_bytes(read.bytes_read)}"
        )
    title = "Time of a token as the text grows, and of attention's kernels alone"
    console.print(row_table(title, {"what": "what", "where": "size"}, growth))
    tables = [rows.assign(component="decode") for rows in (speeds, floors, reads, growth)]
    write_csv(tables, COLUMNS, where, out / "decode.csv")
    save(decode_chart(speeds, floors, growth), out / "decode.png")
    console.print(f"wrote {out / 'decode.csv'} and {out / 'decode.png'}", soft_wrap=True)


def measure_generation(
    model: Decoder, preset: Preset, compiled: bool, rounds: int, device: torch.device
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Seconds per token of every contender and of the floors, and of a reading of each floor's buffer.

    Prompt processing is included; the first contender is transformers, if installed. Buffers are read in the same
    rounds, so that other load on the memory slows both.
    """
    contenders: dict[str, Callable[[], object]] = {}
    if find_spec("transformers") is not None:
        contenders["transformers"] = transformers_generation(model, preset, device)
    for name, is_compiled in ours(compiled).items():
        contenders[name] = partial(token_moments, model, preset, is_compiled)
    sizes = buffers(model, preset)
    readings = {name: torch.ones(n // 4, device=device).sum for name, n in sizes.items()}  # by all threads
    timings = time_in_turn(contenders | readings, rounds)
    size = f"{preset.new_tokens} after {preset.prompt}"
    speeds = rows_of(size, "generate", {name: timings[name] for name in contenders}, parts=preset.new_tokens)
    reads = rows_of("", "read", {name: timings[name] for name in sizes}).assign(bytes_read=list(sizes.values()))
    floors = floors_of(size, weight_bytes(model) + cache_bytes(model, preset.prompt, preset.new_tokens), reads)
    speeds, floors = with_shares(with_ratio(speeds), floors), with_shares(floors, floors)
    return speeds, floors, reads.assign(what=reads.what + "'s buffer")


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
    cfg = compose(*preset.overrides, f"model.max_seq_len={preset.max_seq_len}").model
    with device:
        theirs = llama(shape_of(cfg), cfg.embedding.tied)
        prompt = torch.arange(preset.prompt)[None]
    theirs = theirs.to(preset.dtype).eval()
    if sum(p.numel() for p in theirs.parameters()) != sum(p.numel() for p in model.parameters()):
        raise RuntimeError("transformers' model has another number of parameters than ours")

    def work() -> None:
        new = continued(theirs, prompt, preset.new_tokens)
        if new != preset.new_tokens:
            raise RuntimeError(f"transformers' text ended at {preset.prompt + new} tokens")

    return work


def floors_of(size: str, bytes_per_token: float, reads: pd.DataFrame) -> pd.DataFrame:
    """The least time per token: the bytes that must be read for it, divided by the bandwidth of each of `reads`.

    The bandwidth is that of the fastest round.
    """
    seconds = bytes_per_token * reads.low_s / reads.bytes_read
    return reads.assign(size=size, median_s=seconds, low_s=seconds, high_s=seconds, bytes_read=bytes_per_token)


def with_shares(rows: pd.DataFrame, floors: pd.DataFrame) -> pd.DataFrame:
    """The rows with tokens per second, absolute and as a fraction of each floor's."""
    shares = {f"of_{floor.what.replace(' ', '_')}": floor.median_s / rows.median_s for floor in floors.itertuples()}
    return rows.assign(tokens_per_s=1 / rows.median_s, **shares)


def buffers(model: Decoder, preset: Preset) -> dict[str, int]:
    """Bytes of the buffers that measure the bandwidth, by the names of their floors.

    One is far larger than the processor's caches, and a program may be faster than its floor; the other is as large as
    the weights, since a small model may stay in a cache.
    """
    return {"memory floor": preset.buffer_bytes, "cache floor": weight_bytes(model)}


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


def measure_quarters(model: Decoder, preset: Preset, compiled: bool, rounds: int) -> Iterator[pd.DataFrame]:
    """Our seconds per token over the first and the last quarter of the text, without prompt processing."""
    n = preset.new_tokens // 4
    for name, is_compiled in ours(compiled).items():
        texts = [token_moments(model, preset, is_compiled) for _ in range(rounds + 1)][1:]  # the first warms up
        for quarter, first, last in (("first", 0, n), ("last", -1 - n, -1)):
            seconds = measurement([moments[last] - moments[first] for moments in texts])
            yield rows_of(f"{quarter} {n} tokens", "decode", {name: seconds}, parts=n)


def measure_contexts(preset: Preset, rounds: int, device: torch.device) -> Iterator[pd.DataFrame]:
    """Seconds per token at the end of each context, eager: of a step, of attention's kernels alone, and of the rest."""
    model = preset.build(max(preset.contexts), device)
    steps = {context: min(NEW_TOKENS, context) for context in preset.contexts}
    contenders: dict[str, Callable[[], object]] = {}
    for context, n in steps.items():
        contenders[f"step {context}"] = decoding(model, 1, context, n)
        contenders[f"attention {context}"] = attention_alone(model, context)
    found = time_in_turn(contenders, rounds)
    for context, n in steps.items():
        step, attention = measurement(found[f"step {context}"].times, parts=n), found[f"attention {context}"]
        rest = measurement([step.median - attention.median])
        yield rows_of(f"at {context} tokens", "decode", {EAGER: step, ATTENTION: attention, REST: rest})


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
