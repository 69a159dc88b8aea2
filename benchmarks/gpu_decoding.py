"""Decoding on a GPU: the share of the memory bandwidth, eager and with CUDA graphs, and the bytes of the KV cache."""

from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import torch
from torch.cuda import CUDAGraph

from llama_lab.api import load_config
from llama_lab.evaluation.speed import decoding, time_in_turn
from llama_lab.model import Decoder

from .decode import cache_bytes, weight_bytes
from .decoders import BILLION, build_decoder
from .findings import Finding


def measure_decoding(
    device: torch.device,
    overrides: Sequence[str] = BILLION,
    context: int = 1024,
    new_tokens: int = 32,
    buffer_bytes: int = 4 * 2**30,
    modes: Sequence[bool] = (False, True),
    rounds: int = 5,
) -> Iterator[Finding]:
    """Time the last `new_tokens` of `context` tokens in bf16, batch 1, in turn with readings of a buffer.

    modes: whether the step is compiled. The share of the bandwidth is that of the weights and the filled KV cache, read
    once for each token. The goals are for the compiled step.
    """
    model = build_decoder(load_config([*overrides, f"model.max_seq_len={context}"]), device, torch.bfloat16)
    yield from cache_memory(model, context, device)
    buffer = torch.ones(buffer_bytes // 4, device=device)
    read = weight_bytes(model) + cache_bytes(model, context - new_tokens, new_tokens)
    for compiled in modes:  # not both in turn: eager decoding fuses weights, and a CUDA graph would be recorded again
        how = "compiled" if compiled else "eager"
        work = decoding(model, 1, context, new_tokens, compiled)
        timings = time_in_turn({"decode": work, "read": buffer.sum}, rounds)
        seconds, bandwidth = timings["decode"].median / new_tokens, buffer_bytes / min(timings["read"].times)
        note = f"of {bandwidth / 1e9:,.0f} GB/s, the best reading of a buffer"
        yield Finding(f"decoding, {how}", 1 / seconds, "tokens/s")
        share = 100 * read / seconds / bandwidth
        yield Finding(f"of the bandwidth, {how}", share, "%", 80 if compiled else None, note=note)
        graphs = graphs_launched(work) / new_tokens
        yield Finding(f"CUDA graphs launched per token, {how}", graphs, goal=1 if compiled else None)


def cache_memory(model: Decoder, context: int, device: torch.device) -> Iterator[Finding]:
    """The allocator's bytes of a KV cache over those of the formula; it rounds each tensor up to 512 bytes."""
    for dtype in (torch.bfloat16, torch.int8):
        formula = sum(mixer.state_bytes(context, dtype) for mixer in model.mixers)
        before = torch.cuda.memory_allocated()
        state = model.new_state(1, context, dtype)
        taken = torch.cuda.memory_allocated() - before if device.type == "cuda" else state.nbytes
        del state  # else it would be freed while the next is counted
        yield Finding(f"KV cache in {dtype}, allocated over formula", taken / formula, goal=1.01, at_most=True)


def graphs_launched(work: Callable[[], object]) -> int:
    """How often `work` launches a CUDA graph."""
    with patch.object(CUDAGraph, "replay", autospec=True, side_effect=CUDAGraph.replay) as replay:
        work()
    return replay.call_count
