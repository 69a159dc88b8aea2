"""Near copies of training text among held-out documents, by the n-grams of tokens that both have."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .dataset import Tokens

GRAM_TOKENS = 13  # of an n-gram at least (Brown et al. 2020, appendix C)
GRAM_BYTES = 45  # of an n-gram on average at least, so that characters and bytes count like words
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of the hash of an n-gram, a polynomial modulo 2**64
_CHUNK = 1 << 18  # tokens hashed at once, which a processor's cache holds
_FILTER_BITS = 26

Hashes = npt.NDArray[np.uint64]


def gram_size(bytes_per_token: float) -> int:
    """How many tokens an n-gram has, in a text with so many bytes per token."""
    return max(GRAM_TOKENS, math.ceil(GRAM_BYTES / bytes_per_token))


def shares_in_training(train: Tokens, documents: Sequence[Tokens], size: int) -> list[float]:
    """For each document, the share of its n-grams of `size` tokens that `train` has; 0 for a document without any.

    `train` is read once, in chunks. Memory: some 30 bytes per token of the documents, and 64 MiB.
    """
    grams = [_hashes(tokens, size) for tokens in documents]
    sought = np.unique(np.concatenate(grams))
    if not len(sought):
        return [0.0] * len(documents)
    shift = np.uint64(64 - _FILTER_BITS)
    may_be_sought = np.zeros(1 << _FILTER_BITS, dtype=bool)  # by the first bits of a hash; rules most of them out
    may_be_sought[sought >> shift] = True
    found = np.zeros(len(sought), dtype=bool)
    for start in range(0, len(train), _CHUNK):
        hashes = _hashes(train[start : start + _CHUNK + size - 1], size)
        hashes = hashes[may_be_sought[hashes >> shift]]
        places = np.searchsorted(sought, hashes)
        is_sought = sought[np.minimum(places, len(sought) - 1)] == hashes
        found[places[is_sought]] = True
    return [float(found[np.searchsorted(sought, own)].mean()) if len(own) else 0.0 for own in grams]


def _hashes(tokens: Tokens, size: int) -> Hashes:
    """The hash of every n-gram: `(len(tokens) - size + 1,)`, or `(0,)` for fewer tokens than `size`."""
    wide = tokens.astype(np.uint64) + np.uint64(1)
    count = max(0, len(wide) - size + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(size):
        hashes *= _FACTOR
        hashes += wide[place : place + count]
    return hashes
