"""Which keys a query sees, and what all layers share in a forward pass: positions, masks, cache lookups."""

from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .encoding import Position, Relation
from .state import Lookup

LEAST_PREFIX = 2
"""Tokens that a prefix needs to differ from others: one alone sees itself in any case."""


class MaskRule(NamedTuple):
    """The rule of which keys a query sees: causal, further restricted or extended by these settings.

    `sees` works on whole tensors, and on single elements as a `mask_mod` of `flex_attention`.

    window: it sees itself and `window - 1` positions before (Mistral 7B, section 2), in an encoder also after.
    chunk: it sees its own chunk; chunks of `chunk` positions are counted from position 0 (the local layers of Llama 4).
    prefix: it sees the first `prefix` positions even if they follow it, as a prefix language model does (Raffel et al.
        2020, section 3.2.1), or a number for each sequence. In an encoder, it sees only these and itself.
    causal: whether it sees no later keys but those of a prefix; False in an encoder.
    """

    window: int | None = None
    chunk: int | None = None
    prefix: int | Tensor | None = None
    causal: bool = True

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query at position `query` sees a key at `key`: bool, which broadcasts to both together.

        Positions are those in the query's document. No query sees negative ones: empty slots, and earlier documents.
        """
        distance = query - key if self.causal else (query - key).abs()
        seen = distance >= 0
        if self.prefix is not None:
            seen = (seen if self.causal else distance == 0) | (key < self.prefix)
        if self.window is not None:
            seen = seen & (distance < self.window)
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen & (key >= 0)

    def span(self, first: int, last: int, n_keys: int) -> slice:
        """A range of `n_keys` keys that has all that queries at positions from `first` to before `last` see."""
        if not self.causal or isinstance(self.prefix, Tensor):
            return slice(n_keys)
        nearest = 0 if self.window is None else max(0, first - self.window + 1)
        if self.chunk is not None:
            nearest = max(nearest, first // self.chunk * self.chunk)
        return slice(nearest, last) if self.prefix is None else slice(max(last, self.prefix))

    @property
    def reach(self) -> int | None:
        """Largest number of keys up to itself that a query sees, the slots that a cache needs; None: unlimited."""
        return self.chunk if self.window is None else self.window

    def mean_keys(self, length: int) -> float:
        """Mean number of keys that a query in a sequence of `length` tokens sees; not for a window with chunks."""
        reach = min(length, self.reach or length)
        before = triangles(length, reach) if self.chunk else triangles(reach, reach) + (length - reach) * reach
        if not self.causal:
            return (2 * before - length) / length
        assert not isinstance(self.prefix, Tensor)
        prefix = min(length, self.prefix or 0)
        ahead = triangles(prefix, min(self.chunk or length, length)) - prefix
        return (before + ahead) / length


CAUSAL = MaskRule()


def triangles(length: int, size: int) -> int:
    """Number of causal (query, key) pairs when a sequence of `length` tokens is cut into chunks of `size`."""
    whole, rest = divmod(length, size)
    return (whole * size * (size + 1) + rest * (rest + 1)) // 2


class AttentionContext:
    """Shared by all layers in a forward pass: token positions, RoPE's tables, cache lookups and masks.

    cache_positions: of the tokens in their sequences, `(T,)` without a cache; `(B, T)` with one, or `(1, T)` if all
    sequences are equally long.
    starts: where in the sequences their documents start, `(B, T)`; None if tokens see other documents.
    prefix: of each sequence, `(B,)`, in place of the layers' own; None: theirs. See `MaskRule`.
    positions: those of the tokens in their documents, or in their sequences.
    shared: what earlier layers pass on to later ones, by name.
    shortest, longest: bounds on the lengths of the sequences before this pass; shapes may depend on them.
    Masks are cached by rule and dtype, because all layers with the same rule see the same keys.
    """

    def __init__(
        self,
        position: Position,
        at: Tensor,
        shortest: int = 0,
        longest: int = 0,
        starts: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> None:
        self.position = position
        self.cache_positions, self.starts, self.prefix = at, starts, prefix
        self.positions = at if starts is None else at - starts
        self.shortest, self.longest = shortest, longest
        self.rotation = position.rotation(for_heads(self.positions, 1))
        self.biased = type(position).bias is not Position.bias
        self.shared: dict[str, Any] = {}
        self._others: dict[Position, AttentionContext] = {}
        self._lookups: dict[int, Lookup] = {}
        self._masks: dict[tuple[MaskRule, torch.dtype], Tensor] = {}

    def of(self, position: Position) -> "AttentionContext":
        """The context for layers with this position encoding; layers with the same encoding share one."""
        if position is self.position:
            return self
        if position not in self._others:
            bounds = (self.shortest, self.longest)
            own = AttentionContext(position, self.cache_positions, *bounds, self.starts, self.prefix)
            own.shared, own._lookups = self.shared, self._lookups
            if not (own.biased or self.biased):
                own._masks = self._masks
            self._others[position] = own
        return self._others[position]

    def unshared(self) -> "AttentionContext":
        """A copy with an empty mask cache, for activation checkpointing, whose two passes must do the same work."""
        own = copy(self)
        own._masks = {}
        return own

    def lookup(self, slots: int) -> Lookup:
        """The lookup of all layers whose caches have `slots` slots."""
        if slots not in self._lookups:
            self._lookups[slots] = Lookup(self.cache_positions, slots, self.longest)
        return self._lookups[slots]

    def relation(self, keys: Tensor) -> Relation | None:
        """The position encoding's vectors for the tokens and the keys at these positions."""
        relation = self.position.relation(self.cache_positions, keys)
        return relation and relation._replace(rows=for_heads(relation.rows, 2))

    def key_positions(self, lookup: Lookup | None) -> Tensor:
        """Positions of the keys that the tokens may attend to."""
        return self.cache_positions if lookup is None else lookup.key_positions

    def needs_mask(self, rule: MaskRule, lookup: Lookup | None) -> bool:
        """Whether an explicit mask is needed; not if attention is plainly causal, or one new token sees all keys."""
        if self.biased or self.starts is not None or self.prefix is not None:
            return True
        n_tokens = self.cache_positions.shape[-1]
        if lookup is not None and n_tokens == 1:
            return self.shortest + 1 < lookup.filled or (rule.chunk is not None and self.longest >= rule.chunk)
        return self.longest > 0 or rule.prefix is not None or (rule.reach is not None and rule.reach < n_tokens)

    def keys_seen(self, rule: MaskRule, n_keys: int, first: int, last: int) -> slice:
        """A range of `n_keys` keys outside of which the tokens from one index to before another see none."""
        if self.longest > 0 or self.prefix is not None:  # slots of a cache are in no order
            return slice(n_keys)
        return (rule if self.starts is None else rule._replace(chunk=None)).span(first, last, n_keys)

    def mask(self, rule: MaskRule, lookup: Lookup | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The additive mask: position bias, and -inf for hidden keys.

        `(Tq, Tk)` or `(H, Tq, Tk)` without a cache; `(B, 1, Tq, Tk)` or `(B, H, Tq, Tk)` with one, with documents, or
        with prefixes of sequences.
        """
        if (rule, dtype) in self._masks:
            return self._masks[rule, dtype]
        if dtype == torch.float32:
            mask = self.mask_of(rule, self.key_positions(lookup))
        else:
            mask = self.mask(rule, lookup).to(dtype)
        if dtype == torch.float32 or not mask.requires_grad:  # gradients of layers are to add up in float32
            self._masks[rule, dtype] = mask
        return mask

    def mask_of(self, rule: MaskRule, keys: Tensor) -> Tensor:
        """The float32 mask for keys at the positions `keys`."""
        start = 0 if self.starts is None else self.starts[..., None]
        if self.prefix is not None:
            rule = rule._replace(prefix=self.prefix[:, None, None])
        seen = for_heads(rule.sees(self.positions[..., None], keys[..., None, :] - start), 2)
        bias = self.position.bias(self.cache_positions, keys)
        if bias is None:
            bias = torch.zeros(seen.shape, device=seen.device)
        return bias.masked_fill(~seen, float("-inf"))


def for_heads(x: Tensor, n_dims: int) -> Tensor:
    """Insert a dimension for the heads after the batch dimension, if `x` has one before its last `n_dims`."""
    return x.unsqueeze(1) if x.ndim > n_dims else x
