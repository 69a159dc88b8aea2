"""Where the tokens of a forward pass stand, and who sees whom: what all mixers of the pass are given."""

import torch
from torch import Tensor

from .cache import Lookup, look_up
from .position import Position


class Layout:
    """What the layers of one forward pass share: where its tokens stand, RoPE's tables, lookups in caches, and masks.

    positions: `(T,)` without a cache; `(B, T)` with one, or `(1, T)` where all sequences are equally long.
    shortest, longest: bounds on how many tokens the sequences had before, as far as shapes may depend on it.
    Masks are kept per window, because all layers with the same window see the same keys.
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

    def at_layer(self, layer: int) -> "Layout":
        """The layout of a layer: this one, or the one shared by all layers that have another position encoding."""
        position = self.position.at_layer(layer)
        if position is self.position:
            return self
        if position not in self._others:
            self._others[position] = Layout(position, self.positions, self.shortest, self.longest)
        return self._others[position]

    def lookup(self, slots: int) -> Lookup:
        """Where layers with a cache of so many slots write and read."""
        if slots not in self._lookups:
            self._lookups[slots] = look_up(self.positions, slots, self.longest)
        return self._lookups[slots]

    def causal(self, window: int | None) -> bool:
        """Whether queries look at their own pass alone and a position hides nothing but what comes after it."""
        return self.longest == 0 and not self.biased and (window is None or window >= self.positions.shape[-1])

    def all_visible(self, lookup: Lookup) -> bool:
        """Whether a single new token sees all that is read: no slot is empty, and no score has a bias."""
        return self.shortest + 1 >= lookup.filled and not self.biased

    def mask(self, key_positions: Tensor, window: int | None) -> Tensor:
        """Float32 to add to the scores: the position bias, and -inf where nothing is seen.

        `(Tq, Tk)` or `(H, Tq, Tk)` without a cache; `(B, 1, Tq, Tk)` or `(B, H, Tq, Tk)` with one. A query sees the
        keys at its own position and before it; with a window, itself and `window - 1` before.
        """
        mask = self._masks.get(window)
        if mask is None:
            distance = self.positions[..., :, None] - key_positions[..., None, :]
            hidden = (distance < 0) | (key_positions < 0)[..., None, :]
            if window is not None:
                hidden = hidden | (distance >= window)
            hidden = for_heads(hidden, 2)
            bias = self.position.bias(self.positions, key_positions)
            if bias is None:
                bias = torch.zeros(hidden.shape, device=hidden.device)
            mask = bias.masked_fill(hidden, float("-inf"))
            self._masks[window] = mask
        return mask


def for_heads(x: Tensor, n_dims: int) -> Tensor:
    """`x`, with a dimension of 1 for the heads after that of the batch, if it has one before the last `n_dims`."""
    return x.unsqueeze(1) if x.ndim > n_dims else x
