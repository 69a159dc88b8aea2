"""Token folders: text as token ids on disk, built once and opened by every run that needs it."""

import dataclasses
import logging
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from llama_lab.util.errors import ConfigError
from llama_lab.util.files import discard, report_disk_errors
from llama_lab.util.formatting import conjoin, duration

from .build import VAL_HALVES, BuildTimes, build
from .index import (
    FORMAT_VERSION,
    HALVES,
    TOKENIZER_NAME,
    DamagedFolderError,
    Index,
    TokenStream,
    json_hash,
    read_index,
)
from .source import ReportProgress, Source
from .tokenizer import TextTokenizer, TokenizerFactory
from .windows import Tokens, TrainWindows, ValWindows, Windows, count_train_windows

log = logging.getLogger(__name__)


UNDIVIDED = ", or tune no learning rates with study.learning_rates=null, which needs no halves"


class TokenDataset:
    """An opened token folder.

    `train` and `val` are the splits' memory-mapped token streams: `[eot] document [eot] document [eot]`. Reading
    either raises ConfigError where it is damaged; `val` is read in full at first.
    Every document is in one of them, once. `times` are those of the build; None for a folder that existed. `half`: the
    one of `HALVES` that `val` is limited to, and `index` describes.
    """

    entropy_floor = None  # of text, nobody knows it

    def __init__(self, folder: Path, index: Index, times: BuildTimes | None = None, half: str | None = None):
        self.folder = folder
        self.index = index.of_half(half)
        self.times = times
        self.half = half
        self._whole = index

    def validated_on(self, half: str | None) -> "TokenDataset":
        """The same text with one of `HALVES` of the validation documents; None: all of them."""
        return TokenDataset(self.folder, self._whole, self.times, half)

    @classmethod
    def open_or_build(
        cls,
        source: Source,
        tokenizer: TokenizerFactory,
        val_fraction: float | None,
        cache_dir: str | Path,
        progress: ReportProgress | None = None,
        val_tokens: int | None = None,
    ) -> "TokenDataset":
        """Open the folder of this source, tokenizer and split below `cache_dir`, building it if needed.

        `val_fraction` of the documents are held out; None for a source with validation documents of its own.
        `val_tokens` limits the validation text; default: all held-out documents.
        Of concurrent processes, one builds the folder. A damaged folder is logged and rebuilt.
        Raises ConfigError for text or settings that cannot work, before any token is written.
        """
        has_validation = getattr(source, "validation", None) is not None
        if val_fraction is not None and has_validation:
            raise ConfigError(
                f"data.val_fraction={val_fraction}: data.val_split names what to validate on; set one of them to null"
            )
        if not (has_validation or (val_fraction is not None and 0 < val_fraction < 1)):
            raise ConfigError(f"data.val_fraction={val_fraction}: must be between 0 and 1, such as 0.05")
        check_val_tokens(val_tokens)
        cache = Path(cache_dir).expanduser()
        factory = [type(tokenizer).__module__, type(tokenizer).__qualname__, dataclasses.asdict(tokenizer)]
        folder = cache / json_hash([FORMAT_VERSION, source.fingerprint(), factory, val_fraction, val_tokens])
        with suppress(DamagedFolderError):  # or missing
            return cls(folder, read_index(folder))
        return _build_locked(source, tokenizer, val_fraction, val_tokens, folder, progress or (lambda *_: None))

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the tokens."""
        return TextTokenizer.load(self.folder / TOKENIZER_NAME)

    @cached_property
    def train(self) -> TokenStream:
        """The training split's tokens, `(index.train.tokens + 1,)`."""
        return TokenStream(self.folder, "train.bin", self.index)

    @cached_property
    def val(self) -> Tokens:
        """The validation split's tokens, `(index.val.tokens + 1,)`."""
        val = TokenStream(self.folder, "val.bin", self._whole)[:]
        if self.half is None:
            return val
        is_in_half = np.fromfile(self.folder / VAL_HALVES, np.uint8) == HALVES.index(self.half)
        return np.concatenate([val[:1], val[1:][is_in_half]])

    @property
    def bytes_per_token(self) -> float:
        """Bytes per predicted token of the validation split: bits per byte = nats per token / ln 2 / this."""
        return self.index.val.bytes / self.index.val.tokens

    def unigram_entropy(self) -> float:
        """Return the entropy, in nats per token, of the validation tokens' frequencies.

        It is the loss of the best model without context.
        """
        counts = np.bincount(self.val[1:])
        frequencies = counts[counts > 0] / self.index.val.tokens
        return float(-(frequencies * np.log(frequencies)).sum())

    def train_windows(self, seq_len: int, seed: int) -> Windows:
        """The training sequences of `seq_len` tokens; raises ConfigError for a negative seed."""
        return TrainWindows(self.train, seq_len, seed)

    def val_windows(self, length: int) -> ValWindows:
        """The validation text in windows of `length` tokens."""
        return ValWindows(self.val, length)

    def val_parts(self, length: int) -> dict[str, ValWindows]:
        """The same for each part of a mixture, by name; of any other text, all under an empty name."""
        return {"": self.val_windows(length)}

    def epochs(self, seq_len: int, sequences: int) -> dict[str, float]:
        """How often each part of a mixture is read in so many training sequences; of any other text, nothing."""
        return {}

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless validation has a window of `seq_len` tokens, and training a whole batch of them."""
        self.require_train_windows(seq_len, batch_size)
        self.require_val_window(seq_len)

    def require_train_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError for fewer windows than a batch has: it would contain the same text twice."""
        window = f"model.max_seq_len={seq_len}"
        train_tokens = self.index.train.tokens
        if train_tokens < seq_len:
            raise ConfigError(
                f"{window}: the training text has {train_tokens} tokens and one window needs {seq_len}; "
                "add text or lower model.max_seq_len"
            )
        windows = count_train_windows(train_tokens, seq_len)
        if windows < batch_size:
            raise ConfigError(
                f"train.batch_size={batch_size}: the training text has {train_tokens} tokens, {windows} window(s) "
                f"of {window}; add text, or lower train.batch_size or model.max_seq_len"
            )

    def require_val_window(self, seq_len: int) -> None:
        """Raise ConfigError unless validation has a window of `seq_len` tokens."""
        window, val_tokens = f"model.max_seq_len={seq_len}", self.index.val.tokens
        if val_tokens < seq_len:
            bound = f"data.val_fraction={self.index.val_fraction}"
            remedy = "raise data.val_fraction, add text"
            if self.index.unread or self.index.val_fraction is None:
                bound = "data.val_tokens" if self.index.unread else "data.val_split"
                remedy = "raise data.val_tokens" if self.index.unread else "set it to null and data.val_fraction=0.05"
            half = f"{self.half} half of the " if self.half else ""
            raise ConfigError(
                f"{bound}: the {half}validation text has {val_tokens} tokens and one window of {window} needs "
                f"{seq_len}; {remedy} or lower model.max_seq_len{UNDIVIDED if self.half else ''}"
            )

    def describe_build(self) -> str:
        """Return one line on the time and the result of a build; only for a folder just built."""
        assert self.times is not None
        times, index = self.times, self.index
        train, val = index.train, index.val
        learnt = f"tokenizer trained on {_mb(times.sample_bytes)} in {duration(times.training)}, "
        held_out = (
            f" ({val.documents:,} of {val.documents + index.unread:,} held-out documents)" if index.unread else ""
        )
        left_out = [f"{n:,} {what}" for n, what in ((index.duplicates, "copies"), (index.empty, "empty")) if n]
        return (
            f"tokens: {_mb(times.text_bytes)} read in {duration(times.reading)}, {learnt if times.sample_bytes else ''}"
            f"encoded in {duration(times.tokenising)} ({times.tokenised_bytes / 1e6 / times.tokenising:.1f} MB/s); "
            f"{train.tokens / 1e6:,.1f} M tokens to train on, {val.tokens / 1e6:,.1f} M to validate on{held_out}"
            f"{f'; documents left out: {conjoin(left_out)}' if left_out else ''}"
        )


