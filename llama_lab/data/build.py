"""Build a token folder: read and split the documents, train the tokenizer, write one token stream per split.

The source is streamed up to three times, and never held in memory.
"""

import hashlib
import math
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import conjoin, duration

from .dataset import HALVES, SplitIndex
from .folders import FolderIndex, describe_file, write_index
from .source import ReportProgress, Source, encoded
from .tokenizer import TOKENIZER_NAME, TextTokenizer, TokenizerFactory

Digests = npt.NDArray[np.bytes_]
"""The blake2b hash of each document's UTF-8 bytes: `(documents,)`, 16 bytes each."""

Positions = npt.NDArray[np.int64]
"""Indices of documents in reading order, from 0."""

Counts = npt.NDArray[np.int64]
"""One number per document."""

Splits = npt.NDArray[np.uint8]
"""DROPPED, TRAIN, VAL or UNREAD per document."""

Document = tuple[int, str]
"""Its position, and its text."""

DROPPED, TRAIN, VAL, UNREAD = 0, 1, 2, 3

_DIGEST_BYTES = 16
_BATCH_CHARS = 1 << 20  # of text encoded at once, on all cores; some 50 MB of encodings
_BYTES_PER_TOKEN = 8  # more than in most texts
STREAMS = {TRAIN: "train.bin", VAL: "val.bin"}
VAL_HALVES = "val_halves.bin"  # the index in HALVES of each predicted token of val.bin, one byte


