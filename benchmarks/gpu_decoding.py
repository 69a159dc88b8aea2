"""Decoding on a GPU: the share of the memory bandwidth, with and without CUDA graphs, and the bytes of the KV cache."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.cuda import CUDAGraph
from torch.profiler import ProfilerActivity, profile

from llama_lab.evaluation.speed import inference, random_tokens
from llama_lab.model import Decoder
from llama_lab.model.generate import _static_step, compiled_step, eager_step
from llama_lab.model.packing import packed
from llama_lab.model.state import DecoderState
from llama_lab.timing import time_in_turn

from .decode import cache_bytes, weight_bytes
from .decoders import build_decoder, compose
from .findings import Finding, skipped
from .gpu_memory import allocated

Step = Callable[[Tensor], Tensor]
NewStep = Callable[[Decoder, DecoderState], Step]

BILLION = ("arch=llama3", "size=llama3_1b", "embedding=tied")


def measure_decoding(
    device: torch.device,
    overrides: Sequence[str] = BILLION,
    context: int = 1024,
    new_tokens: int = 32,
    buffer_bytes: int = 4 * 2**30,
    compiled: bool = True,
    rounds: int = 5,
) -> Iterator[Finding]:
    """Time the last `new_tokens` of `context` tokens in bf16, batch 1, in turn with readings of a buffer.

    The share of the bandwidth is that of the weights and the filled KV cache, read once for each token.
    """
    cfg = compose(*overrides, f"model.max_seq_len={context}")
    model = build_decoder(cfg, device, torch.bfloat16)
    yield from cache_memory(model, context, device)
    steps: dict[str, NewStep] = {"eager": eager_step}
    if compiled:
        steps |= {"compiled without CUDA graphs": step_without_graphs, "compiled": compiled_step}
    buffer = torch.ones(buffer_bytes // 4, device=device)
    read = weight_bytes(model) + cache_bytes(model, context - new_tokens, new_tokens)
    for name, new_step in steps.items():
        work = last_tokens(model, context, new_tokens, new_step)
        # Not all in turn: a pack moves the weights, and a CUDA graph would be recorded again.
        with packed(model) if new_step is eager_step else nullcontext():
            timings = time_in_turn({"decode": work, "read": buffer.sum}, rounds)
            graphs = graphs_launched(work) / new_tokens
        seconds = timings["decode"].median / new_tokens
        bandwidth = buffer_bytes / min(timings["read"].times)
        note = f"of {bandwidth / 1e9:,.0f} GB/s, the best reading of a buffer"
        yield Finding(f"decoding, {name}", 1 / seconds, "tokens/s")
        share = 100 * read / seconds / bandwidth
        yield Finding(f"of the bandwidth, {name}", share, "%", 80 if name == "compiled" else None, note=note)
        if device.type == "cuda":
            goal = 1 if name == "compiled" else None
            yield Finding(f"CUDA graphs launched per token, {name}", graphs, goal=goal)
        else:
            yield skipped(f"CUDA graphs launched per token, {name}", "only a GPU has them")


def cache_memory(model: Decoder, context: int, device: torch.device) -> Iterator[Finding]:
    """The allocator's bytes of a KV cache over those of the formula; it rounds each tensor up to 512 bytes."""
    for name, dtype in (("bf16", torch.bfloat16), ("int8", torch.int8)):
        formula = sum(mixer.state_bytes(context, dtype) for mixer in model.mixers)
        before = allocated(device)
        state = model.new_state(1, context, dtype)
        taken = allocated(device) - before if device.type == "cuda" else state.nbytes
        del state  # else it would be freed while the next is counted
        yield Finding(f"KV cache in {name}, allocated over formula", taken / formula, goal=1.01, at_most=True)


def last_tokens(model: Decoder, context: int, new_tokens: int, new_step: NewStep) -> Callable[[], object]:
    """A function that decodes the last `new_tokens` of `context` tokens; see `evaluation.speed.decoding`."""
    tokens, state = random_tokens(model, 1, new_tokens), model.new_state(1, context)

    def decode() -> None:
        state.lengths.fill_(context - new_tokens)
        step = new_step(model, state)
        for i in range(new_tokens):
            step(tokens[:, i : i + 1])

    return inference(decode)


def step_without_graphs(model: Decoder, state: DecoderState) -> Step:
    """`compiled_step` without CUDA graphs: every kernel is launched from Python's thread."""
    compiled = torch.compile(_static_step, dynamic=False)
    positions = state.lengths[:, None].to(model.embedding.tokens.weight.device, copy=True)

    def step(tokens: Tensor) -> Tensor:
        logits = compiled(model, tokens, positions, state)
        positions.add_(1)
        return logits

    return step


def graphs_launched(work: Callable[[], object]) -> int:
    """How often `work` launches a CUDA graph."""
    with patch.object(CUDAGraph, "replay", autospec=True, side_effect=CUDAGraph.replay) as replay:
        work()
    return replay.call_count


def calls(work: Callable[[], object]) -> Counter[str]:
    """How often `work` calls each operator of PyTorch, its backward passes included."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return Counter({event.key: event.count for event in profiler.key_averages()})
