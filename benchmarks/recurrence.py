"""The recurrences of mixers in chunks, beside those of `transformers` in plain PyTorch."""

from collections.abc import Callable, Iterator

import pandas as pd
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from llama_lab.model.recurrence import recur
from llama_lab.model.recurrent import unit

from .rows import measure

SHAPE = (8, 4, 256, 32)  # sequences, heads, tokens, width of keys and values
CHUNKS = {"head": 64, "channel": 16}


def measure_recurrence(
    rounds: int, device: torch.device, shape: tuple[int, int, int, int] = SHAPE
) -> Iterator[pd.DataFrame]:
    """The gated delta rule, forward and backward, with a decay per head and per channel."""
    for decay in CHUNKS:
        works = {"transformers": theirs(decay, shape, device), "ours": ours(decay, shape, device)}
        yield measure(f"decay by {decay}", "both", {name: trained(work) for name, work in works.items()}, rounds)


def inputs(decay: str, shape: tuple[int, int, int, int], device: torch.device) -> list[Tensor]:
    """Queries, keys, values, decays and betas, `(B, H, T, ...)`."""
    torch.manual_seed(0)
    vectors = [torch.randn(shape, device=device) for _ in range(3)]
    others = [torch.rand(*shape[:3], width, device=device) for width in (shape[3] if decay == "channel" else 1, 1)]
    return [x.requires_grad_() for x in (*vectors, -others[0], others[1])]


def ours(decay: str, shape: tuple[int, int, int, int], device: torch.device) -> Callable[[], Tensor]:
    """A function that computes the outputs `(B, H, T, D)` with ours."""
    query, key, value, rates, beta = inputs(decay, shape, device)
    state, scale = torch.zeros(*shape[:2], shape[3], shape[3], device=device), shape[3] ** -0.5
    return lambda: recur(unit(query) * scale, unit(key), value, rates, beta, state, chunk_size=CHUNKS[decay])[0]


def theirs(decay: str, shape: tuple[int, int, int, int], device: torch.device) -> Callable[[], Tensor]:
    """The same with theirs, which normalises queries and keys itself."""
    query, key, value, rates, beta = (x.transpose(1, 2) for x in inputs(decay, shape, device))
    function = chunk_kimi_delta_attention if decay == "channel" else torch_chunk_gated_delta_rule
    rates = rates if decay == "channel" else rates[..., 0]
    given = {"g": rates, "beta": beta[..., 0], "initial_state": None, "output_final_state": False}
    return lambda: function(query, key, value, **given, use_qk_l2norm_in_kernel=True)[0].transpose(1, 2)


def trained(work: Callable[[], Tensor]) -> Callable[[], None]:
    """A forward and a backward pass."""
    return lambda: work().sum().backward()  # type: ignore[no-untyped-call]
