"""Atomic replacement and deletion of files, checksums inside them, and disk errors as messages for the user."""

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError

# Errors of a disk, and what the user can do about each. Any other OSError is a bug of ours.
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have your quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make it writable, or choose another folder",
    errno.EACCES: "make it yours, or choose another folder",
    errno.EPERM: "make it yours, or choose another folder",
    errno.ENAMETOOLONG: "make it shorter",
    errno.EIO: "check the disk",
    errno.EISDIR: "move that folder away",
    errno.ENOTDIR: "move that file away",
    errno.EEXIST: "choose another folder",
    errno.EINVAL: "choose another folder",
}
ALTERED = "it was altered since it was written (if by you, delete its checksum)"
STAMP = "# checksum: "  # begins the first line of a stamped file


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path beside `file` to write to; it replaces `file` at the end, or is deleted after an exception.

    A power cut leaves the old file or the new one, whole.
    """
    fresh = file.with_name(f"{file.name}.tmp")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(file)
    except BaseException:
        fresh.unlink(missing_ok=True)  # it would fill a full disk
        raise
    sync(file.parent)


def replace_text(file: Path, text: str) -> None:
    """Replace the text of a file in one move."""
    with replacing(file) as fresh:
        fresh.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk; only then may it be renamed."""
    written = os.open(path, os.O_RDONLY)
    os.fsync(written)
    os.close(written)


def checksum(text: str) -> str:
    """The CRC-32 of a text, as eight hexadecimal digits."""
    return f"{zlib.crc32(text.encode()):08x}"


def stamped(text: str) -> str:
    """A YAML text after a line with its checksum."""
    return f"{STAMP}{checksum(text)}\n{text}"


def read_stamped(file: Path) -> str:
    """The text of a file that may be `stamped`. Raises ValueError if it was altered since."""
    text = file.read_text(encoding="utf-8")
    first, _, content = text.partition("\n")
    if STAMP.strip("# ") in first and text != stamped(content):
        raise ValueError(ALTERED)
    return text


def discard(path: Path) -> None:
    """Delete a file, or a folder with all that it holds, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def report_disk_errors(setting: str) -> Iterator[None]:
    """Turn disk errors into a ConfigError that begins with `setting`, which chose the folder in use."""
    hook, threading.excepthook = threading.excepthook, thread_excepthook
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        raise ConfigError(f"{setting}: {what}; {REMEDIES[error.errno]}, and run the same command again") from error
    finally:
        threading.excepthook = hook


def thread_excepthook(error: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, except disk errors: TensorBoard's thread raises them in the main thread, too."""
    if not isinstance(error.exc_value, OSError) or error.exc_value.errno not in REMEDIES:
        threading.__excepthook__(error)
