"""A source held in memory, and the dataset of a few hundred documents that most tests here read."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_lab.data.build import HoldOut
from llama_lab.data.dataset import Ids
from llama_lab.data.tokenizer import ByteTokenizer, TokenizerFactory
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.windows import Windows

PANGRAM = "the quick brown fox jumps over a lazy dog while Zoë counts naïve façades € 𝄞"
WORDS = [*PANGRAM.split(), "\n", "\t"]


def sentences(n: int, seed: int = 0) -> list[str]:
    """``n`` different documents of 5 to 60 words."""
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(5, 60))) for i in range(n)]


def batch_of(windows: Windows, step: int, batch_size: int, rows: slice | range = slice(None)) -> Ids:
    """Inputs and last targets of `rows` of a step: `(rows, seq_len + 1)`."""
    inputs, targets = windows.examples(step, batch_size, rows)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    return np.column_stack([inputs, targets[:, -1]])


class Documents:
    """A source that yields the given texts, and counts how often it is read."""

    def __init__(self, texts: Sequence[str]):
        self.texts = texts
        self.passes = 0

    def documents(self) -> Iterator[str]:
        self.passes += 1
        yield from self.texts

    def fingerprint(self) -> str:
        return hashlib.blake2b("\0".join(self.texts).encode()).hexdigest()

    def total_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


def dataset(
    cache_dir: Path,
    texts: Sequence[str],
    tokenizer: TokenizerFactory | None = None,
    val_fraction: float = 0.2,
    val_tokens: int | None = None,
    **bounds: Any,
) -> TokenDataset:
    """Build the token folder of ``texts``, or open it; bounds: of `HoldOut`."""
    hold_out = HoldOut(val_fraction, val_tokens, **bounds)
    return TokenDataset.open_or_build(Documents(texts), tokenizer or ByteTokenizer(), hold_out, cache_dir)


def documents_of(data: TokenDataset, split: str) -> list[str]:
    """The documents of a split, decoded from its token stream."""
    stream = getattr(data, split)[:].tolist()
    documents: list[list[int]] = []
    for token in stream[:-1]:
        if token == data.tokenizer.eot_id:
            documents.append([])
        else:
            documents[-1].append(token)
    return [data.tokenizer.decode(ids) for ids in documents]
