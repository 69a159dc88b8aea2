"""Files that are replaced in one move, so that nobody ever finds half of one; and disks that take no more."""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_lab.errors import ConfigError

# What a disk may have against a file, and what a person can do. Any other OSError is a bug of ours.
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have your quota raised",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make it writable, or choose another folder",
    errno.EACCES: "make it yours, or choose another folder",
    errno.EPERM: "make it yours, or choose another folder",
    errno.ENAMETOOLONG: "make it shorter",
    errno.EIO: "look after the disk",
}


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to, which takes its place at the end, unless writing failed: then it is deleted."""
    fresh = file.with_name(f"{file.name}.tmp")
    try:
        yield fresh
    except BaseException:
        fresh.unlink(missing_ok=True)  # it would fill a full disk
        raise
    fresh.replace(file)


@contextmanager
def disk_errors_told(setting: str) -> Iterator[None]:
    """Turn what the disk has against a file into a ConfigError that begins with the `setting` of the folder in use."""
    hook, threading.excepthook = threading.excepthook, told_of_bugs
    try:
        yield
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        raise ConfigError(f"{setting}: {what}; {REMEDIES[error.errno]}, and give the same command again") from error
    finally:
        threading.excepthook = hook


def told_of_bugs(error: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, unless it is the disk: TensorBoard's raises that in the main thread, too."""
    if not isinstance(error.exc_value, OSError) or error.exc_value.errno not in REMEDIES:
        threading.__excepthook__(error)
