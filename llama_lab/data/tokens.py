"""Token folders: text as token ids on disk, built once and opened by every run that needs it."""

from collections.abc import Sequence
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from llama_lab.util.errors import ConfigError

from .build import STREAMS, TRAIN, VAL, VAL_HALVES, HoldOut, build
from .dataset import HALVES, Dataset, Ids, Tokens, Validation
from .folders import FORMAT_VERSION, FolderIndex, TokenStream, json_hash, open_or_build, read_index
from .source import ReportProgress, Source
from .tokenizer import TOKENIZER_NAME, TextTokenizer, TokenizerFactory, identity
from .windows import TrainWindows, ValWindows, count_train_windows

UNDIVIDED = ", or tune no learning rates with study.learning_rates=null, which needs no halves"


class TextDataset(Dataset, Protocol):
    """Text as tokens: `[eot] document [eot] document [eot]`."""

    @property
    def val(self) -> Tokens:
        """The validation split's tokens, `(index.val.tokens + 1,)`."""

    @property
    def predicted(self) -> Tokens:
        """Those of them that are predicted, `(index.val.tokens,)`."""
        return self.val[1:]

    def unigram_entropy(self) -> float:
        """Return the entropy, in nats per token, of the validation tokens' frequencies."""
        counts = np.bincount(self.predicted)
        frequencies = counts[counts > 0] / self.index.val.tokens
        return float(-(frequencies * np.log(frequencies)).sum())

    def val_windows(self, length: int) -> Validation:
        """The validation text in windows of `length` tokens."""
        return ValWindows(self.val, length)

    def val_bound(self, seq_len: int) -> tuple[str, str]:
        """The setting that bounds the validation text, and what to do if that is too short."""

    def require_val_window(self, seq_len: int) -> None:
        """Raise ConfigError unless the validation text has a window of `seq_len` tokens."""
        if (tokens := self.index.val.tokens) < seq_len:
            setting, remedy = self.val_bound(seq_len)
            half, undivided = (f"{self.half} half of the ", UNDIVIDED) if self.half else ("", "")
            raise ConfigError(
                f"{setting}: the {half}validation text has {tokens} tokens and one window of model.max_seq_len="
                f"{seq_len} needs {seq_len}; {remedy} or lower model.max_seq_len{undivided}"
            )


class TokenDataset(TextDataset):
    """An opened token folder, in which every document is either in training or in validation, once.

    `train` and `val` raise ConfigError where they are damaged; `val` is read in full at first.
    """

    def __init__(self, folder: Path, index: FolderIndex, half: str | None = None, builds: Sequence[str] = ()):
        self.folder, self.half, self.builds = folder, half, builds
        self.index: FolderIndex = index.of_half(half) if half else index
        self._whole = index

    def validated_on(self, half: str | None) -> Self:
        """The same text with one of `HALVES` of the validation documents; None: all of them."""
        return type(self)(self.folder, self._whole, half, self.builds)

    @classmethod
    def open_or_build(
        cls,
        source: Source,
        tokenizer: TokenizerFactory,
        hold_out: HoldOut,
        cache_dir: str | Path,
        progress: ReportProgress = lambda *_: None,
    ) -> Self:
        """Open the folder of this source, tokenizer and validation text below `cache_dir`, building it if needed.

        Of concurrent processes, one builds the folder. A damaged folder is logged and rebuilt.
        Raises ConfigError for text or settings that cannot work, before any token is written.
        """
        fraction, has_validation = hold_out.fraction, getattr(source, "validation", None) is not None
        if fraction is not None and has_validation:
            problem = "data.val_split names what to validate on; set one of them to null"
            raise ConfigError(f"data.val_fraction={fraction}: {problem}")
        if not (has_validation or (fraction is not None and 0 < fraction < 1)):
            raise ConfigError(f"data.val_fraction={fraction}: must be between 0 and 1, such as 0.05")
        key = [FORMAT_VERSION, source.fingerprint(), identity(tokenizer), astuple(hold_out)]
        folder = Path(cache_dir).expanduser() / json_hash(key)
        builds = []

        def fill(empty: Path) -> None:
            builds.append(build(source, tokenizer, hold_out, empty, progress))

        return cls(folder, open_or_build(folder, lambda: read_index(folder), fill), builds=builds)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the tokens."""
        return TextTokenizer.load(self.folder / TOKENIZER_NAME)

    @cached_property
    def train(self) -> TokenStream:
        """The training split's tokens, `(index.train.tokens + 1,)`."""
        return TokenStream(self.folder, STREAMS[TRAIN], self.index)

    @cached_property
    def val(self) -> Tokens:
        """The validation split's tokens, `(index.val.tokens + 1,)`."""
        stream = self._whole_val
        return np.concatenate([stream[:1], self._of_half(stream[1:])])

    @property
    def val_documents(self) -> Ids:
        """The number of the held-out document of each token of `val` but the first: `(index.val.tokens,)`."""
        ended = np.cumsum(self._whole_val == self.tokenizer.eot_id)[:-1]
        return self._of_half(ended - 1)

    @property
    def _whole_val(self) -> Tokens:
        """The validation tokens of both halves."""
        return TokenStream(self.folder, STREAMS[VAL], self.index)[:]

    def _of_half(self, predicted: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What belongs to this half, of an array over the predicted validation tokens of both."""
        if self.half is None:
            return predicted
        of_tokens = np.fromfile(self.folder / VAL_HALVES, np.uint8)
        chosen: npt.NDArray[Any] = predicted[of_tokens == HALVES.index(self.half)]
        return chosen

    def train_windows(self, seq_len: int, seed: int) -> TrainWindows:
        """The training sequences of `seq_len` tokens."""
        return TrainWindows(self.train, seq_len, seed)

    def epochs(self, seq_len: int, sequences: int) -> dict[str, float]:
        """How often the text is read in so many training sequences."""
        return {"": sequences / len(self.train_windows(seq_len, 0))}

    def require_train_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError for fewer windows than a batch has: it would contain the same text twice."""
        tokens, window = self.index.train.tokens, f"model.max_seq_len={seq_len}"
        if (windows := count_train_windows(tokens, seq_len)) < batch_size:
            key, other = (f"train.batch_size={batch_size}", "train.batch_size or ") if windows else (window, "")
            raise ConfigError(
                f"{key}: the training text has {tokens} tokens, {windows} window(s) of {window}; add text, or lower "
                f"{other}model.max_seq_len"
            )

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless validation has a window of `seq_len` tokens, and training a whole batch of them."""
        self.require_train_windows(seq_len, batch_size)
        self.require_val_window(seq_len)

    def val_bound(self, seq_len: int) -> tuple[str, str]:
        """The setting that bounds the validation text, and what to do if that is too short."""
        if self.index.unread:
            return "data.val_tokens", "raise data.val_tokens"
        if self.index.val_fraction is None:
            return "data.val_split", "set it to null and data.val_fraction=0.05"
        return f"data.val_fraction={self.index.val_fraction}", "raise data.val_fraction, add text"
