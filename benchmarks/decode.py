"""Greedy decoding of a whole decoder, batch 1, ours and transformers': `python -m benchmarks decode`.

Also measures the floor, the least time to read the weights and the KV cache, and how the time per token grows with the
text: only that of attention should.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import pandas as pd
import torch
import torch.nn.functional as F
from torch.utils.benchmark import Measurement

from llama_lab.api import load_config
from llama_lab.evaluation.speed import NEW_TOKENS, decoding, inference, time_in_turn
from llama_lab.model import Decoder, Sampling, generate, measure_cost
from llama_lab.model.attention import GroupedQueryAttention

from .contenders import continued, llama
from .decoders import BILLION, SMALL, TINY, build_decoder
from .rows import measurement, rows_of, show, start, write

EAGER, COMPILED = "ours, eager", "ours, compiled"


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
        return build_decoder(load_config([*self.overrides, f"model.max_seq_len={max_seq_len}"]), device, self.dtype)


PRESETS = {
    "small": Preset(SMALL),
    "tiny": Preset(TINY, prompt=4, new_tokens=8, max_seq_len=16, contexts=(8, 16), buffer_bytes=2**20),
    "1b": Preset(BILLION, torch.bfloat16),
}


def run(preset: str, compile: bool, device: str, rounds: int, out: Path) -> None:
    """Measure and print all; write `decode.csv` into `out`."""
    sizes = PRESETS[preset]
    here, where = start(device)
    model = sizes.build(sizes.max_seq_len, here)
    modes = {EAGER: False, COMPILED: True} if compile else {EAGER: False}
    speeds, floors = measure_generation(model, sizes, modes, rounds, here)
    show(f"Greedy text, batch 1, {sizes.new_tokens} tokens after {sizes.prompt}; time of a token", speeds)
    show("The least time of a token, by the bandwidth of reading", floors)
    growth = pd.concat([*measure_quarters(model, sizes, modes, rounds), *measure_contexts(sizes, rounds, here)])
    show("Time of a token as the text grows, and of attention's kernels alone", growth)
    write([speeds, floors, growth], where, out / "decode.csv")


def measure_generation(
    model: Decoder, preset: Preset, modes: Mapping[str, bool], rounds: int, device: torch.device
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The time of a token by transformers and by ours, prompt processing included, and the floors.

    modes: ours, and whether the step is compiled. Buffers are read in the same rounds, so that other load on the memory
    slows both. Each floor's time is also told as a share of each contender's.
    """
    texts: dict[str, Callable[[], object]] = {"transformers": transformers_generation(model, preset, device)}
    texts |= {name: partial(token_moments, model, preset, compiled) for name, compiled in modes.items()}
    sizes = buffers(model, preset)
    readings = {name: torch.ones(size // 4, device=device).sum for name, size in sizes.items()}  # by all threads
    timings = time_in_turn(texts | readings, rounds)
    times = {name: timings[name] for name in texts}
    rows = rows_of(f"{preset.new_tokens} after {preset.prompt}", "generate", times, parts=preset.new_tokens)
    needed = weight_bytes(model) + cache_bytes(model, preset.prompt, preset.new_tokens)
    floors = floors_of(needed, sizes, timings)
    shares = {f"of_{floor.what}": floor.floor_ms / rows.median_ms for floor in floors.itertuples()}
    return rows.assign(tokens_per_s=1e3 / rows.median_ms, **shares), floors


def floors_of(needed: float, sizes: Mapping[str, int], timings: Mapping[str, Measurement]) -> pd.DataFrame:
    """The least time to read the bytes that a token needs, by the fastest reading of each buffer."""
    rows = pd.DataFrame({"what": list(sizes), "read_bytes": list(sizes.values()), "token_bytes": needed})
    rows["gb_per_s"] = [size / min(timings[name].times) / 1e9 for name, size in sizes.items()]
    return rows.assign(floor_ms=rows.token_bytes / rows.gb_per_s / 1e6)


def token_moments(model: Decoder, preset: Preset, compiled: bool) -> list[float]:
    """Generate our greedy text, and note the time of each new token, in seconds."""
    text = generate(model, [range(preset.prompt)], preset.new_tokens, Sampling(temperature=0), compiled=compiled)
    return [time.perf_counter() for _ in text]


def transformers_generation(model: Decoder, preset: Preset, device: torch.device) -> Callable[[], None]:
    """A function that generates as many tokens with transformers' Llama of the same shape.

    Raises RuntimeError if the models differ in their number of parameters; the function does if the text ends early.
    """
    with device:
        theirs = llama(load_config([*preset.overrides, f"model.max_seq_len={preset.max_seq_len}"]).model)
        prompt = torch.arange(preset.prompt)[None]
    theirs = theirs.to(preset.dtype).eval()
    if sum(p.numel() for p in theirs.parameters()) != sum(p.numel() for p in model.parameters()):
        raise RuntimeError("transformers' model has another number of parameters than ours")

    def work() -> None:
        new = continued(theirs, prompt, preset.new_tokens)
        if new != preset.new_tokens:
            raise RuntimeError(f"transformers' text ended after {new} tokens")

    return work


def buffers(model: Decoder, preset: Preset) -> dict[str, int]:
    """Bytes of the buffers that measure the bandwidth, by what they are read from.

    One is far larger than the processor's caches, and a program may be faster than its floor; the other is as large as
    the weights, since a small model may stay in a cache.
    """
    return {"memory": preset.buffer_bytes, "cache": weight_bytes(model)}


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


def measure_quarters(model: Decoder, preset: Preset, modes: Mapping[str, bool], rounds: int) -> Iterator[pd.DataFrame]:
    """Our time per token over the first and the last quarter of the text, without prompt processing."""
    n = preset.new_tokens // 4
    for name, compiled in modes.items():
        texts = [token_moments(model, preset, compiled) for _ in range(rounds + 1)][1:]  # the first warms up
        for quarter, first, last in (("first", 0, n), ("last", -1 - n, -1)):
            seconds = measurement([moments[last] - moments[first] for moments in texts])
            yield rows_of(f"{quarter} {n} tokens", "decode", {name: seconds}, parts=n)


def measure_contexts(preset: Preset, rounds: int, device: torch.device) -> Iterator[pd.DataFrame]:
    """The time of a token at the end of each context, eager: of a step, and of attention's kernels alone."""
    model = preset.build(max(preset.contexts), device)
    steps = {context: min(NEW_TOKENS, context) for context in preset.contexts}
    contenders: dict[str, Callable[[], object]] = {}
    for context, n in steps.items():
        contenders[f"step {context}"] = decoding(model, 1, context, n)
        contenders[f"attention {context}"] = attention_alone(model, context)
    found = time_in_turn(contenders, rounds)
    for context, n in steps.items():
        step, attention = measurement(found[f"step {context}"].times, parts=n), found[f"attention {context}"]
        yield rows_of(f"at {context} tokens", "decode", {EAGER: step, "attention alone": attention})


def attention_alone(model: Decoder, context: int) -> Callable[[], object]:
    """A function that runs only attention, from one token to `context` others, in all layers.

    A small KV cache then stays in the processor's cache; in a whole step, the weights would evict it.
    """
    layers, state, calls = cast(list[GroupedQueryAttention], model.mixers), model.new_state(1, context), []
    for layer, kept in zip(layers, state.layers, strict=True):
        key, value = kept.tensors
        query = torch.randn(1, layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim).to(key)
        calls.append(partial(F.scaled_dot_product_attention, query, key, value))

    def work() -> None:
        for call in calls:
            call()

    return inference(work)
