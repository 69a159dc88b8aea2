"""Decoding state: a `State` for each mixer, and the length of each sequence.

Attention's is the KV cache: preallocated, and a ring where attention has a window. Position p of a sequence is stored
in slot p mod S of a layer with S slots, so that the lengths of the sequences determine what is in every slot. Keys are
stored after their rotation.
"""

from typing import Self

import torch
from torch import Tensor


class State:
    """The decoding state of one mixer: tensors whose first dimension is the batch.

    Mixers update them in place: `row` returns views, and compiled code relies on their addresses.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row(self, index: int) -> Self:
        """A view of one sequence; writes to it change this state."""
        return type(self)([tensor[index : index + 1] for tensor in self.tensors])


class DecoderState:
    """The decoding state of all layers, and the number of tokens of each sequence.

    lengths: int64 `(B,)` on the CPU, so that reading them never waits for a GPU.
    starts: where the present documents start, int64 `(B,)` on the model's device; see `AttentionContext`.
    context: maximum number of tokens per sequence; one that `slides` accepts any number.
    """

    def __init__(self, layers: list[State], lengths: Tensor, starts: Tensor, context: int, slides: bool) -> None:
        self.layers = layers
        self.lengths = lengths
        self.starts = starts
        self.context = context
        self.slides = slides

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def row(self, index: int) -> "DecoderState":
        """A view of one sequence, for its prefill; writes to it change this state."""
        rows = [layer.row(index) for layer in self.layers]
        lengths, starts = (of_all[index : index + 1] for of_all in (self.lengths, self.starts))
        return DecoderState(rows, lengths, starts, self.context, self.slides)

    def next_positions(self, batch_size: int, n_tokens: int) -> tuple[Tensor, int, int]:
        """Positions of the next `n_tokens` of each sequence, and the lengths of the shortest and the longest.

        Positions are int64 `(B, T)` on the CPU, or `(1, T)` if all sequences are equally long. Raises ValueError unless
        this is a state of `batch_size` sequences with room for `n_tokens` more in each.
        """
        lengths = self.lengths.tolist()
        if len(lengths) != batch_size:
            raise ValueError(
                f"tokens: a batch of {batch_size}, but the state is of {len(lengths)} sequences; "
                f"make one with new_state({batch_size})"
            )
        shortest, longest = min(lengths), max(lengths)
        if not self.slides and longest + n_tokens > self.context:
            raise ValueError(f"context={self.context}: the cache is for so many tokens, not for {longest + n_tokens}")
        starts = self.lengths[:1, None] if shortest == longest else self.lengths[:, None]
        return starts + torch.arange(n_tokens, device="cpu"), shortest, longest


class Lookup:
    """Where a layer with `slots` slots writes new tokens, and which keys these see.

    The tokens are at `cache_positions (B, T)`, or `(1, T)` if all sequences are equally long, and no sequence had more
    than `longest` tokens before.

    written: slots of the last new tokens, `(B, min(T, S))` or `(1, ...)`.
    filled: number of leading slots that are read: those in use by any sequence.
    in_place: whether new tokens are written before slots are read. Otherwise slots are read first, since writing to a
        ring would overwrite keys that the first new tokens still see.
    key_positions: of the keys that are read, `(B, Tk)` or `(1, Tk)`; negative for empty slots.
    """

    def __init__(self, cache_positions: Tensor, slots: int, longest: int) -> None:
        T = cache_positions.shape[1]
        self.written = cache_positions[:, -slots:] % slots
        self.in_place = T == 1 or longest + T <= slots
        self.filled = min(longest + T if self.in_place else longest, slots)
        # the last in the slots when they are read
        last = cache_positions[:, -1:] if self.in_place else cache_positions[:, :1] - 1
        self.key_positions = last - (last - torch.arange(self.filled, device=cache_positions.device)) % slots
        if not self.in_place:
            self.key_positions = torch.cat((self.key_positions, cache_positions), 1)


class LayerCache(State):
    """Keys and values of one layer, `(B, n_kv_heads, S, Dh)` each; see `new_layer_cache`.

    In int8, each is followed by its scales, float32 `(B, n_kv_heads, S, 1)` (absmax quantisation).
    """

    @property
    def slots(self) -> int:
        """Number of positions that fit, S."""
        return self.tensors[0].shape[2]

    def update(self, keys: Tensor, values: Tensor, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """Write `keys, values (B, Hkv, T, Dh)`; return those at `lookup.key_positions`, `(B, Hkv, Tk, Dh)`."""
        dtype = self.tensors[0].dtype
        if dtype == torch.int8:
            seen = self.write([*quantise(keys), *quantise(values)], lookup)
            return seen[0] * seen[1], seen[2] * seen[3]
        seen = self.write([keys.to(dtype), values.to(dtype)], lookup)
        return seen[0], seen[1]

    def write(self, new: list[Tensor], lookup: Lookup) -> list[Tensor]:
        """Write `new`, `(B, Hkv, T, ...)` per tensor; return those at `lookup.key_positions`, `(B, Hkv, Tk, ...)`."""
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
