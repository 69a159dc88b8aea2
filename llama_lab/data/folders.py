"""Cached folders in `data.cache_dir`, named by a hash of what determines their content; the files of token folders."""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from filelock import FileLock

from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import discard, report_disk_errors

from .dataset import HALVES, Index, SplitIndex, Tokens

log = logging.getLogger(__name__)
Opened = TypeVar("Opened")

FORMAT_VERSION = 3
INDEX_NAME = "index.json"
SEAL_NAME = "checksums.json"  # in folders of other files than tokens

BLOCK = 1 << 16  # bytes with a checksum of their own
_READ_AT_ONCE = 256 << 20  # bytes of a file that are checked when it is opened, which takes a quarter of a second


class DamagedFolderError(Exception):
    """A folder is incomplete or altered; the message says how."""


def json_hash(content: object, size: int = 8) -> str:
    """Hash of a JSON value, `size` bytes as hexadecimal digits; depends on the order of keys."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=size).hexdigest()


def open_or_build(folder: Path, open_folder: Callable[[], Opened], build: Callable[[Path], None]) -> Opened:
    """Open `folder`; if it is missing or damaged, `build` first fills an empty folder that then replaces it.

    Of concurrent processes, one builds. After a failure of `build`, its files are deleted. Raises ConfigError for disk
    errors.
    """
    with suppress(DamagedFolderError):
        if folder.exists():
            return open_folder()
    unfinished = folder.with_suffix(".building")
    with report_disk_errors(f"data.cache_dir={folder.parent}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if folder.exists():
                try:
                    return open_folder()
                except DamagedFolderError as error:
                    log.warning("%s is damaged (%s): building it again", folder, error)
            discard(unfinished)  # of a process that died, since this one has the lock
            try:
                unfinished.mkdir()
                build(unfinished)
                discard(folder)
                unfinished.rename(folder)
            except FileNotFoundError as error:
                gone = f"data: {error.filename} disappeared during the build"
                raise ConfigError(f"{gone}; restore it, and run the same command again") from error
            finally:
                discard(unfinished)
            return open_folder()


@dataclass(frozen=True)
class FileIndex:
    """A file's size in bytes, and the CRC-32 of each `BLOCK` of it, as eight hexadecimal digits."""

    size: int
    checksums: str


@dataclass(frozen=True, kw_only=True)
class FolderIndex(Index):
    """The contents of a token folder.

    `val_fraction` is the requested fraction; None if the validation documents are the source's own.
    `duplicates` and `empty` count documents left out as exact copies or without text, `near_copies` held-out ones left
    out as near copies of training text, `unread` the held-out ones beyond the bound on validation. `halves` are the
    `HALVES` of `val`, in which a document may have a part each.
    """

    format_version: int = FORMAT_VERSION
    dtype: str
    val_fraction: float | None
    duplicates: int
    empty: int
    near_copies: int
    unread: int
    files: dict[str, FileIndex]
    halves: list[SplitIndex]

    def of_half(self, half: str) -> Self:
        """The same with this half of the validation documents, which is other data."""
        return replace(self, val=self.halves[HALVES.index(half)], data_hash=json_hash([self.data_hash, half], 16))


def write_index(index: FolderIndex, folder: Path) -> None:
    """Write `index.json` with a checksum of its content."""
    content = asdict(index)
    document = {"checksum": json_hash(content), "index": content}
    (folder / INDEX_NAME).write_text(json.dumps(document, indent=1), encoding="utf-8")


def read_index(folder: Path) -> FolderIndex:
    """Read `index.json` and check every file that it lists; of large files, the first 256 MiB.

    Raises DamagedFolderError if anything is missing, truncated or altered.
    """
    try:
        document = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        content = document["index"]
        if document["checksum"] != json_hash(content):
            raise DamagedFolderError(f"{INDEX_NAME} was altered")
        content |= {name: SplitIndex(**content[name]) for name in ("train", "val")}
        content["files"] = {name: FileIndex(**file) for name, file in content["files"].items()}
        content["halves"] = [SplitIndex(**half) for half in content["halves"]]
        index = FolderIndex(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFolderError(f"{INDEX_NAME} cannot be read ({type(error).__name__})") from error
    for name in index.files:
        TokenStream(folder, name, index).check(0, _READ_AT_ONCE)
    return index


class TokenStream:
    """A file of a token folder; a slice of it is an array of tokens, whose blocks are checked when first read.

    Raises DamagedFolderError unless the file is there and has its size.
    """

    def __init__(self, folder: Path, name: str, index: FolderIndex) -> None:
        self._file, expected = folder / name, index.files[name]
        size = self._file.stat().st_size if self._file.is_file() else 0
        if size != expected.size:
            raise DamagedFolderError(f"{name} has {size} bytes instead of {expected.size}")
        self._dtype = np.dtype(index.dtype)
        self._bytes = np.memmap(self._file, mode="r")
        self._checksums = np.frombuffer(bytes.fromhex(expected.checksums), dtype=">u4")
        self._unread = np.ones(len(self._checksums), dtype=bool)

    def __len__(self) -> int:
        return len(self._bytes) // self._dtype.itemsize

    def __getitem__(self, which: slice) -> Tokens:
        """Raises ConfigError for damaged tokens."""
        start, stop = (self._dtype.itemsize * end for end in which.indices(len(self))[:2])
        try:
            self.check(start, stop)
        except DamagedFolderError as error:
            raise ConfigError(f"data.cache_dir: {self._file.parent} is damaged, {error}; delete the folder") from error
        return self._bytes[start:stop].view(self._dtype)

    def check(self, start: int, stop: int) -> None:
        """Compare the blocks with the bytes from `start` to `stop` with their checksums. Raises DamagedFolderError."""
        first = start // BLOCK
        for block in first + np.flatnonzero(self._unread[first : -(-stop // BLOCK)]):
            if zlib.crc32(self._bytes.data[block * BLOCK : (block + 1) * BLOCK]) != self._checksums[block]:
                raise DamagedFolderError(f"{self._file.name} was altered")
            self._unread[block] = False


def describe_file(path: Path) -> FileIndex:
    """Return the size and the checksums of a file."""
    with path.open("rb") as file:
        checksums = [f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(BLOCK), b"")]
    return FileIndex(path.stat().st_size, "".join(checksums))


def seal(folder: Path) -> None:
    """Write the sizes and checksums of a folder's files beside them, for `check_seal`."""
    files = {path.name: asdict(describe_file(path)) for path in sorted(folder.iterdir())}
    (folder / SEAL_NAME).write_text(json.dumps(files, indent=1), encoding="utf-8")


def check_seal(folder: Path) -> None:
    """Raise DamagedFolderError if a file is not as it was sealed. Folders of version 0.4.0 have no seal."""
    if not (folder / SEAL_NAME).exists():
        return
    try:
        sealed = json.loads((folder / SEAL_NAME).read_text(encoding="utf-8"))
        for name, known in sealed.items():
            if asdict(describe_file(folder / name)) != known:
                raise DamagedFolderError(f"{name} was altered, or {SEAL_NAME}")
    except (OSError, ValueError) as error:
        raise DamagedFolderError(first_line(error)) from error