def build(
    source: Source,
    factory: TokenizerFactory,
    val_fraction: float | None,
    val_tokens: int | None,
    folder: Path,
    progress: ReportProgress,
) -> str:
    """Fill an empty folder, after the whole text has been read once; return one line on the time and the result.

    val_fraction: None for a source with validation documents of its own.
    Raises ConfigError for unusable text.
    """
    start = time.monotonic()
    survey = survey_source(source, val_fraction, progress)
    surveyed = time.monotonic()
    sample = survey.sample(factory)
    tokenizer = factory.train(survey.texts(sample))
    trained = time.monotonic()
    tokenizer.save(folder / TOKENIZER_NAME)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    survey, tokens, sizes = _write_streams(survey, tokenizer, dtype, val_tokens, folder)
    is_read = survey.splits == VAL
    np.repeat(survey.halves[is_read], tokens[is_read]).tofile(folder / VAL_HALVES)

    def size_of(chosen: npt.NDArray[np.bool_]) -> SplitIndex:
        return SplitIndex(int(chosen.sum()), int(sizes[chosen].sum()), int(tokens[chosen].sum()))

    empty = int((survey.sizes == 0).sum())
    index = FolderIndex(
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        data_hash=survey.data_hash,
        tokenizer_hash=tokenizer.hash,
        val_fraction=val_fraction,
        train=size_of(survey.splits == TRAIN),
        val=size_of(is_read),
        duplicates=int((survey.splits == DROPPED).sum()) - empty,
        empty=empty,
        files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
        unread=int((survey.splits == UNREAD).sum()),
        revisions=getattr(source, "revisions", {}),
        halves=[size_of(is_read & (survey.halves == half)) for half in range(len(HALVES))],
    )
    write_index(index, folder)
    text, learnt, tokenised = (int(survey.sizes[chosen].sum()) for chosen in (slice(None), sample, tokens > 0))
    seconds = time.monotonic() - trained
    val = index.val
    held_out = f" ({val.documents:,} of {val.documents + index.unread:,} held-out documents)" if index.unread else ""
    left_out = [f"{n:,} {what}" for n, what in ((index.duplicates, "copies"), (index.empty, "empty")) if n]
    return (
        f"tokens: {_mb(text)} read in {duration(surveyed - start)}, "
        f"{f'tokenizer trained on {_mb(learnt)} in {duration(trained - surveyed)}, ' if learnt else ''}"
        f"encoded in {duration(seconds)} ({tokenised / 1e6 / seconds:.1f} MB/s); "
        f"{index.train.tokens / 1e6:,.1f} M tokens to train on, {val.tokens / 1e6:,.1f} M to validate on{held_out}"
        f"{f'; documents left out: {conjoin(left_out)}' if left_out else ''}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e7 else 1}f} MB"


@dataclass(frozen=True)
class Survey:
    """A source and the hash, size and split of each of its documents, in reading order.

    `sizes` are in UTF-8 bytes. `splits` are DROPPED (empty, or a copy of an earlier document), TRAIN, VAL, or
    UNREAD (held out like VAL, but beyond the bound on validation).
    """

    source: Source
    progress: ReportProgress
    digests: Digests
    sizes: Counts
    splits: Splits

    @property
    def data_hash(self) -> str:
        """Hash of the training documents and of the validation documents, each in order."""
        by_split = [hashlib.blake2b(self.digests[self.splits == split].tobytes()).digest() for split in (TRAIN, VAL)]
        return _digest(b"".join(by_split)).hex()

    @property
    def held_out(self) -> Positions:
        """The documents in VAL and UNREAD, in the order of their hashes."""
        positions = np.flatnonzero(np.isin(self.splits, (VAL, UNREAD)))
        return positions[np.argsort(self.digests[positions])]

    @property
    def halves(self) -> Splits:
        """The index in HALVES of each document: a bit of its hash that decides nothing else."""
        return (_words(self.digests)[:, 0] & np.uint64(1)).astype(np.uint8)

    def sample(self, factory: TokenizerFactory, share: Fraction = Fraction(1)) -> Positions:
        """The documents that `factory` learns from, in reading order.

        If they exceed a share of its `sample_bytes`, a sample of that size is chosen by the second half of their
        hashes, which is independent of the split.
        """
        splits = {"nothing": (), "train": (TRAIN,), "all": (TRAIN, VAL)}[factory.vocabulary_from]
        positions = np.flatnonzero(np.isin(self.splits, splits))
        bound = getattr(factory, "sample_bytes", None)
        by_hash = positions[np.argsort(_words(self.digests[positions])[:, 1])]
        return np.sort(_prefix(by_hash, self.sizes, math.inf if bound is None else max(1, math.floor(bound * share))))

    def texts(self, positions: Positions) -> Iterator[str]:
        """The texts of the documents to learn from. Raises as `read` does."""
        return (text for _, text in self.read(positions, "training tokenizer"))

    def read(self, positions: Positions, phase: str) -> Iterator[Document]:
        """Read the source again and yield the documents at `positions`. Raises ConfigError if any document changed."""
        wanted = np.zeros(len(self.splits), dtype=bool)
        wanted[positions] = True
        texts = chain(self.source.documents(), _validation(self.source))
        read = encoded(texts, int(self.sizes.sum()), self.progress, phase)
        expected = self.digests.view(f"V{_DIGEST_BYTES}")
        for position, (digest, data) in enumerate(zip_longest(expected, read)):
            if digest is None or data is None or digest.tobytes() != _digest(data):
                raise ConfigError("data: the text changed while it was read; leave it alone, and run the command again")
            if wanted[position]:
                yield position, data.decode()


def survey_source(source: Source, val_fraction: float | None, progress: ReportProgress) -> Survey:
    """Prepare and read `source`, and assign each document to a split, as `assign_splits` does."""
    getattr(source, "prepare", lambda _: None)(progress)
    raw, sizes = bytearray(), array("q")
    to_train_on = 0

    def documents() -> Iterator[str]:
        nonlocal to_train_on
        yield from source.documents()
        to_train_on = len(sizes)  # each text is measured before the next is read
        yield from _validation(source)

    for data in encoded(documents(), source.total_bytes(), progress, "reading"):
        raw += _digest(data)
        sizes.append(len(data))
    digests = np.frombuffer(raw, dtype=f"S{_DIGEST_BYTES}")
    splits = assign_splits(digests, to_train_on, val_fraction)
    return Survey(source, progress, digests, np.frombuffer(sizes, dtype=np.int64), splits)


def _validation(source: Source) -> Iterable[str]:
    """The validation documents of a source that has its own."""
    return getattr(source, "validation", None) or ()


def assign_splits(digests: Digests, to_train_on: int, val_fraction: float | None) -> Splits:
    """Return DROPPED, TRAIN or VAL for each document.

    val_fraction: a document is for validation if the first eight bytes of its hash, as a number in [0, 1), are below
    this, so by its text alone; a split that would be empty gets the document closest to the threshold. None: the
    first `to_train_on` documents are to train on, the others to validate on; of a document in both, the copy to train
    on is dropped, so that validation stays as it was published. Raises ConfigError if a split would be empty.
    """
    _, first_copies = np.unique(np.roll(digests, -to_train_on), return_index=True)  # those to validate on come first
    kept = np.zeros(len(digests), dtype=bool)
    kept[(first_copies + to_train_on) % len(digests)] = True
    kept &= digests != _digest(b"")
    if val_fraction is None:
        is_val = np.arange(len(digests)) >= to_train_on
        for key, split in (("data.split, or data.files", ~is_val), ("data.val_split", is_val)):
            if not (kept & split).any():
                raise ConfigError(f"{key}: has no documents, or only copies of those of the other split; name another")
    else:
        if kept.sum() < 2:
            raise ConfigError(
                f"data.val_fraction={val_fraction}: training and validation need a document each, and the text has "
                f"{kept.sum()} distinct one(s); add text, or cut a text file finer with a lower data.document_chars"
            )
        fractions = (_words(digests)[:, 0] >> np.uint64(11)).astype(np.float64) / 2**53  # a float holds 53 bits exactly
        is_val = fractions < np.clip(val_fraction, np.nextafter(fractions[kept].min(), 1), fractions[kept].max())
    return np.where(kept, np.where(is_val, VAL, TRAIN), DROPPED).astype(np.uint8)


def _words(digests: Digests) -> npt.NDArray[np.uint64]:
    """The two halves of each hash as numbers: `(documents, 2)`."""
    return np.frombuffer(digests.tobytes(), dtype=">u8").reshape(-1, _DIGEST_BYTES // 8)


def _prefix(positions: Positions, sizes: Counts, total: float) -> Positions:
    """The shortest prefix of `positions` with at least `total` bytes, or all."""
    return positions[: int(np.searchsorted(np.cumsum(sizes[positions]), total)) + 1]


def _write_streams(
    survey: Survey, tokenizer: TextTokenizer, dtype: np.dtype, val_tokens: int | None, folder: Path
) -> tuple[Survey, Counts, Counts]:
    """Write `train.bin` and `val.bin`; return the survey with the splits as written, and each document's tokens.

    And its bytes; of one that is cut at a separator, those of the last part, which is predicted.

    Validation consists of the first held-out documents, in the order of their hashes, with at most `val_tokens` in
    all, and at least one. Their lengths are known only after encoding, so somewhat more documents are encoded.
    """
    tokens, sizes = np.zeros(len(survey.splits), dtype=np.int64), survey.sizes.copy()
    eot = np.array([tokenizer.eot_id], dtype).tobytes()
    separator = getattr(survey.source, "separator", None)

    def write(positions: Positions, *splits: int) -> None:
        """Write `[eot] document [eot] document [eot]` for each split: every token but the first is predicted."""
        with ExitStack() as stack:
            files = {split: stack.enter_context((folder / STREAMS[split]).open("wb")) for split in splits}
            for file in files.values():
                file.write(eot)
            for batch in _batches(survey.read(positions, "tokenising")):
                parts_of = [text.split(separator) if separator else [text] for _, text in batch]
                ids = iter(tokenizer.encode_batch([*chain.from_iterable(parts_of)]))
                for (position, _), parts in zip(batch, parts_of, strict=True):
                    data = b"".join(np.array(next(ids), dtype).tobytes() + eot for _ in parts)
                    files[survey.splits[position]].write(data)
                    tokens[position] = len(data) // dtype.itemsize
                    if separator:
                        sizes[position] = len(parts[-1].encode())

    held_out, limit = survey.held_out, math.inf if val_tokens is None else val_tokens
    candidates = _prefix(held_out, survey.sizes, limit * _BYTES_PER_TOKEN)
    write(np.concatenate([np.flatnonzero(survey.splits == TRAIN), candidates]), TRAIN, VAL)
    while len(candidates) < len(held_out) and tokens[candidates].sum() <= limit:  # tokens of this text are longer
        candidates = _prefix(held_out, survey.sizes, 2 * int(survey.sizes[candidates].sum()))
        write(candidates, VAL)
    fitting = max(1, int(np.searchsorted(np.cumsum(tokens[candidates]), limit, side="right")))
    splits = survey.splits.copy()
    splits[held_out[fitting:]] = UNREAD
    if fitting < len(candidates):
        written = np.sort(candidates)
        kept = np.concatenate([[True], np.repeat(splits[written] == VAL, tokens[written])])
        np.fromfile(folder / STREAMS[VAL], dtype)[kept].tofile(folder / STREAMS[VAL])
    return replace(survey, splits=splits), tokens, sizes


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in lists of about `_BATCH_CHARS`."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    yield batch


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
