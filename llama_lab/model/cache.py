"""Attention's state, the KV cache: preallocated, one per layer, a ring where attention has a window.

Position p of a sequence is stored in slot p mod S of a layer with S slots, so that the lengths of the sequences
determine what is in every slot. Keys are stored after their rotation.
"""

import torch
from torch import Tensor

from .state import State


class Lookup:
    """Where a layer with `slots` slots writes new tokens, and which keys these see.

    The tokens are at `places (B, T)`, or `(1, T)` if all sequences are equally long, and no sequence had more than
    `longest` tokens before.

    written: slots of the last new tokens, `(B, min(T, S))` or `(1, ...)`.
    filled: number of leading slots that are read: those in use by any sequence.
    in_place: whether new tokens are written before slots are read. Otherwise slots are read first, since writing to a
        ring would overwrite keys that the first new tokens still see.
    key_places: of the keys that are read, `(B, Tk)` or `(1, Tk)`; negative for empty slots.
    """

    def __init__(self, places: Tensor, slots: int, longest: int) -> None:
        T = places.shape[1]
        self.written = places[:, -slots:] % slots
        self.in_place = T == 1 or longest + T <= slots
        self.filled = min(longest + T if self.in_place else longest, slots)
        last = places[:, -1:] if self.in_place else places[:, :1] - 1  # the last in the slots when they are read
        self.key_places = last - (last - torch.arange(self.filled, device=places.device)) % slots
        if not self.in_place:
            self.key_places = torch.cat((self.key_places, places), 1)


class LayerCache(State):
    """Keys and values of one layer, `(B, n_kv_heads, S, Dh)` each; see `new_layer_cache`.

    In int8, each is followed by its scales, float32 `(B, n_kv_heads, S, 1)` (absmax quantisation).
    """

    @property
    def slots(self) -> int:
        """Number of positions that fit, S."""
        return self.tensors[0].shape[2]

    def update(self, keys: Tensor, values: Tensor, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """Write `keys, values (B, Hkv, T, Dh)`; return those at `lookup.key_places`, `(B, Hkv, Tk, Dh)`."""
        dtype = self.tensors[0].dtype
        if dtype == torch.int8:
            seen = self.write([*quantise(keys), *quantise(values)], lookup)
            return seen[0] * seen[1], seen[2] * seen[3]
        seen = self.write([keys.to(dtype), values.to(dtype)], lookup)
        return seen[0], seen[1]

    def write(self, new: list[Tensor], lookup: Lookup) -> list[Tensor]:
        """Write `new`, `(B, Hkv, T, ...)` for each tensor; return those at `lookup.key_places`, `(B, Hkv, Tk, ...)`."""
        seen = [tensor[:, :, : lookup.filled] for tensor in self.tensors]  # views, so they show what is written below
        if not lookup.in_place:
            seen = [torch.cat(pair, 2) for pair in zip(seen, new, strict=True)]
        index = lookup.written[:, None, :, None]
        for tensor, source in zip(self.tensors, new, strict=True):
            kept = source[:, :, -index.shape[2] :]
            tensor.scatter_(2, index.expand(kept.shape), kept)
        return seen


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x (..., n)` as int8 `(..., n)` and float32 scales `(..., 1)`; their product is `x` to within half a scale."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scales


def new_layer_cache(
    batch_size: int,
    n_kv_heads: int,
    slots: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    parts: int = 2,
) -> LayerCache:
    """An empty cache of keys and values, or of as many `parts`.

    Raises ValueError unless `dtype` is int8, or a floating dtype of 16 bits or more.
    """
    if dtype != torch.int8 and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise ValueError(f"dtype={dtype}: cannot hold keys and values; choose a float of 16 bits or more, or int8")
    columns = [(head_dim, dtype)]
    if dtype == torch.int8:
        columns.append((1, torch.float32))  # the scales
    shape = (batch_size, n_kv_heads, slots)
    return LayerCache([torch.zeros(*shape, width, dtype=kind, device=device) for width, kind in columns * parts])
