"""Attention's state, the KV cache: preallocated, one per layer, a ring where attention has a window.

Position p of a sequence is stored in slot p mod S of a layer with S slots, so that the lengths of the sequences
determine what is in every slot. Keys are stored after their rotation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .state import State


class Lookup(NamedTuple):
    """Where layers with S slots write the new tokens of a pass, and which keys its queries read.

    slots: of the last new tokens, `(B, min(T, S))`, or `(1, ...)` if all sequences are equally long.
    filled: number of leading slots that are read: those in use by any sequence.
    in_place: whether new tokens are written before slots are read. Otherwise slots are read first, since writing to a
        ring would overwrite keys that the first new tokens still see.
    key_positions: of the keys that are read, `(B, Tk)` or `(1, Tk)`; negative for empty slots.
    """

    slots: Tensor
    filled: int
    in_place: bool
    key_positions: Tensor


def look_up(positions: Tensor, slots: int, longest: int) -> Lookup:
    """The lookup of tokens at `positions (B, T)` or `(1, T)`, where no sequence had more than `longest` before them."""
    T = positions.shape[1]
    in_place = T == 1 or longest + T <= slots
    filled = min(longest + T if in_place else longest, slots)
    last = positions[:, -1:] if in_place else positions[:, :1] - 1  # the last position in the slots when they are read
    key_positions = last - (last - torch.arange(filled, device=positions.device)) % slots
    if not in_place:
        key_positions = torch.cat((key_positions, positions), 1)
    return Lookup(positions[:, -slots:] % slots, filled, in_place, key_positions)


class LayerCache(State):
    """Keys and values of one layer, each `(B, n_kv_heads, S, Dh)`; see `new_layer_cache`."""

    @property
    def slots(self) -> int:
        """Number of positions that fit, S."""
        return self.tensors[0].shape[2]

    def encode(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Keys and values `(B, Hkv, T, Dh)` as they are stored."""
        return [keys.type_as(self.tensors[0]), values.type_as(self.tensors[1])]

    def decode(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values `(B, Hkv, Tk, Dh)` from what is stored."""
        keys, values = tensors
        return keys, values

    def update(self, keys: Tensor, values: Tensor, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """Write `keys, values (B, Hkv, T, Dh)`; return those at `lookup.key_positions`, `(B, Hkv, Tk, Dh)`."""
        new = self.encode(keys, values)
        if lookup.in_place:
            self._write(new, lookup.slots)
        seen = [tensor[:, :, : lookup.filled] for tensor in self.tensors]
        if not lookup.in_place:
            seen = [torch.cat(pair, 2) for pair in zip(seen, new, strict=True)]
            self._write(new, lookup.slots)
        return self.decode(seen)

    def _write(self, new: list[Tensor], slots: Tensor) -> None:
        """Write the last new tokens to their slots, `(B, n)` or `(1, n)`."""
        index = slots[:, None, :, None]
        for tensor, source in zip(self.tensors, new, strict=True):
            kept = source[:, :, -index.shape[2] :]
            tensor.scatter_(2, index.expand(kept.shape), kept)


class Int8LayerCache(LayerCache):
    """Keys and values rounded to int8, with one float32 scale for each head and token (absmax quantisation)."""

    def encode(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Keys and values `(B, Hkv, T, Dh)` as int8, and their scales `(B, Hkv, T, 1)`."""
        return [*quantise(keys), *quantise(values)]

    def decode(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Float32 keys and values `(B, Hkv, Tk, Dh)`."""
        keys, key_scales, values, value_scales = tensors
        return keys * key_scales, values * value_scales


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x (..., n)` as int8 `(..., n)` and float32 scales `(..., 1)`; their product is `x` to within half a scale."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scales


def new_layer_cache(
    batch_size: int, n_kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> LayerCache:
    """An empty cache. Raises ValueError unless `dtype` is int8, or a floating dtype of 16 bits or more."""

    def column(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch_size, n_kv_heads, slots, width, dtype=dtype, device=device)

    if dtype == torch.int8:
        return Int8LayerCache([column(n, kind) for n, kind in ((head_dim, dtype), (1, torch.float32)) * 2])
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dtype={dtype}: cannot hold keys and values; choose a float of 16 bits or more, or int8")
    return LayerCache([column(head_dim, dtype), column(head_dim, dtype)])
