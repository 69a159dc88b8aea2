"""Pairs of a source and a target, such as sentences and their translations: files to token folder to rows."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

import numpy as np

from llama_lab.util.errors import ConfigError

from .dataset import Examples, Ids, Tokens, Training, Validation
from .folders import FolderIndex, json_hash
from .source import Files
from .tokens import UNDIVIDED, TokenDataset
from .windows import TrainWindows


@dataclass(eq=False)
class PairFiles(Files):
    """The lines of two UTF-8 files, sources and targets; a document is a source and its target, one below the other.

    files: both. val_split: both of the validation pairs; None: they are held out of the others. Raises ConfigError, on
    first use, for files that are no text, are empty, or have not equally many lines.
    """

    files: Sequence[str]
    val_split: Sequence[str] | None = None

    separator = "\n"
    _settings = "pairs, whose index has the bytes of targets"

    def documents(self) -> Iterator[str]:
        """Iterate over the pairs to train on."""
        return self._read("data.files", *self._paths[:2])

    @property
    def validation(self) -> Iterator[str] | None:
        """Iterate over the validation pairs that have files of their own; None: they have none."""
        return self._read("data.val_split", *self._paths[2:]) if self.val_split else None

    @cached_property
    def _paths(self) -> list[Path]:
        paths: list[Path] = []
        for key, files in (("data.files", self.files), ("data.val_split", self.val_split)):
            if files is not None and (isinstance(files, str) or len(files) != 2):
                raise ConfigError(f"{key}={files}: name two files, of sources and of targets, such as [a.en,a.de]")
            paths += (Path(os.path.abspath(os.path.expanduser(file))) for file in files or ())
            for path in paths:
                if not path.is_file() or not path.stat().st_size:
                    raise ConfigError(f"{key}: {path} is no file, or an empty one; name another")
        return paths

    def _read(self, key: str, source: Path, target: Path) -> Iterator[str]:
        """The documents in two files, whose lines end with a line feed alone: a text may hold other ends."""
        opened = (file.open(encoding="utf-8-sig", newline="\n") for file in (source, target))
        try:
            with next(opened) as sources, next(opened) as targets:
                for number, pair in enumerate(zip_longest(sources, targets), 1):
                    if None in pair:
                        ended = (source, target)[pair.index(None)]
                        raise ConfigError(f"{key}: {ended} ends before line {number}; give each source a target")
                    yield self.separator.join(line.rstrip("\r\n") for line in pair)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{key}=[{source},{target}]: not UTF-8 text ({error.reason}); convert them") from error


class PairRows(Training, Validation):
    """Rows of `seq_len` tokens: end-of-text, a source, end-of-text, its target. It and its end are predicted.

    tokens: a stream `[eot] source [eot] target [eot] source ...`. In training, all rows come in every epoch, in an
    order that depends on (seed, epoch) alone. Raises ConfigError for pairs that are longer.
    """

    def __init__(self, tokens: Tokens, eot_id: int, seq_len: int, seed: int = 0):
        self._stream, self.seq_len = tokens, seq_len
        self._ends = np.flatnonzero(tokens == eot_id)  # of targets and of sources, in turn
        self._order = TrainWindows(np.arange(len(self) + 1, dtype=np.uint32), 1, seed)
        self.tokens, lengths = len(self) * seq_len, np.diff(self._ends[::2])
        if longer := int((lengths > seq_len).sum()):
            problem = f"{longer:,} of {len(self):,} pairs are longer, up to {lengths.max()} tokens"
            raise ConfigError(f"model.max_seq_len={seq_len}: {problem}; raise it, or leave them out of data.files")

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, i: int) -> tuple[Ids, Ids]:
        start, middle, end = self._ends[[2 * i, 2 * i + 1, 2 * i + 2]]  # an IndexError after the last
        inputs, targets = self.nothing()
        inputs[: end - start] = self._stream[start:end]
        targets[middle - start : end - start] = self._stream[middle + 1 : end + 1]
        return inputs, targets

    def examples(self, step: int, batch_size: int, rows: slice | range = slice(None)) -> Examples:
        """Return `rows` of the batch at `step`."""
        numbers = self._order.examples(step, batch_size, rows).inputs[:, 0]
        return Examples(*map(np.stack, zip(*(self[i] for i in numbers), strict=True)))


class PairDataset(TokenDataset):
    """An opened token folder of pairs. In the index, bytes and the tokens of validation are those of targets alone."""

    def __init__(self, folder: Path, index: FolderIndex, half: str | None = None, builds: Sequence[str] = ()):
        super().__init__(folder, index, half, builds)
        val = replace(self.index.val, tokens=len(self.predicted))
        # Other data than the same documents of a plain text.
        self.index = replace(self.index, val=val, data_hash=json_hash(["pairs", self.index.data_hash], 16))

    @cached_property
    def predicted(self) -> Tokens:
        """The targets of validation, each with its end."""
        ended = np.cumsum(self.val == self.tokenizer.eot_id)[:-1]  # sources and targets, before each token
        predicted: Tokens = self.val[1:][ended % 2 == 0]
        return predicted

    def train_windows(self, seq_len: int, seed: int) -> PairRows:  # type: ignore[override]
        """The pairs to train on, in rows of `seq_len` tokens."""
        return PairRows(self.train[:], self.tokenizer.eot_id, seq_len, seed)

    def val_windows(self, length: int) -> PairRows:
        """The validation pairs in rows of `length` tokens."""
        return PairRows(self.val, self.tokenizer.eot_id, length)

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError for pairs longer than `seq_len`, less than a batch of them, and none to validate."""
        if not len(self.val_windows(seq_len)):
            raise ConfigError(f"data.val_half={self.half}: has no validation pairs; add some{UNDIVIDED}")
        if (pairs := len(self.train_windows(seq_len, 0))) < batch_size:
            raise ConfigError(
                f"train.batch_size={batch_size}: the pairs to train on are {pairs}; add some, or lower it"
            )
