"""Token positions and attention masks of one forward pass, which all mixers share."""

from copy import copy

import torch
from torch import Tensor

from .cache import Lookup
from .position import Position


class Layout:
    """What the layers of one forward pass share: token positions, RoPE's tables, cache lookups and masks.

    positions: `(T,)` without a cache; `(B, T)` with one, or `(1, T)` if all sequences are equally long.
    shortest, longest: bounds on the lengths of the sequences before this pass; shapes may depend on them.
    Masks are cached by window, because all layers with the same window see the same keys.
    """

    def __init__(self, position: Position, positions: Tensor, shortest: int = 0, longest: int = 0) -> None:
        self.position = position
        self.positions = positions
        self.shortest, self.longest = shortest, longest
        self.rotation = position.rotation(for_heads(positions, 1))
        self.biased = type(position).bias is not Position.bias
        self._others: dict[Position, Layout] = {}
        self._lookups: dict[int, Lookup] = {}
        self._masks: dict[int | None, Tensor] = {}

    def of(self, position: Position) -> "Layout":
        """The layout of a layer by its encoding: this one, or another that all layers with the same other one share."""
        if position is self.position:
            return self
        if position not in self._others:
            self._others[position] = Layout(position, self.positions, self.shortest, self.longest)
        return self._others[position]

    def unshared(self) -> "Layout":
        """A copy that makes its own masks, for what runs twice, and has to do the same both times."""
        own = copy(self)
        own._masks = {}
        return own

    def lookup(self, slots: int) -> Lookup:
        """The lookup of all layers whose caches have `slots` slots."""
        if slots not in self._lookups:
            self._lookups[slots] = Lookup(self.positions, slots, self.longest)
        return self._lookups[slots]

    def needs_mask(self, window: int | None, lookup: Lookup | None) -> bool:
        """Whether attention needs `mask`: unless it is plainly causal, or one new token sees every key that is read."""
        if self.biased:
            return True
        n_tokens = self.positions.shape[-1]
        if lookup is not None and n_tokens == 1:
            return self.shortest + 1 < lookup.filled
        return self.longest > 0 or (window is not None and window < n_tokens)

    def mask(self, key_positions: Tensor, window: int | None) -> Tensor:
        """Float32 to add to the scores: the position bias, and -inf for hidden keys.

        `(Tq, Tk)` or `(H, Tq, Tk)` without a cache; `(B, 1, Tq, Tk)` or `(B, H, Tq, Tk)` with one. A query sees the
        keys up to its own position; with a window, only the last `window` of them.
        """
        if window not in self._masks:
            distance = self.positions[..., :, None] - key_positions[..., None, :]
            hidden = (distance < 0) | (key_positions < 0)[..., None, :]
            if window is not None:
                hidden = hidden | (distance >= window)
            hidden = for_heads(hidden, 2)
            bias = self.position.bias(self.positions, key_positions)
            if bias is None:
                bias = torch.zeros(hidden.shape, device=hidden.device)
            self._masks[window] = bias.masked_fill(hidden, float("-inf"))
        return self._masks[window]


def for_heads(x: Tensor, n_dims: int) -> Tensor:
    """Insert a dimension for the heads after the batch dimension, if `x` has one before its last `n_dims`."""
    return x.unsqueeze(1) if x.ndim > n_dims else x
