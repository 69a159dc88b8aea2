"""Building a token folder: read and split the documents, train the tokenizer, write one token stream per split.

The source is read up to three times, and never held in memory.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_lab.data.index import (
    FORMAT_VERSION,
    TOKENIZER_NAME,
    Index,
    SplitIndex,
    describe_file,
    write_index,
)
from llama_lab.data.source import Source
from llama_lab.data.tokenizer import TextTokenizer, TokenizerFactory
from llama_lab.errors import ConfigError

Progress = Callable[[int, int, str], None]
"""Called as ``progress(done_bytes, total_bytes, phase)`` with phase "reading", "training tokenizer" or "tokenising"."""

DROPPED, TRAIN, VAL = 0, 1, 2
SPLITS = {"train": TRAIN, "val": VAL}

_BATCH_BYTES = 1 << 20  # of text tokenised at once: enough to occupy all cores, at some 50 MB of encodings
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Survey:
    """What one pass over the source found, document by document, in reading order.

    ``digests`` are blake2b hashes of the documents' UTF-8 bytes, ``splits`` is DROPPED, TRAIN or VAL for each;
    ``text_bytes`` is the total of their UTF-8 bytes. DROPPED are empty documents and second copies.
    """

    digests: npt.NDArray[np.bytes_]
    splits: npt.NDArray[np.uint8]
    text_bytes: int

    @property
    def empty(self) -> int:
        """Number of documents without text."""
        return int((self.digests == _document_digest(b"")).sum())

    @property
    def duplicates(self) -> int:
        """Number of second and further copies of a document."""
        return int((self.splits == DROPPED).sum()) - self.empty

    @property
    def data_hash(self) -> str:
        """Hash of the training documents, then the validation documents, each in order."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for split in SPLITS.values():
            digest.update(self.digests[self.splits == split].tobytes() + b"|")
        return digest.hexdigest()


def survey(source: Source, val_fraction: float, progress: Progress) -> Survey:
    """Hash every document of ``source`` and assign it to a split. Raises ConfigError if there are fewer than two."""
    digests = bytearray()
    text_bytes, total = 0, source.total_bytes()
    for text in source.documents():
        data = text.encode()
        digests += _document_digest(data)
        text_bytes += len(data)
        progress(min(text_bytes, total), total, "reading")
    progress(total, total, "reading")
    array = np.frombuffer(bytes(digests), dtype=f"S{_DIGEST_BYTES}")
    return Survey(array, assign_splits(array, val_fraction), text_bytes)


def assign_splits(digests: npt.NDArray[np.bytes_], val_fraction: float) -> npt.NDArray[np.uint8]:
    """Return DROPPED, TRAIN or VAL for each document, given the hashes of their text.

    A document is for validation if its hash, as a fraction of all hashes, is below ``val_fraction``: a choice that
    depends on its text alone. Should that leave a split empty, it gets the one document nearest to the line.
    Raises ConfigError if there are fewer than two distinct documents.
    """
    _, first_copies = np.unique(digests, return_index=True)
    kept = np.zeros(len(digests), dtype=bool)
    kept[first_copies] = True
    kept &= digests != _document_digest(b"")
    if kept.sum() < 2:
        raise ConfigError(
            f"data.val_fraction={val_fraction}: the text is {kept.sum()} distinct document(s), and training and "
            "validation need one each; add files, or cut a long text file with a lower data.document_chars"
        )
    fractions = _fractions(digests)
    threshold = np.clip(val_fraction, np.nextafter(fractions[kept].min(), 1), fractions[kept].max())
    return np.where(kept, np.where(fractions < threshold, VAL, TRAIN), DROPPED).astype(np.uint8)


def _fractions(digests: npt.NDArray[np.bytes_]) -> npt.NDArray[np.float64]:
    """The first eight bytes of each hash as a number in [0, 1)."""
    leading = np.frombuffer(digests.tobytes(), dtype=">u8").reshape(-1, _DIGEST_BYTES // 8)[:, 0]
    return (leading >> np.uint64(11)).astype(np.float64) / 2**53  # 53 bits: what a float holds exactly


def _document_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def build(source: Source, factory: TokenizerFactory, val_fraction: float, folder: Path, progress: Progress) -> None:
    """Build the token folder ``folder``, which must not exist; nothing is written before the whole text was read.

    Raises ConfigError for text that cannot be used.
    """
    found = survey(source, val_fraction, progress)
    tokenizer = factory.train(_vocabulary_documents(source, found, factory, progress))
    folder.mkdir()
    tokenizer.save(folder / TOKENIZER_NAME)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    counts = _write_streams(source, found, tokenizer, dtype, folder, progress)
    index = Index(
        format_version=FORMAT_VERSION,
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        data_hash=found.data_hash,
        tokenizer_hash=tokenizer.hash,
        duplicates=found.duplicates,
        empty=found.empty,
        files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
        **counts,
    )
    write_index(index, folder)


def _vocabulary_documents(
    source: Source, found: Survey, factory: TokenizerFactory, progress: Progress
) -> Iterator[str]:
    """The documents that ``factory`` learns from, read as it asks for them."""
    wanted = {"nothing": (), "train": (TRAIN,), "all": (TRAIN, VAL)}[factory.vocabulary_from]
    if not wanted:
        return
    for split, data in _read_again(source, found, progress, "training tokenizer"):
        if split in wanted:
            yield data.decode()


def _write_streams(
    source: Source, found: Survey, tokenizer: TextTokenizer, dtype: np.dtype, folder: Path, progress: Progress
) -> dict[str, SplitIndex]:
    """Write ``train.bin`` and ``val.bin``: ``[eot] document [eot] document [eot]``, so that all tokens are predicted."""
    writers = {code: _StreamWriter(folder / f"{name}.bin", dtype, tokenizer.eot_id) for name, code in SPLITS.items()}
    kept = (item for item in _read_again(source, found, progress, "tokenising") if item[0] != DROPPED)
    for batch in _batches(kept):
        for (split, data), ids in zip(batch, tokenizer.encode_batch([data.decode() for _, data in batch]), strict=True):
            writers[split].append(ids, len(data))
    return {name: writers[code].close() for name, code in SPLITS.items()}


def _read_again(source: Source, found: Survey, progress: Progress, phase: str) -> Iterator[tuple[int, bytes]]:
    """Each document's split and UTF-8 bytes. Raises ConfigError if they are not those of the survey."""
    ...


class _StreamWriter: ...


def _batches(documents: Iterable[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]: ...
