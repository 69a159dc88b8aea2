"""The index of a token folder: its contents, and the checksums that show that it is intact."""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_lab.util.errors import ConfigError

FORMAT_VERSION = 2
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
HALVES = ("tuning", "judging")  # halves of the validation documents, by hash, in the order of `Index.halves`

BLOCK = 1 << 16  # bytes with a checksum of their own
_READ_AT_ONCE = 256 << 20  # bytes of a file that are checked when it is opened, which takes a quarter of a second


class DamagedFolderError(Exception):
    """A token folder is incomplete or altered; the message says how."""


@dataclass(frozen=True)
class SplitIndex:
    """Size of a split: documents, their UTF-8 bytes, and predicted tokens (end-of-text tokens included)."""

    documents: int
    bytes: int
    tokens: int


@dataclass(frozen=True)
class FileIndex:
    """A file's size in bytes, and the CRC-32 of each `BLOCK` of it, as eight hexadecimal digits."""

    size: int
    checksums: str


@dataclass(frozen=True)
class Index:
    """The contents of a token folder.

    `data_hash` identifies the documents of both splits, in order, whatever their source.
    `val_fraction` is the requested fraction; None if the validation documents are the source's own.
    `duplicates` and `empty` count documents left out as exact copies or without text; `unread` the held-out ones
    beyond the bound on validation. `revisions` are the commits of published datasets. `halves` are the `HALVES` of
    `val`; a mixture's are those of its parts.
    """

    format_version: int
    dtype: str
    vocab_size: int
    data_hash: str
    tokenizer_hash: str
    val_fraction: float | None
    train: SplitIndex
    val: SplitIndex
    duplicates: int
    empty: int
    files: dict[str, FileIndex]
    unread: int = 0
    revisions: dict[str, str] = field(default_factory=dict)
    halves: list[SplitIndex] = field(default_factory=list)

    def of_half(self, half: str | None) -> "Index":
        """The same with this half of the validation documents, which is other data; None: with all of them."""
        if half is None:
            return self
        return replace(self, val=self.halves[HALVES.index(half)], data_hash=json_hash([self.data_hash, half], 16))


def write_index(index: Index, folder: Path) -> None:
    """Write `index.json` with a checksum of its content."""
    content = asdict(index)
    document = {"checksum": json_hash(content), "index": content}
    (folder / INDEX_NAME).write_text(json.dumps(document, indent=1), encoding="utf-8")


def read_index(folder: Path) -> Index:
    """Read `index.json` and check every file that it lists; of large files, the first 256 MiB.

    Raises DamagedFolderError if anything is missing, truncated, altered or of another version.
    """
    index = _parse(folder / INDEX_NAME)
    for name, expected in index.files.items():
        Blocks(folder / name, expected).check(0, min(expected.size, _READ_AT_ONCE))
    return index


class Blocks:
    """The content of a file of which each block is compared with its checksum when it is first read.

    Raises DamagedFolderError unless the file is there and has its size.
    """

    def __init__(self, file: Path, expected: FileIndex) -> None:
        if not file.is_file():
            raise DamagedFolderError(f"{file.name} is missing")
        if (size := file.stat().st_size) != expected.size:
            raise DamagedFolderError(f"{file.name} has {size} bytes instead of {expected.size}")
        self._file = file
        self._bytes = np.memmap(file, mode="r").data
        self._checksums = np.frombuffer(bytes.fromhex(expected.checksums), dtype=">u4")
        self._unread = np.ones(len(self._checksums), dtype=bool)

    def check(self, start: int, stop: int) -> None:
        """Check the blocks with the bytes from `start` to `stop`. Raises DamagedFolderError."""
        first = start // BLOCK
        for block in first + np.flatnonzero(self._unread[first : -(-stop // BLOCK)]):
            if zlib.crc32(self._bytes[block * BLOCK : (block + 1) * BLOCK]) != self._checksums[block]:
                raise DamagedFolderError(f"{self._file.name} was altered")
            self._unread[block] = False


class TokenStream:
    """The tokens of a file of a token folder, checked as `Blocks` are; a slice of them is an array."""

    def __init__(self, folder: Path, name: str, index: Index) -> None:
        self._folder = folder
        self._tokens: npt.NDArray[np.unsignedinteger] = np.memmap(folder / name, index.dtype, mode="r")
        self._blocks = Blocks(folder / name, index.files[name])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, which: slice) -> npt.NDArray[np.unsignedinteger]:
        """Raises ConfigError for damaged tokens."""
        start, stop, _ = which.indices(len(self))
        size = self._tokens.itemsize
        try:
            self._blocks.check(start * size, stop * size)
        except DamagedFolderError as error:
            raise ConfigError(
                f"data.cache_dir: the token folder {self._folder} is damaged, {error}; delete the folder, and it is "
                f"built again"
            ) from error
        return self._tokens[which]


def describe_file(path: Path) -> FileIndex:
    """Return the size and the checksums of a file."""
    with path.open("rb") as file:
        checksums = [f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK), b"")]
    return FileIndex(path.stat().st_size, "".join(checksums))


def _parse(path: Path) -> Index:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        content = document["index"]
        if document["checksum"] != json_hash(content):
            raise DamagedFolderError(f"{path.name} was altered")
        if content["format_version"] != FORMAT_VERSION:
            raise DamagedFolderError(f"{path.name} has format version {content['format_version']}")
        splits = {name: SplitIndex(**content[name]) for name in ("train", "val")}
        files = {name: FileIndex(**file) for name, file in content["files"].items()}
        halves = [SplitIndex(**half) for half in content["halves"]]
        return Index(**{**content, **splits, "files": files, "halves": halves})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFolderError(f"{path.name} cannot be read ({type(error).__name__})") from error


def json_hash(content: object, size: int = 8) -> str:
    """Identifies what JSON can hold, in `size` bytes of hexadecimal digits; keys of a dict count in their order."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()
