"""Building a token folder: read and split the documents, train the tokenizer, write one token stream per split.

The source is read up to three times, and never held in memory.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llama_lab.data.index import FORMAT_VERSION, TOKENIZER_NAME, Index, SplitIndex, describe_file, write_index
from llama_lab.data.source import Source
from llama_lab.data.tokenizer import TextTokenizer, TokenizerFactory
from llama_lab.errors import ConfigError

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done_bytes, total_bytes, phase)`` with phase "reading", "training tokenizer" or "tokenising"."""

Digests = npt.NDArray[np.bytes_]
"""The blake2b hash of each document's UTF-8 bytes: ``(documents,)``, 16 bytes each."""

DROPPED, TRAIN, VAL = 0, 1, 2

_DIGEST_BYTES = 16
_BATCH_BYTES = 1 << 20  # of text tokenised at once: enough to occupy all cores, at some 50 MB of encodings


def build(source: Source, factory: TokenizerFactory, val_fraction: float, folder: Path, progress: Progress) -> None:
    """Build the token folder ``folder``, which must not exist; nothing is written before the whole text was read.

    Raises ConfigError for text that cannot be used.
    """
    survey = survey_source(source, val_fraction, progress)
    tokenizer = factory.train(_vocabulary_texts(source, survey, factory, progress))
    folder.mkdir()
    tokenizer.save(folder / TOKENIZER_NAME)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    train, val = _write_streams(source, survey, tokenizer, dtype, folder, progress)
    index = Index(
        format_version=FORMAT_VERSION,
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        data_hash=survey.data_hash,
        tokenizer_hash=tokenizer.hash,
        val_fraction=val_fraction,
        train=train,
        val=val,
        duplicates=survey.duplicates,
        empty=survey.empty,
        files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
    )
    write_index(index, folder)


@dataclass(frozen=True)
class Survey:
    """What one pass over the source found, document by document, in reading order.

    ``splits`` says DROPPED (empty, or a copy of an earlier document), TRAIN or VAL; ``text_bytes`` is the UTF-8 bytes
    of all documents.
    """

    digests: Digests
    splits: npt.NDArray[np.uint8]
    text_bytes: int

    @property
    def empty(self) -> int:
        """Number of documents without text."""
        return int((self.digests == _digest(b"")).sum())

    @property
    def duplicates(self) -> int:
        """Number of documents dropped as copies of an earlier one."""
        return int((self.splits == DROPPED).sum()) - self.empty

    @property
    def data_hash(self) -> str:
        """Hash of the training documents and of the validation documents, each in order."""
        by_split = [hashlib.blake2b(self.digests[self.splits == split].tobytes()).digest() for split in (TRAIN, VAL)]
        return _digest(b"".join(by_split)).hex()


def survey_source(source: Source, val_fraction: float, progress: Progress) -> Survey:
    """Read ``source`` once and assign each document to a split. Raises as ``assign_splits`` does."""
    raw = bytearray()
    text_bytes = 0
    for data in _encoded(source, source.total_bytes(), progress, "reading"):
        raw += _digest(data)
        text_bytes += len(data)
    digests = np.frombuffer(raw, dtype=f"S{_DIGEST_BYTES}")
    return Survey(digests, assign_splits(digests, val_fraction), text_bytes)


def assign_splits(digests: Digests, val_fraction: float) -> npt.NDArray[np.uint8]:
    """Return DROPPED, TRAIN or VAL for each document.

    A document is for validation if its hash, as a fraction of the range of hashes, is below ``val_fraction``: that
    depends on its text alone. Should a split then be empty, it gets the document nearest to the line.
    Raises ConfigError if there are fewer than two distinct documents.
    """
    _, first_copies = np.unique(digests, return_index=True)
    kept = np.zeros(len(digests), dtype=bool)
    kept[first_copies] = True
    kept &= digests != _digest(b"")
    if kept.sum() < 2:
        raise ConfigError(
            f"data.val_fraction={val_fraction}: training and validation need a document each, and the text has "
            f"{kept.sum()} distinct one(s); add text, or cut a text file finer with a lower data.document_chars"
        )
    fractions = _fractions(digests)
    line = np.clip(val_fraction, np.nextafter(fractions[kept].min(), 1), fractions[kept].max())
    return np.where(kept, np.where(fractions < line, VAL, TRAIN), DROPPED).astype(np.uint8)


