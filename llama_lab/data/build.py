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

from llama_lab.util.errors import ConfigError, require_positive
from llama_lab.util.formatting import conjoin, duration

from .dataset import HALVES, SplitIndex
from .folders import FolderIndex, describe_file, json_hash, write_index
from .near_copies import gram_size, shares_in_training
from .source import ReportProgress, Source, cut, encoded
from .tokenizer import TOKENIZER_NAME, TextTokenizer, TokenizerFactory

Digests = npt.NDArray[np.bytes_]
"""The blake2b hash of each document's UTF-8 bytes: `(documents,)`, 16 bytes each."""

Positions = npt.NDArray[np.int64]
"""Indices of documents in reading order, from 0."""

Counts = npt.NDArray[np.int64]
"""One number per document."""

Splits = npt.NDArray[np.uint8]
"""DROPPED, TRAIN, VAL, UNREAD or NEAR_COPY per document."""

Document = tuple[int, str]
"""Its position, and its text."""

DROPPED, TRAIN, VAL, UNREAD, NEAR_COPY = range(5)

_DIGEST_BYTES = 16
_BATCH_CHARS = 1 << 20  # of text encoded at once, on all cores; some 50 MB of encodings
_BYTES_PER_TOKEN = 8  # more than in most texts
STREAMS = {TRAIN: "train.bin", VAL: "val.bin"}
VAL_HALVES = "val_halves.bin"  # the index in HALVES of each predicted token of val.bin, one byte


@dataclass(frozen=True)
class HoldOut:
    """How many documents are held out to validate on, and what is read of them.

    fraction: of the documents; None for a source with validation documents of its own. tokens: at most so many are
    read. max_overlap: a document with a larger share of its n-grams in the training text is a near copy, and left out.
    document_chars: of one document, at most so many are read. block_chars: the halves take blocks of so many characters
    of every document in turn; None: whole documents. Each of these may be None: no bound.
    """

    fraction: float | None
    tokens: int | None = None
    max_overlap: float | None = None
    document_chars: int | None = None
    block_chars: int | None = None

    def __post_init__(self) -> None:
        require_positive("data.val_tokens", self.tokens)
        require_positive("data.val_document_chars", self.document_chars)
        require_positive("data.val_block_chars", self.block_chars)
        if self.max_overlap is not None and not 0 < self.max_overlap <= 1:
            raise ConfigError(f"data.max_overlap={self.max_overlap}: must be above 0 and at most 1, or null")

    def blocks(self, text: str) -> list[str]:
        """What is read of a held-out document, in blocks."""
        beginning = next(cut([text], self.document_chars))
        return [*cut([beginning], self.block_chars)]


def build(source: Source, factory: TokenizerFactory, hold_out: HoldOut, folder: Path, progress: ReportProgress) -> str:
    """Fill an empty folder, after the whole text has been read once; return one line on the time and the result.

    Raises ConfigError for unusable text.
    """
    start = time.monotonic()
    survey = survey_source(source, hold_out.fraction, progress)
    surveyed = time.monotonic()
    sample = survey.sample(factory)
    tokenizer = factory.train(survey.texts(sample))
    trained = time.monotonic()
    tokenizer.save(folder / TOKENIZER_NAME)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    written = _write_streams(survey, tokenizer, dtype, hold_out, folder)
    survey, sizes, tokens = written.survey, written.sizes, written.tokens
    data_hash = survey.data_hash
    if hold_out.document_chars or hold_out.block_chars:  # other validation text than the whole documents
        data_hash = json_hash([data_hash, hold_out.document_chars, hold_out.block_chars], _DIGEST_BYTES)

    def size_of(chosen: npt.NDArray[np.bool_]) -> SplitIndex:
        return SplitIndex(int(chosen.sum()), int(sizes[chosen].sum()), int(tokens[chosen].sum()))

    empty = int((survey.sizes == 0).sum())
    halves = _write_halves(written, folder / VAL_HALVES)
    index = FolderIndex(
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        data_hash=data_hash,
        tokenizer_hash=tokenizer.hash,
        val_fraction=hold_out.fraction,
        train=size_of(survey.splits == TRAIN),
        val=size_of(survey.splits == VAL),
        duplicates=int((survey.splits == DROPPED).sum()) - empty,
        empty=empty,
        near_copies=int((survey.splits == NEAR_COPY).sum()),
        files={path.name: describe_file(path) for path in sorted(folder.iterdir())},
        unread=int((survey.splits == UNREAD).sum()),
        revisions=getattr(source, "revisions", {}),
        halves=halves,
    )
    write_index(index, folder)
    text, learnt, tokenised = (int(survey.sizes[chosen].sum()) for chosen in (slice(None), sample, tokens > 0))
    seconds = time.monotonic() - trained
    val = index.val
    held_out = f" ({val.documents:,} of {val.documents + index.unread:,} held-out documents)" if index.unread else ""
    kinds = {"copies": index.duplicates, "near copies": index.near_copies, "empty": index.empty}
    left_out = [f"{n:,} {kind}" for kind, n in kinds.items() if n]
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

    `sizes` are in UTF-8 bytes. `splits` are DROPPED (empty, or a copy of an earlier document), TRAIN, VAL, UNREAD (held
    out like VAL, but beyond the bound on validation), or NEAR_COPY (held out, and most of it trained on elsewhere).
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
        """The index in HALVES of each document's first block: a bit of its hash that decides nothing else."""
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


