"""Cached folders in `data.cache_dir`: named by a hash of what determines their content, and built once."""

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from llama_lab.util.errors import ConfigError
from llama_lab.util.files import discard, report_disk_errors

log = logging.getLogger(__name__)
Opened = TypeVar("Opened")


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
    with _locked(folder):
        if folder.exists():
            try:
                return open_folder()
            except DamagedFolderError as error:
                log.warning("%s is damaged (%s): building it again", folder, error)
        unfinished = folder.with_suffix(".building")
        discard(unfinished)  # of a process that died, since this one has the lock
        try:
            with report_disk_errors(f"data.cache_dir={folder.parent}"):
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


def _locked(folder: Path) -> AbstractContextManager[object]:
    """Acquire the folder's lock, waiting if needed; leaving the context that this returns releases it."""
    lock = FileLock(folder.with_suffix(".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for another process that builds %s", folder)
        return lock.acquire()
    except OSError as error:
        advice = "set data.cache_dir or the environment variable LLAMA_LAB_CACHE to a folder of yours"
        raise ConfigError(f"data.cache_dir={folder.parent}: cannot write there ({error.strerror}); {advice}") from error
