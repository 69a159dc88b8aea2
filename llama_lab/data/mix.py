"""Mixtures: windows of several corpora in exact shares, in an order that depends on the seed and the step alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil, floor, lcm
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from llama_lab.util.errors import ConfigError
from llama_lab.util.files import report_disk_errors
from llama_lab.util.formatting import conjoin

from .build import train_on_all
from .index import FORMAT_VERSION, TOKENIZER_NAME, Index, SplitIndex, TokenStream, json_hash
from .source import ReportProgress, Source
from .tokenizer import TextTokenizer, TokenizerFactory, VocabularyFrom, sample_bytes
from .tokens import UNDIVIDED, TokenDataset, check_val_tokens, locked
from .windows import Ids, Tokens, ValWindows, Windows, count_train_windows

Order = npt.NDArray[np.intp]
"""The part of each window of a period: `(windows,)`."""


def balanced_order(shares: list[Fraction]) -> Order:
    """The parts of the windows of one period, which holds each part's share exactly.

    At every prefix of n windows, part i has had fewer than one window more or less than `shares[i] * n` (Tijdeman 1980,
    The chairman assignment problem: the discrepancy is at most 1 - 1 / (2P - 2) for P parts). shares: they add up to 1.
    """
    period = lcm(*(share.denominator for share in shares))
    weights = [int(share * period) for share in shares]
    slack = max(2 * len(shares) - 2, 1)
    due = [0] * len(shares)  # windows that each part is behind, times the period
    order = np.empty(period, dtype=np.intp)
    for n in range(period):
        due = [behind + weight for behind, weight in zip(due, weights, strict=True)]
        ready = [i for i, behind in enumerate(due) if slack * behind >= period]
        order[n] = chosen = min(ready, key=lambda i: Fraction(period * (slack - 1) - slack * due[i], weights[i]))
        due[chosen] -= period
    return order


class MixedWindows(Windows):
    """Training sequences of several parts in exact shares; each part is read as it would be alone.

    A part that runs out is read again, in another order, as `TrainWindows` does.
    """

    def __init__(self, parts: list[Windows], shares: list[Fraction]):
        self._parts = parts
        self._order = balanced_order(shares)
        # Of each part, how many windows it has had before each place of a period, `(parts, period)`; and in all of it.
        of_part = self._order == np.arange(len(parts))[:, None]
        self._before = np.cumsum(of_part, axis=1) - of_part
        self._per_period = of_part.sum(axis=1)

    def take(self, sequences: list[int]) -> Ids:
        """Return these sequences of the endless series: `(sequences, seq_len + 1)`."""
        return np.stack([self._sequence(sequence) for sequence in sequences])

    def _sequence(self, sequence: int) -> Ids:
        periods, place = divmod(sequence, len(self._order))
        part = self._order[place]
        own = periods * int(self._per_period[part]) + int(self._before[part, place])
        (window,) = self._parts[part].take([own])
        return window  # type: ignore[no-any-return]


class MixedDataset(TokenDataset):
    """Token folders of several `parts`, by name, of the same tokenizer, and the share of the training tokens of each.

    `val` is the parts' validation texts one after the other.
    """

    def __init__(self, parts: Mapping[str, TokenDataset], shares: Mapping[str, Fraction]):
        first = next(iter(parts.values()))
        super().__init__(first.folder, _joint_index(parts, shares))
        self.parts = dict(parts)
        self.shares = dict(shares)
        self.half = next(iter(parts.values())).half

    def validated_on(self, half: str | None) -> "MixedDataset":
        """The same with this half of each part's validation documents."""
        return MixedDataset({name: part.validated_on(half) for name, part in self.parts.items()}, self.shares)

    @property
    def train(self) -> TokenStream:
        """A mixture has none; raises TypeError."""
        raise TypeError("a mixture has no training stream of its own; use train_windows")

    @cached_property
    def val(self) -> Tokens:
        """The parts' validation tokens one after the other, `(index.val.tokens + 1,)`; an end-of-text between two."""
        streams = [part.val for part in self.parts.values()]
        return np.concatenate([streams[0], *(stream[1:] for stream in streams[1:])])

    def train_windows(self, seq_len: int, seed: int) -> MixedWindows:
        """The windows of all parts."""
        return MixedWindows([p.train_windows(seq_len, seed) for p in self.parts.values()], [*self.shares.values()])

    def val_parts(self, length: int) -> dict[str, ValWindows]:
        """The windows of `val` for each part; one in which two parts meet is in both, with the targets of each."""
        ends = [*accumulate((part.index.val.tokens for part in self.parts.values()), initial=0)]
        spans = pairwise(ends)
        return {name: ValWindows(self.val, length, range(*span)) for name, span in zip(self.parts, spans, strict=True)}

    def epochs(self, seq_len: int, sequences: int) -> dict[str, float]:
        """How often each part is read in so many training sequences."""
        windows = {n: count_train_windows(part.index.train.tokens, seq_len) for n, part in self.parts.items()}
        return {name: float(share) * sequences / windows[name] for name, share in self.shares.items()}

    def require_train_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless every part has windows for its share of a batch."""
        for name, part in self.parts.items():
            try:
                part.require_train_windows(seq_len, ceil(self.shares[name] * batch_size))
            except ConfigError as error:
                raise ConfigError(f"data.mix.{name}: {error}") from None

    def require_val_window(self, seq_len: int) -> None:
        """Raise ConfigError unless the parts' validation texts have a window of `seq_len` tokens together."""
        if (val_tokens := self.index.val.tokens) < seq_len:
            whole = [name for name, part in self.parts.items() if not part.index.unread]  # these bound the others
            remedy = f"add text to {conjoin(whole)}" if whole else "raise data.val_tokens"
            halves = f"'s halves for {self.half}" if self.half else "s"
            raise ConfigError(
                f"model.max_seq_len={seq_len}: the validation text{halves} have {val_tokens} tokens in the shares of "
                f"data.mix and one window needs {seq_len}; {remedy} or lower model.max_seq_len"
                f"{UNDIVIDED if self.half else ''}"
            )


