"""The interface of position encodings: four hooks, of which an encoding overrides one or more.

`embed` adds to the token embeddings (sinusoidal, learned), `rotation` rotates queries and keys (RoPE), `bias` is added
to the attention scores (ALiBi, relative), and `relation` has vectors that are added to keys and values by distance
(Shaw). Positions are integer tensors `(..., T)`, counted from 0: `(T,)` for all sequences, `(B, T)` where each has its
own.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Tables(NamedTuple):
    """Cosines and sines of the angles by which pairs of dimensions are rotated; see `Rotation`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class Rotation(Tables):
    """RoPE's tables for some positions; the first R of Dh dimensions are rotated.

    cos, sin: float32 `(T, R / 2)`, or `(B, 1, T, R / 2)` where each sequence has positions of its own.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate queries or keys `x (B, H, T, Dh)`, in float32 whatever the dtype of `x`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # a compiler fuses both directions by itself
            return self.turn(x.float(), self.sin).type_as(x)
        return Rotate.apply(x.float(), self).type_as(x)  # type: ignore[no-any-return, no-untyped-call]

    def turn(self, x: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` given cosine factors and `sin`, in three passes over memory without copies."""
        half = self.cos.shape[-1]
        if self.interleaved:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            first, second = slice(0, half), slice(half, 2 * half)
        turned = x * self.factors(x.shape[-1])
        turned[..., first].addcmul_(x[..., second], sin, value=-1)
        turned[..., second].addcmul_(x[..., first], sin)
        return turned

    def factors(self, head_dim: int) -> Tensor:
        """The cosine by which each dimension of a head is multiplied, `(..., T, Dh)`: one where it is not rotated."""
        found: Tensor | None = vars(self).get("_factors")  # shared by all layers
        if found is None:
            found = self.cos.repeat_interleave(2, -1) if self.interleaved else torch.cat((self.cos, self.cos), -1)
            if found.shape[-1] < head_dim:
                found = F.pad(found, (0, head_dim - found.shape[-1]), value=1.0)
            if not torch.compiler.is_compiling():  # which forbids it where activations are recomputed
                self._factors = found
        return found


class Rotate(torch.autograd.Function):
    """Autograd function of a rotation; its backward pass is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate `x (B, H, T, Dh)`."""
        ctx.rotation = rotation
        return rotation.turn(x, rotation.sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of `x`."""
        return ctx.rotation.turn(grad, -ctx.rotation.sin), None


def rotate(rotation: Rotation, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; in one call for a single token, where call overhead dominates.

    A user's rotation may treat heads differently, and is called once for queries and once for keys.
    """
    if type(rotation) is not Rotation or query.shape[2] > 1 or torch.is_grad_enabled():
        return rotation(query), rotation(key)
    query, key = rotation(torch.cat((query, key), 1)).split_with_sizes((query.shape[1], key.shape[1]), 1)
    return query, key


class Relation(NamedTuple):
    """Vectors to add to the key and the value that a query sees, one of R for each pair (Shaw et al. 2018, section 3).

    rows: which of them, int64 `(..., Tq, Tk)`. keys, values: the vectors, `(H or 1, R, Dh)`; values may be None. Keys
    beyond Tk have none.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor | None

    def scores(self, query: Tensor, n_keys: int) -> Tensor:
        """Products of `query (B, H, Tq, Dh)` and the vectors of its keys `(B, H, Tq, n_keys)`, as in section 3.3."""
        products = query @ self.keys.type_as(query).transpose(1, 2)
        scores = products.gather(3, self.rows.expand(*products.shape[:3], -1))
        more = n_keys - scores.shape[3]
        return F.pad(scores, (0, more)) if more else scores

    def mix(self, mixed: Tensor, weights: Tensor) -> Tensor:
        """Add the vectors to values that `weights (B, H, Tq, n_keys)` have `mixed (B, H, Tq, Dh)`."""
        if self.values is None:
            return mixed
        rows = self.rows.expand(*weights.shape[:3], -1)
        by_row = weights.new_zeros(*weights.shape[:3], self.values.shape[1])
        by_row = by_row.scatter_add(3, rows, weights[..., : rows.shape[3]])
        return mixed + by_row @ self.values.type_as(weights)


class Position(nn.Module):
    """Base class of position encodings, and no encoding (NoPE, Kazemnejad et al. 2023): all hooks do nothing.

    An encoding is built with those of the decoder's sizes that its `__init__` names, and so with `layers`, the numbers
    of those in which it acts, and `causal`, which is False in an encoder. One instance serves them all; override
    `at_layer` to change that. max_positions: how many positions it has; None for no limit.
    """

    max_positions: int | None = None

    def at_layer(self, layer: int) -> "Position":
        """The encoding whose other hooks act in a layer, counted from 0: itself, or a submodule of it."""
        return self

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add to the token embeddings `x (B, T, D)`."""
        return x

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Tables that rotate queries and keys, or None; `positions (B, 1, T)` leave a dimension for the heads."""
        return None

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """Float32 `(..., H, Tq, Tk)` to add to the scores, or None. Positions are the window's, also with documents."""
        return None

    def relation(self, query_positions: Tensor, key_positions: Tensor) -> Relation | None:
        """Vectors to add to keys and values, or None; `rows` of them `(..., Tq, Tk)`, by distance."""
        return None


HOOKS = ("rotation", "bias", "relation")
"""What mixers apply. What `embed` adds, every part of the model reads."""


def has_hook(position: Position, hook: str) -> bool:
    """Whether an encoding has one of HOOKS."""
    return getattr(type(position), hook) is not getattr(Position, hook)
