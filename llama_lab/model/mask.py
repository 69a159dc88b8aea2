"""Which keys a query sees: one rule of positions, whatever the kernel.

A kernel takes it as its own causal mode, where that is all; as a mask that is added to the scores, see `Layout.mask`;
or, as `Mask.sees` works on single elements, as the `mask_mod` of `flex_attention`.
"""

from typing import NamedTuple

from torch import Tensor


class Mask(NamedTuple):
    """A query sees the keys up to its own position, and no others, but for what these say together.

    window: it sees itself and `window - 1` positions before (Mistral 7B, section 2).
    chunk: it sees its own chunk, of `chunk` positions from 0 on, from position 0 (the local layers of Llama 4).
    prefix: it sees the first `prefix` positions even if they follow it, as a prefix language model does (Raffel et al.
        2020, section 3.2.1).
    """

    window: int | None = None
    chunk: int | None = None
    prefix: int | None = None

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query at position `query` sees a key at `key`: bool, in the shape of both together.

        Positions are those in the query's document. No query sees negative ones: empty slots, and earlier documents.
        """
        seen = key <= query
        if self.prefix is not None:
            seen = seen | (key < self.prefix)
        if self.window is not None:
            seen = seen & (query - key < self.window)
        if self.chunk is not None:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen & (key >= 0)

    @property
    def reach(self) -> int | None:
        """The most keys that a query sees up to its own position, and so all that a cache needs; None for any."""
        return self.chunk if self.window is None else self.window

    def mean_keys(self, length: int) -> float:
        """Mean number of keys that a query in a sequence of `length` tokens sees; not for a window with chunks."""
        reach = min(length, self.reach or length)
        before = triangles(length, reach) if self.chunk else triangles(reach, reach) + (length - reach) * reach
        prefix = min(length, self.prefix or 0)
        ahead = triangles(prefix, min(self.chunk or length, length)) - prefix
        return (before + ahead) / length


CAUSAL = Mask()


def triangles(length: int, size: int) -> int:
    """Pairs of a query and a key that does not follow it, within parts of `size` of a sequence of `length` tokens."""
    whole, rest = divmod(length, size)
    return (whole * size * (size + 1) + rest * (rest + 1)) // 2