def check_val_tokens(val_tokens: int | None) -> None:
    """Raise ConfigError unless the bound on validation is positive, or None."""
    if val_tokens is not None and val_tokens < 1:
        raise ConfigError(f"data.val_tokens={val_tokens}: must be at least 1, or null for all held-out text")


def _build_locked(
    source: Source,
    tokenizer: TokenizerFactory,
    val_fraction: float | None,
    val_tokens: int | None,
    folder: Path,
    progress: ReportProgress,
) -> TokenDataset:
    """Open `folder` under its lock, building it unless another process just has."""
    with locked(folder):
        if folder.exists():
            try:
                return TokenDataset(folder, read_index(folder))
            except DamagedFolderError as error:
                log.warning("token folder %s is damaged (%s): building it again", folder, error)
        unfinished = folder.with_suffix(".building")
        discard(unfinished)  # of a process that died, since this one has the lock
        try:
            with report_disk_errors(f"data.cache_dir={folder.parent}"):
                times = build(source, tokenizer, val_fraction, val_tokens, unfinished, progress)
                discard(folder)
                unfinished.rename(folder)
        except FileNotFoundError as error:
            raise ConfigError(
                f"data: {error.filename} disappeared during the build; restore it, and run the same command again"
            ) from error
        finally:
            discard(unfinished)
        return TokenDataset(folder, read_index(folder), times)


def locked(folder: Path) -> AbstractContextManager[object]:
    """Acquire the folder's lock, waiting if needed; leaving the context that this returns releases it."""
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for another process that builds the token folder %s", folder)
        return lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={folder.parent}: cannot write there ({error.strerror}); "
            "set data.cache_dir or the environment variable LLAMA_LAB_CACHE to a folder of yours"
        ) from error


def _mb(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e7 else 1}f} MB"
