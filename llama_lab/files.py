"""Atomic replacement and deletion of files, and disk errors as messages for the user."""

import errno
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_lab.errors import ConfigError

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
}


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path beside `file` to write to; it replaces `file` at the end, or is deleted after an exception."""
    fresh = file.with_name(f"{file.name}.tmp")
    try:
        yield fresh
    except BaseException:
        fresh.unlink(missing_ok=True)  # it would fill a full disk
        raise
    fresh.replace(file)


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