@dataclass(frozen=True)
class Written:
    """What the streams hold: `survey` with the splits as written, and the size of each document.

    sizes: in bytes; of one that is cut at a separator, those of the last part, which is predicted. tokens: with the
    end-of-text tokens. blocks: the tokens and bytes of each block of the documents to validate on, by position.
    """

    survey: Survey
    sizes: Counts
    tokens: Counts
    blocks: dict[int, list[tuple[int, int]]]


def _write_streams(
    survey: Survey, tokenizer: TextTokenizer, dtype: np.dtype, hold_out: HoldOut, folder: Path
) -> Written:
    """Write `train.bin` and `val.bin`.

    Validation consists of the first held-out documents, in the order of their hashes, with at most `hold_out.tokens` in
    all, and at least one, without near copies. Their lengths are known only after encoding, so somewhat more documents
    are encoded.
    """
    tokens, sizes = np.zeros(len(survey.splits), dtype=np.int64), survey.sizes.copy()
    blocks: dict[int, list[tuple[int, int]]] = {}
    eot = np.array([tokenizer.eot_id], dtype).tobytes()
    separator = getattr(survey.source, "separator", None)

    def parts_of(position: int, text: str) -> list[str]:
        """What is encoded apart."""
        if separator:
            return text.split(separator)
        return [text] if survey.splits[position] == TRAIN else hold_out.blocks(text)

    def write(positions: Positions, *splits: int) -> None:
        """Write `[eot] document [eot] document [eot]` for each split: every token but the first is predicted."""
        with ExitStack() as stack:
            files = {split: stack.enter_context((folder / STREAMS[split]).open("wb")) for split in splits}
            for file in files.values():
                file.write(eot)
            for batch in _batches(survey.read(positions, "tokenising")):
                parts = {position: parts_of(position, text) for position, text in batch}
                encodings = iter(tokenizer.encode_batch([*chain.from_iterable(parts.values())]))
                for position, texts in parts.items():
                    ids = [np.array(next(encodings), dtype).tobytes() for _ in texts]
                    data = (eot if separator else b"").join(ids) + eot
                    files[survey.splits[position]].write(data)
                    tokens[position] = len(data) // dtype.itemsize
                    lengths = [len(text.encode()) for text in texts]
                    sizes[position] = lengths[-1] if separator else sum(lengths)
                    if survey.splits[position] == VAL:
                        counts = [len(part) // dtype.itemsize for part in ids]
                        counts[-1] += 1  # the end of the text
                        whole = [(int(tokens[position]), int(sizes[position]))]
                        blocks[position] = whole if separator else [*zip(counts, lengths, strict=True)]

    held_out, limit = survey.held_out, math.inf if hold_out.tokens is None else hold_out.tokens
    candidates = _prefix(held_out, survey.sizes, limit * _BYTES_PER_TOKEN)
    write(np.concatenate([np.flatnonzero(survey.splits == TRAIN), candidates]), TRAIN, VAL)
    while len(candidates) < len(held_out) and tokens[candidates].sum() <= limit:  # tokens of this text are longer
        candidates = _prefix(held_out, survey.sizes, 2 * int(survey.sizes[candidates].sum()))
        write(candidates, VAL)
    fitting = max(1, int(np.searchsorted(np.cumsum(tokens[candidates]), limit, side="right")))
    splits = survey.splits.copy()
    splits[held_out[fitting:]] = UNREAD
    written = np.sort(candidates)
    stream = np.fromfile(folder / STREAMS[VAL], dtype)
    if hold_out.max_overlap is not None:
        documents = np.split(stream[1:], np.cumsum(tokens[written])[:-1])
        is_train = splits == TRAIN
        size = gram_size(sizes[is_train].sum() / tokens[is_train].sum())
        train = np.memmap(folder / STREAMS[TRAIN], dtype, mode="r")
        shares = np.array(shares_in_training(train, [ids[:-1] for ids in documents], size))
        near = written[(shares > hold_out.max_overlap) & (splits[written] == VAL)]
        splits[near] = NEAR_COPY
        if not (splits == VAL).any():
            problem = f"of all {len(near)} held-out documents, more is in the training text, word for word"
            raise ConfigError(f"data.max_overlap={hold_out.max_overlap}: {problem}; raise it, or add other text")
    kept = np.concatenate([[True], np.repeat(splits[written] == VAL, tokens[written])])
    if not kept.all():
        stream[kept].tofile(folder / STREAMS[VAL])
    return Written(replace(survey, splits=splits), sizes, tokens, blocks)


def _write_halves(written: Written, file: Path) -> list[SplitIndex]:
    """Write the half of each token of `val.bin`, and return the size of each half."""
    first = written.survey.halves
    rows = [
        (position, (first[position] + place) % len(HALVES), tokens, size)
        for position in np.flatnonzero(written.survey.splits == VAL).tolist()
        for place, (tokens, size) in enumerate(written.blocks[position])
    ]
    positions, halves, tokens, sizes = np.array(rows, dtype=np.int64).T
    np.repeat(halves.astype(np.uint8), tokens).tofile(file)
    chosen = [halves == half for half in range(len(HALVES))]
    return [SplitIndex(len({*positions[c]}), int(sizes[c].sum()), int(tokens[c].sum())) for c in chosen]


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
