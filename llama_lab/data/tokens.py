"""The token folder: text as token ids on disk, built once and opened by every run that needs it."""

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import filelock
import numpy as np
import numpy.typing as npt

from llama_lab.data.build import Progress, build
from llama_lab.data.index import FORMAT_VERSION, TOKENIZER_NAME, DamagedFolderError, Index, read_index
from llama_lab.data.source import Source
from llama_lab.data.tokenizer import TextTokenizer, TokenizerFactory
from llama_lab.data.windows import count_train_windows
from llama_lab.errors import ConfigError
from llama_lab.files import disk_errors_told

log = logging.getLogger(__name__)

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenDataset:
    """An opened token folder.

    ``train`` and ``val`` are the splits' token streams, memory-mapped: ``[eot] document [eot] document [eot]``.
    No document is in both, and none is twice in one.
    """

    def __init__(self, folder: Path, index: Index):
        self.folder = folder
        self.index = index

    @classmethod
    def open_or_build(
        cls,
        source: Source,
        tokenizer: TokenizerFactory,
        val_fraction: float,
        cache_dir: str | Path,
        progress: Progress | None = None,
    ) -> "TokenDataset":
        """Open the folder of this source, tokenizer and split below ``cache_dir``, building it if need be.

        Processes that race for a folder build it once. A damaged folder is reported and built anew.
        Raises ConfigError for text or settings that cannot work, before any token is written.
        """
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction}: must be between 0 and 1, such as 0.05")
        folder = Path(cache_dir).expanduser() / _key(source, tokenizer, val_fraction)
        try:
            index = read_index(folder)
        except DamagedFolderError:  # or missing
            index = _build_locked(source, tokenizer, val_fraction, folder, progress or _no_progress)
        return cls(folder, index)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that wrote the tokens."""
        return TextTokenizer.load(self.folder / TOKENIZER_NAME)

    @cached_property
    def train(self) -> TokenArray:
        """The training split's tokens, ``(train_tokens + 1,)``."""
        return self._map("train.bin")

    @cached_property
    def val(self) -> TokenArray:
        """The validation split's tokens, ``(val_tokens + 1,)``."""
        return self._map("val.bin")

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-text token included."""
        return self.index.vocab_size

    @property
    def dtype(self) -> np.dtype:
        """The type of a token on disk: uint16, or uint32 for vocabularies above 65536."""
        return np.dtype(self.index.dtype)

    @property
    def data_hash(self) -> str:
        """Hash of the documents of both splits, in order, wherever they came from."""
        return self.index.data_hash

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer."""
        return self.index.tokenizer_hash

    @property
    def train_tokens(self) -> int:
        """Number of tokens that one pass over the training split predicts."""
        return self.index.train.tokens

    @property
    def val_tokens(self) -> int:
        """Number of tokens that one pass over the validation split predicts, end-of-text tokens included."""
        return self.index.val.tokens

    @property
    def val_bytes(self) -> int:
        """UTF-8 bytes of the validation documents."""
        return self.index.val.bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes per predicted token of the validation split: bits per byte = nats per token / ln 2 / this."""
        return self.val_bytes / self.val_tokens

    def unigram_entropy(self) -> float:
        """Return the entropy, in nats per token, of the predicted validation tokens' own frequencies.

        It is the loss of the best model that ignores all context.
        """
        counts = np.bincount(self.val[1:], minlength=self.vocab_size)
        frequencies = counts[counts > 0] / self.val_tokens
        return float(-(frequencies * np.log(frequencies)).sum())

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless validation holds a window of ``seq_len`` and training a whole batch of them.

        With fewer, a single batch would hold the same text twice.
        """
        window = f"model.max_seq_len={seq_len}"
        if self.train_tokens < seq_len:
            raise ConfigError(
                f"{window}: the training text has {self.train_tokens} tokens and one window needs {seq_len}; "
                "add text or lower model.max_seq_len"
            )
        windows = count_train_windows(self.train_tokens, seq_len)
        if windows < batch_size:
            raise ConfigError(
                f"train.batch_size={batch_size}: the training text has {self.train_tokens} tokens, {windows} window(s) "
                f"of {window}; add text, or lower train.batch_size or model.max_seq_len"
            )
        if self.val_tokens < seq_len:
            raise ConfigError(
                f"data.val_fraction={self.index.val_fraction}: the validation text has {self.val_tokens} tokens and "
                f"one window of {window} needs {seq_len}; raise data.val_fraction, add text or lower model.max_seq_len"
            )

    def _map(self, name: str) -> TokenArray:
        return np.memmap(self.folder / name, dtype=self.dtype, mode="r")


def _key(source: Source, tokenizer: TokenizerFactory, val_fraction: float) -> str:
    """The folder's name: a hash of everything that determines its contents."""
    parameters = dataclasses.asdict(tokenizer)
    factory = [type(tokenizer).__module__, type(tokenizer).__qualname__, parameters]
    content = json.dumps([FORMAT_VERSION, source.fingerprint(), factory, val_fraction])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _build_locked(
    source: Source, tokenizer: TokenizerFactory, val_fraction: float, folder: Path, progress: Progress
) -> Index:
    """Build ``folder``, unless another process has done so by the time we hold the lock; return its index."""
    with _lock(folder):
        if folder.exists():
            try:
                return read_index(folder)
            except DamagedFolderError as error:
                log.warning("token folder %s is damaged (%s): building it again", folder, error)
        unfinished = folder.with_suffix(".building")
        _remove(unfinished)  # the lock is ours: whoever began it is dead
        try:
            with disk_errors_told(f"data.cache_dir={folder.parent}"):
                build(source, tokenizer, val_fraction, unfinished, progress)
                _remove(folder)
                unfinished.rename(folder)
        except FileNotFoundError as error:
            raise ConfigError(
                f"data: {error.filename} was there, and is gone; restore it, and give the same command again"
            ) from error
        finally:
            _remove(unfinished)
        return read_index(folder)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting for whoever has it."""
    lock = filelock.FileLock(folder.with_suffix(".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except filelock.Timeout:
        log.info("waiting for another process that builds the token folder %s", folder)
        lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={folder.parent}: cannot write there ({error.strerror}); "
            "set data.cache_dir or the environment variable LLAMA_LAB_CACHE to a folder of yours"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _no_progress(done_bytes: int, total_bytes: int, phase: str) -> None:
    pass
