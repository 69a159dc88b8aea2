"""The recurrences of mixers in chunks, beside those of `transformers` in plain PyTorch."""

from collections.abc import Callable, Iterator
from functools import partial

import pandas as pd
import torch
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.encoding import Position
from llama_lab.model.norm import RMSNorm
from llama_lab.model.recurrence import recur
from llama_lab.model.recurrent import Mamba2, unit

from .rows import measure

SHAPE = (8, 4, 256, 32)  # sequences, heads, tokens, width of keys and values
CHUNKS = {"head": 64, "channel": 16}


def measure_recurrence(
    rounds: int, device: torch.device, shape: tuple[int, int, int, int] = SHAPE
) -> Iterator[pd.DataFrame]:
    """Forward and backward: the gated delta rule, with a decay per head and per channel, and the mixer of Mamba 2."""
    for decay in CHUNKS:
        works = {"transformers": theirs(decay, shape, device), "ours": ours(decay, shape, device)}
        yield measure(f"decay by {decay}", "both", {name: trained(work) for name, work in works.items()}, rounds)
    works = {"transformers": their_mamba2(shape, device), "ours": our_mamba2(shape, device)}
    yield measure("mamba2", "both", {name: trained(work) for name, work in works.items()}, rounds)


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


def our_mamba2(shape: tuple[int, int, int, int], device: torch.device) -> Callable[[], Tensor]:
    """A function that computes the outputs `(B, T, D)` of a whole mixer of Mamba 2 with ours."""
    B, heads, T, width = shape
    dim, norm = heads * width // 2, partial(RMSNorm, eps=1e-5)
    mixer = Mamba2(dim, heads, heads, norm, heads, key_dim=width, value_dim=width).to(device)
    x = torch.randn(B, T, dim, device=device)
    context = AttentionContext(Position(), torch.arange(T, device=device))
    return lambda: mixer(x, context)


def their_mamba2(shape: tuple[int, int, int, int], device: torch.device) -> Callable[[], Tensor]:
    """The same with theirs."""
    B, heads, T, width = shape
    dim = heads * width // 2  # `expand` is 2
    config = Mamba2Config(hidden_size=dim, num_heads=heads, head_dim=width, state_size=width, n_groups=1, chunk_size=64)
    mixer = Mamba2Mixer(config, 0).to(device)
    x = torch.randn(B, T, dim, device=device)
    return lambda: mixer(x)


def trained(work: Callable[[], Tensor]) -> Callable[[], None]:
    """A forward and a backward pass."""
    return lambda: work().sum().backward()  # type: ignore[no-untyped-call]