def _joint_index(parts: Mapping[str, TokenDataset], shares: Mapping[str, Fraction]) -> Index:
    indices = [part.index for part in parts.values()]
    mixed = [[str(share), index.data_hash] for share, index in zip(shares.values(), indices, strict=True)]
    fields = ("documents", "bytes", "tokens")

    def total(split: str) -> SplitIndex:
        return SplitIndex(*(sum(getattr(getattr(index, split), name) for index in indices) for name in fields))

    return Index(
        format_version=FORMAT_VERSION,
        dtype=indices[0].dtype,
        vocab_size=indices[0].vocab_size,
        data_hash=json_hash(mixed, 16),
        tokenizer_hash=indices[0].tokenizer_hash,
        val_fraction=None,
        train=total("train"),
        val=total("val"),
        duplicates=sum(index.duplicates for index in indices),
        empty=sum(index.empty for index in indices),
        files={},
        unread=sum(index.unread for index in indices),
        revisions={path: commit for index in indices for path, commit in index.revisions.items()},
    )


@dataclass(frozen=True)
class Part:
    """A part's documents, the fraction of them to hold out (None: it has its own), and its share of the tokens."""

    source: Source
    val_fraction: float | None
    share: Fraction


@dataclass(frozen=True)
class SharedTokenizer:
    """A trained tokenizer, for the parts of a mixture; those with the same `hash` give the same tokens."""

    tokenizer: InitVar[TextTokenizer]
    hash: str = field(init=False)
    vocabulary_from: ClassVar[VocabularyFrom] = "nothing"

    def __post_init__(self, tokenizer: TextTokenizer) -> None:
        object.__setattr__(self, "_tokenizer", tokenizer)
        object.__setattr__(self, "hash", tokenizer.hash)

    def train(self, documents: Iterator[str]) -> TextTokenizer:
        """Return the tokenizer; `documents` are not read."""
        tokenizer: TextTokenizer = self._tokenizer  # type: ignore[attr-defined]
        return tokenizer


def open_mixture(
    parts: Mapping[str, Part],
    tokenizer: TokenizerFactory,
    cache_dir: str | Path,
    progress: ReportProgress,
    val_tokens: int | None,
    print_line: Callable[[str], None],
) -> MixedDataset:
    """Open the token folders of all parts below `cache_dir`, building those that are not there.

    Of `val_tokens`, each part has its share; if one has less held-out text than that, all have less. A tokenizer to
    train learns from the parts in their shares. Raises ConfigError as `TokenDataset.open_or_build` does.
    """
    check_val_tokens(val_tokens)
    cache = Path(cache_dir).expanduser()
    shared = _shared_tokenizer(parts, tokenizer, cache, progress)

    def opened(part: Part, total: Fraction | None) -> TokenDataset:
        bound = None if total is None else max(1, floor(total * part.share))
        return TokenDataset.open_or_build(part.source, shared, part.val_fraction, cache, progress, bound)

    asked = None if val_tokens is None else Fraction(val_tokens)
    datasets = {name: opened(part, asked) for name, part in parts.items()}
    # Fractions, since a part that rounding puts above its own share would lose a document.
    whole = [Fraction(d.index.val.tokens) / parts[n].share for n, d in datasets.items() if not d.index.unread]
    total = min([*whole, *([] if asked is None else [asked])])
    for name, part in parts.items():
        if datasets[name].times:
            print_line(f"{name}: {datasets[name].describe_build()}")
        if datasets[name].index.val.tokens > total * part.share:
            datasets[name] = opened(part, total)
    return MixedDataset(datasets, {name: part.share for name, part in parts.items()})


def _shared_tokenizer(
    parts: Mapping[str, Part], factory: TokenizerFactory, cache: Path, progress: ReportProgress
) -> TokenizerFactory:
    """The tokenizer of all parts: `factory` itself if it learns nothing, else trained once and kept in `cache`."""
    if factory.vocabulary_from == "nothing":
        return factory
    described = [[part.source.fingerprint(), part.val_fraction, str(part.share)] for part in parts.values()]
    key = [FORMAT_VERSION, type(factory).__module__, type(factory).__qualname__, asdict(factory), described]
    folder = cache / f"tokenizer-{json_hash(key)}"
    with locked(folder), report_disk_errors(f"data.cache_dir={cache}"):
        if not (folder / TOKENIZER_NAME).exists():
            sources = [(part.source, part.val_fraction, _sampling(factory, part.share)) for part in parts.values()]
            trained = train_on_all(sources, factory, progress)
            folder.mkdir(exist_ok=True)
            trained.save(folder / "unfinished.json")
            (folder / "unfinished.json").rename(folder / TOKENIZER_NAME)
    return SharedTokenizer(TextTokenizer.load(folder / TOKENIZER_NAME))


def _sampling(factory: TokenizerFactory, share: Fraction) -> TokenizerFactory:
    """The factory with its bound on the text to learn from, if it has one, cut to a part's share."""
    bound = sample_bytes(factory)
    return factory if bound is None else replace(factory, sample_bytes=max(1, floor(bound * share)))
