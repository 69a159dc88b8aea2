"""Checkpoints on disk: the last one, and the one before it, since what a power cut leaves of a file may be torn."""

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from llama_lab.errors import ConfigError


def read_checkpoint(file: Path) -> dict[str, Any]:
    """What a checkpoint holds, its tensors mapped from the file. Raises ConfigError if it is not whole, or not ours.

    Checksums are compared, and nothing but plain values and tensors is read: a pickle that would run code is refused.
    """
    try:
        torn = zipfile.ZipFile(file).testzip()
        if torn is not None:
            raise ConfigError(f"{file}: is damaged, {torn} does not match its checksum")
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except ConfigError:
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{file}: is no checkpoint of ours: it holds code, which is not run") from error
    except (OSError, EOFError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file}: is damaged, {str(error).splitlines()[0][:200]}") from error
    if not isinstance(content, dict) or not {"state_dict", "global_step"} <= content.keys():
        raise ConfigError(f"{file}: is no checkpoint of ours")
    return content


def checkpoint_step(checkpoint: Path | None) -> int:
    """The optimizer step that a checkpoint was written after; 0 without one."""
    return 0 if checkpoint is None else int(read_checkpoint(checkpoint)["global_step"])


def before(file: Path) -> Path:
    """Where the checkpoint before the one in `file` is kept."""
    return file.with_name(f"before_{file.name}")


def newest_whole(file: Path) -> Path | None:
    """The checkpoint to go on from: `file`, or the one before it if that is torn, which is told; None if there is none.

    Changes nothing, so that all ranks choose the same. Raises ConfigError if there are some, and none is whole.
    """
    found = [candidate for candidate in (file, before(file)) if candidate.exists()]
    for candidate in found:
        try:
            read_checkpoint(candidate)
        except ConfigError as error:
            print(error, file=sys.stderr)
        else:
            return candidate
    if found:
        raise ConfigError(f"{file}: is damaged, and there is no whole one before it; start over with overwrite=true")
    return None


def replace_checkpoint(fresh: Path, file: Path) -> None:
    """Make `fresh` the checkpoint in `file`, and that the one before it; wherever this stops, one of them is there."""
    with fresh.open("rb") as written:
        os.fsync(written.fileno())  # the name is given only to what is on disk
    if file.exists():
        os.replace(file, before(file))
    os.replace(fresh, file)
