"""The interface of datasets: text, mixtures and probes."""

from collections.abc import Sequence
from copy import copy
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from llama_lab.model.loss import IGNORE

from .tokenizer import TextTokenizer

Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger]
HALVES = ("tuning", "judging")  # of the validation documents


@dataclass(frozen=True)
class SplitIndex:
    """Size of a split: documents, their UTF-8 bytes, and predicted tokens (end-of-text tokens included)."""

    documents: int
    bytes: int
    tokens: int

    def __add__(self, other: "SplitIndex") -> "SplitIndex":
        return SplitIndex(*map(sum, zip(astuple(self), astuple(other), strict=True)))


EMPTY = SplitIndex(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Index:
    """Identity and size of a dataset.

    data_hash: of the documents of both splits, in order, whatever their source. revisions: commits of published
    datasets, by their names.
    """

    vocab_size: int
    data_hash: str
    tokenizer_hash: str
    train: SplitIndex
    val: SplitIndex
    revisions: dict[str, str] = field(default_factory=dict)


class Examples(NamedTuple):
    """Inputs, and the target of each position, which is `IGNORE` where nothing is predicted: `(B, T)` each."""

    inputs: Ids
    targets: Ids


class Training(Protocol):
    """Training sequences without end; those of a step depend on the seed and the step alone."""

    def examples(self, step: int, batch_size: int, rows: slice | range = slice(None)) -> Examples:
        """Return `rows` of the batch at `step`."""


class Validation(Protocol):
    """Validation sequences. Item *i* is `(inputs, targets)`, `(seq_len,)` each. tokens: in all of them."""

    seq_len: int
    tokens: int

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> tuple[Ids, Ids]: ...

    def nothing(self) -> tuple[Ids, Ids]:
        """Return a sequence without a token to predict."""
        return np.zeros(self.seq_len, dtype=np.int64), np.full(self.seq_len, IGNORE, dtype=np.int64)


class Dataset(Protocol):
    """Sequences to train and to validate on.

    half: the one of `HALVES` that validation is limited to; None: both. builds: a line on each folder just built.
    """

    index: Index
    half: str | None = None
    builds: Sequence[str] = ()
    entropy_floor: float | None = None  # of text, nobody knows it

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the tokens."""

    @property
    def val_documents(self) -> Ids:
        """The number of the held-out document of each predicted token: `(index.val.tokens,)`; a probe is one."""
        return np.zeros(self.index.val.tokens, dtype=np.int64)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per predicted token of the validation split: bits per byte = nats per token / ln 2 / this."""
        return self.index.val.bytes / self.index.val.tokens

    def unigram_entropy(self) -> float:
        """Return the loss of the best model without context, in nats per token."""

    def validated_on(self, half: str | None) -> Self:
        """The same data with one of `HALVES` of the validation documents; None: all of them."""

    def with_tokens(self, names: Sequence[str]) -> Self:
        """The same data, in which the tokenizer has the special tokens `names`, too; see `TextTokenizer`."""
        same = copy(self)
        if names:
            tokenizer = self.tokenizer.with_tokens(names)
            same.index = replace(self.index, vocab_size=tokenizer.vocab_size, tokenizer_hash=tokenizer.hash)
            vars(same)["tokenizer"] = tokenizer  # a cached property
        return same

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless validation has a sequence of `seq_len` tokens, and training a batch of them."""

    def train_windows(self, seq_len: int, seed: int) -> Training:
        """The training sequences of `seq_len` tokens."""

    def val_windows(self, length: int) -> Validation:
        """The validation sequences of `length` tokens."""

    def val_parts(self, length: int) -> dict[str, Validation]:
        """The same for each part of a mixture, by name; of any other data, all under an empty name."""
        return {"": self.val_windows(length)}

    def epochs(self, seq_len: int, sequences: int) -> dict[str, float]:
        """How often each part of a mixture is read in so many training sequences; other text under an empty name."""
        return {}
