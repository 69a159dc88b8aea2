"""What a decoder costs: parameters, FLOPs and KV-cache bytes, read off its modules.

Nothing is computed: a decoder built under `torch.device("meta")` answers for any size, in seconds and without memory.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .attention import GroupedQueryAttention
from .decoder import Decoder


@dataclass(frozen=True)
class Cost:
    """Costs of one decoder at one sequence length.

    params: parameters, tied ones once. params_non_embedding: without the token, position and bias tables and the head.
    flops_per_token: twice the multiply-adds of one forward pass's matrix products, averaged over a sequence; attention
        counts only the keys that a query sees (causal, and within the window).
    flops_per_token_dense: the same with all keys of the sequence counted for every query, as kernels without a causal
        discount compute it.
    train_flops_per_token: forward and backward, three times `flops_per_token`; recomputation is not counted.
    kv_bytes_per_token: what one more token adds to the KV cache before any window is full.
    kv_bytes: the KV cache of one sequence of `seq_len` tokens, windowed layers holding their window.
    """

    seq_len: int
    params: int
    params_non_embedding: int
    flops_per_token: float
    flops_per_token_dense: float
    train_flops_per_token: float
    kv_bytes_per_token: int
    kv_bytes: int


def measure_cost(model: Decoder, seq_len: int | None = None, kv_dtype: torch.dtype = torch.bfloat16) -> Cost:
    """The costs of `model` on sequences of `seq_len` tokens (`max_seq_len` unless told), with KV caches of `kv_dtype`.

    Source: Kaplan et al. 2020, table 1, with attention's discount and grouped heads made exact.
    """
    seq_len = seq_len or model.max_seq_len
    params = sum(p.numel() for p in model.parameters())
    ends = sum(p.numel() for module in (model.embedding, model.position) for p in module.parameters())
    if model.embedding.norm is not None:
        ends -= sum(p.numel() for p in model.embedding.norm.parameters())
    linear = 2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    layers = model.attention_layers
    flops = linear + sum(score_flops(layer, mean_visible_keys(seq_len, layer.context(seq_len))) for layer in layers)
    widths = [2 * layer.n_kv_heads * kv_bytes_per_head(layer.head_dim, kv_dtype) for layer in layers]
    return Cost(
        seq_len=seq_len,
        params=params,
        params_non_embedding=params - ends,
        flops_per_token=flops,
        flops_per_token_dense=linear + sum(score_flops(layer, seq_len) for layer in layers),
        train_flops_per_token=3 * flops,
        kv_bytes_per_token=sum(widths),
        kv_bytes=sum(width * layer.context(seq_len) for width, layer in zip(widths, layers, strict=True)),
    )


def kv_bytes_per_head(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's key, or value, in one head: its elements, and for int8 a float32 scale."""
    return head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0)


def mean_visible_keys(seq_len: int, window: int) -> float:
    """How many keys a query sees on average: positions 1 to `window` see as many, all later ones `window`."""
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def score_flops(layer: GroupedQueryAttention, keys: float) -> float:
    """FLOPs per token of one layer's two products with `keys` keys: queries with keys, weights with values."""
    return 2 * 2 * layer.n_heads * layer.head_dim * keys
