"""Attention in blocks of queries, in plain PyTorch.

On a CPU, PyTorch's fused kernel gains nothing from bf16: its backward pass takes as long as in float32, where matrix
products take a fraction (docs/measurements.md). So in bf16 each block of queries is multiplied with the keys that it
may see. Memory grows with the square of the context, up to a bound.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BLOCK = 128  # queries; twice as many where there are more than FEW_KEYS
FEW_KEYS = 512
LEAST_QUERIES = 32  # fewer are as fast in one fused call
LARGEST = 2**28  # bytes of the weights of one layer, which training keeps


def blocks_pay(shape: Sequence[int], device: str, kind: torch.dtype) -> bool:
    """Whether blocks are faster than the fused kernel for scores of `shape (B, H, Tq, Tk)`, and fit into memory."""
    fits = math.prod(shape) * kind.itemsize <= LARGEST
    return device == "cpu" and kind == torch.bfloat16 and shape[2] >= LEAST_QUERIES and fits


def compute_type(x: Tensor) -> torch.dtype:
    """The type in which matrices like `x` are multiplied: autocast's, where it is on."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else x.dtype


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    keys_seen: Callable[[int, int], slice],
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, eq. 1), `(B, H, Tq, Dv)`.

    `query (B, H, Tq, Dh)`, `key (B, Hkv, Tk, Dh)`, `value (B, Hkv, Tk, Dv)`, additive `mask` that broadcasts to
    `(B, H, Tq, Tk)`. keys_seen: a range of keys outside of which the queries from one index to before another see
    none. The softmax sums in float32 in any type.
    """
    B, H, Tq, Dh = query.shape
    kind, scale = compute_type(query), Dh**-0.5 if scale is None else scale
    # The query heads that share a key head are rows of one product.
    queries = query.to(kind).reshape(B * key.shape[1], -1, Tq, Dh)
    keys, values = (x.to(kind).flatten(0, 1) for x in (key, value))
    mask = mask.to(kind).expand(B, H, -1, -1)
    size = BLOCK if keys.shape[1] <= FEW_KEYS else 2 * BLOCK
    mixed = []
    with torch.autocast(query.device.type, enabled=False):
        for first in range(0, Tq, size):
            rows = slice(first, min(first + size, Tq))
            seen = keys_seen(rows.start, rows.stop)
            heads = queries[:, :, rows].flatten(1, 2)
            hidden = mask[:, :, rows, seen].reshape(*heads.shape[:2], -1)
            scores = torch.baddbmm(hidden, heads, keys[:, seen].transpose(1, 2), alpha=scale)
            mixed.append(torch.bmm(scores.softmax(-1), values[:, seen]).view(B, H, -1, value.shape[3]))
    return torch.cat(mixed, 2)