def _fractions(digests: Digests) -> npt.NDArray[np.float64]:
    """Each hash's first eight bytes as a number in [0, 1)."""
    leading = np.frombuffer(digests.tobytes(), dtype=">u8")[:: _DIGEST_BYTES // 8]
    return (leading >> np.uint64(11)).astype(np.float64) / 2**53  # a float holds 53 bits exactly


def _vocabulary_texts(source: Source, survey: Survey, factory: TokenizerFactory, progress: Progress) -> Iterator[str]:
    """The texts that ``factory`` learns from, read as it asks for them."""
    wanted = {"nothing": (), "train": (TRAIN,), "all": (TRAIN, VAL)}[factory.vocabulary_from]
    if wanted:
        documents = _read_again(source, survey, progress, "training tokenizer")
        yield from (document.text for document in documents if document.split in wanted)


def _write_streams(
    source: Source, survey: Survey, tokenizer: TextTokenizer, dtype: np.dtype, folder: Path, progress: Progress
) -> tuple[SplitIndex, SplitIndex]:
    """Write ``train.bin`` and ``val.bin``, and return what each holds."""
    eot = tokenizer.eot_id
    with _Stream(folder / "train.bin", dtype, eot) as train, _Stream(folder / "val.bin", dtype, eot) as val:
        streams = {TRAIN: train, VAL: val}
        kept = (doc for doc in _read_again(source, survey, progress, "tokenising") if doc.split != DROPPED)
        for batch in _batches(kept):
            for document, ids in zip(batch, tokenizer.encode_batch([doc.text for doc in batch]), strict=True):
                streams[document.split].append(ids, document.size)
    return train.index, val.index


class _Document(NamedTuple):
    text: str
    size: int  # UTF-8 bytes
    split: int


def _read_again(source: Source, survey: Survey, progress: Progress, phase: str) -> Iterator[_Document]:
    """Read all documents of ``survey``. Raises ConfigError if they have changed since."""
    expected = zip(survey.digests.view(f"V{_DIGEST_BYTES}"), survey.splits, strict=True)
    for data in _encoded(source, survey.text_bytes, progress, phase):
        digest, split = next(expected, (None, DROPPED))
        if digest is None or digest.tobytes() != _digest(data):
            raise _changed()
        yield _Document(data.decode(), len(data), int(split))
    if next(expected, None) is not None:
        raise _changed()


def _changed() -> ConfigError:
    return ConfigError("data: the text changed while it was read; leave its files alone and run the command again")


def _encoded(source: Source, total: int, progress: Progress, phase: str) -> Iterator[bytes]:
    """Each document's UTF-8 bytes, reporting progress after every megabyte or so."""
    done = reported = 0
    progress(0, total, phase)
    for text in source.documents():
        data = text.encode()
        yield data
        done += len(data)
        if done - reported >= _BATCH_BYTES:
            reported = done
            progress(min(done, total), total, phase)  # compressed files hold more text than bytes
    progress(total, total, phase)


def _batches(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    batch: list[_Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Stream:
    """A split's token file: ``[eot] document [eot] document [eot]``, so that every token but the first is predicted.

    A context manager; ``index`` counts what was appended.
    """

    def __init__(self, path: Path, dtype: np.dtype, eot_id: int):
        self._file = path.open("wb")
        self._dtype = dtype
        self._eot = eot_id
        self.index = SplitIndex(documents=0, bytes=0, tokens=0)

    def __enter__(self) -> "_Stream":
        self._write([self._eot])
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, ids: list[int], size: int) -> None:
        """Append a document of ``size`` bytes, and the end-of-text token that closes it."""
        self._write([*ids, self._eot])
        done = self.index
        self.index = SplitIndex(done.documents + 1, done.bytes + size, done.tokens + len(ids) + 1)

    def _write(self, ids: list[int]) -> None:
        self._file.write(np.array(ids, dtype=self._dtype).tobytes())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
