"""The index of a token folder: its contents, and the hashes that show that it is intact."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FORMAT_VERSION = 1
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"

_MEGABYTE = 1 << 20
_READ_IN_FULL = 256 * _MEGABYTE  # hashing this much takes a quarter of a second


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
    """A file's size in bytes, its hash, and the hash of its first and last megabyte."""

    size: int
    hash: str
    ends_hash: str


@dataclass(frozen=True)
class Index:
    """The contents of a token folder.

    `data_hash` identifies the documents of both splits, in order, whatever their source.
    `val_fraction` is the requested fraction; None if the validation documents are the source's own.
    `duplicates` and `empty` count documents left out as exact copies or without text; `unread` the held-out ones
    beyond the bound on validation. `revisions` are the commits of published datasets. Older folders lack these two.
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


def write_index(index: Index, folder: Path) -> None:
    """Write `index.json` with a checksum of its content."""
    content = asdict(index)
    document = {"checksum": _checksum(content), "index": content}
    (folder / INDEX_NAME).write_text(json.dumps(document, indent=1), encoding="utf-8")


def read_index(folder: Path) -> Index:
    """Read `index.json` and check every file that it lists; of large files, only the size and both ends.

    Raises DamagedFolderError if anything is missing, truncated, altered or of another version.
    """
    index = _parse(folder / INDEX_NAME)
    for name, expected in index.files.items():
        _check_file(folder / name, expected)
    return index


def describe_file(path: Path) -> FileIndex:
    """Return the size and the hashes of a file."""
    with path.open("rb") as file:
        whole = hashlib.file_digest(file, _digest).hexdigest()
    return FileIndex(path.stat().st_size, whole, _ends_hash(path))


def _parse(path: Path) -> Index:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        content = document["index"]
        if document["checksum"] != _checksum(content):
            raise DamagedFolderError(f"{path.name} was altered")
        if content["format_version"] != FORMAT_VERSION:
            raise DamagedFolderError(f"{path.name} has format version {content['format_version']}")
        splits = {name: SplitIndex(**content[name]) for name in ("train", "val")}
        files = {name: FileIndex(**file) for name, file in content["files"].items()}
        return Index(**{**content, **splits, "files": files})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFolderError(f"{path.name} cannot be read ({type(error).__name__})") from error


def json_hash(content: object, size: int = 8) -> str:
    """Identifies what JSON can hold, in `size` bytes of hexadecimal digits; keys of a dict count in their order."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()


def _checksum(content: object) -> str:
    return _digest(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, expected: FileIndex) -> None:
    if not path.is_file():
        raise DamagedFolderError(f"{path.name} is missing")
    size = path.stat().st_size
    if size != expected.size:
        raise DamagedFolderError(f"{path.name} has {size} bytes instead of {expected.size}")
    if _ends_hash(path) != expected.ends_hash:
        raise DamagedFolderError(f"{path.name} was altered")
    if size <= _READ_IN_FULL and describe_file(path).hash != expected.hash:
        raise DamagedFolderError(f"{path.name} was altered")


def _ends_hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = _digest(file.read(_MEGABYTE))
        file.seek(max(0, path.stat().st_size - _MEGABYTE))
        digest.update(file.read(_MEGABYTE))
    return digest.hexdigest()


def _digest(data: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=16)
