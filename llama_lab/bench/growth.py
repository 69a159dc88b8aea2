"""The time per token as the text grows: only that of attention should grow."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from llama_lab.evaluation.speed import NEW_TOKENS, decoding, inference
from llama_lab.model import Decoder
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.timing import Timing, time_in_turn

from .subjects import EAGER, Preset, greedy_text, ours


@dataclass(frozen=True)
class Growth:
    """Seconds per token (`step`) at some length of the text (`where`). attention: of its kernels alone, if measured."""

    what: str
    where: str
    step: Timing
    attention: Timing | None = None


def measure_quarters(model: Decoder, preset: Preset, compiled: bool, rounds: int) -> list[Growth]:
    """Our seconds per token over the first and the last quarter of the text, without prompt processing."""
    n = preset.new_tokens // 4
    growths = []
    for name, is_compiled in ours(compiled).items():
        moments = [token_moments(model, preset, is_compiled) for _ in range(rounds + 1)][1:]  # the first warms up
        first = Timing(tuple((times[n] - times[0]) / n for times in moments))
        last = Timing(tuple((times[-1] - times[-1 - n]) / n for times in moments))
        growths += [Growth(name, f"first {n} tokens", first), Growth(name, f"last {n} tokens", last)]
    return growths


def token_moments(model: Decoder, preset: Preset, compiled: bool) -> list[float]:
    """The time at which each new token was generated, in seconds."""
    return [time.perf_counter() for _ in greedy_text(model, preset, compiled)]


def measure_contexts(preset: Preset, rounds: int, device: torch.device) -> list[Growth]:
    """Seconds per token at the end of each context, and of attention's kernels alone on a cache of that size, eager."""
    model = preset.build(max(preset.contexts), device)
    contenders: dict[str, Callable[[], object]] = {}
    for context in preset.contexts:
        contenders[f"step {context}"] = decoding(model, 1, context, min(NEW_TOKENS, context))
        contenders[f"attention {context}"] = attention_alone(model, context)
    found = time_in_turn(contenders, rounds)
    return [
        Growth(
            EAGER,
            f"at {context} tokens",
            found[f"step {context}"].divided_by(min(NEW_TOKENS, context)),
            found[f"attention {context}"],
        )
        for context in preset.contexts
    ]


def attention_alone(model: Decoder, context: int) -> Callable[[], object]:
    """A function that runs only attention, from one token to `context` others, in all layers.

    A small KV cache then stays in the processor's cache; in a whole step, the weights would evict it.
    """
    cache = model.new_state(1, context)
    queries = []
    for layer, kept in zip(cast(list[GroupedQueryAttention], model.mixers), cache.layers, strict=True):
        shape = (1, layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim)
        queries.append(torch.randn(shape, device=kept.tensors[0].device, dtype=kept.tensors[0].dtype))

    def attend() -> None:
        for query, kept in zip(queries, cache.layers, strict=True):
            key, value = kept.tensors
            F.scaled_dot_product_attention(query, key, value)

    return inference(attend)
