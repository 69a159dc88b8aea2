"""Checkpoints on disk: the last one, and the one before it, since what a power cut leaves of a file may be torn."""

import io
import os
import pickle
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from llama_lab.errors import ConfigError, first_line


def read_checkpoint(file: Path) -> dict[str, Any]:
    """What a checkpoint holds, its tensors mapped from the file. Raises ConfigError if it is not whole, or not ours.

    Nothing but plain values and tensors is read: a pickle that would run code is refused.
    """
    try:
        with zipfile.ZipFile(file) as archive:  # PyTorch does not look at the checksums that it writes
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged} has another checksum than when it was written")
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # a pickle of more than weights
        raise ConfigError(
            f"{file}: is no checkpoint of ours: it holds more than weights, and reading it could run code; "
            f"train the run again, or restore the file"
        ) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: is damaged, {first_line(error)}; train the run again, or restore it") from error
    weights, step = (content.get(key) if isinstance(content, dict) else None for key in ("state_dict", "global_step"))
    if not isinstance(weights, dict) or not isinstance(step, int) or not all(isinstance(name, str) for name in weights):
        raise ConfigError(f"{file}: is no checkpoint of ours; name a run that this program trained")
    return content  # type: ignore[no-any-return]


def checkpoint_step(checkpoint: Path | None) -> int:
    """The optimizer step that a checkpoint, one of `newest_whole`, was written after; 0 without one."""
    if checkpoint is None:
        return 0
    return int(torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["global_step"])


def before(file: Path) -> Path:
    """Where the checkpoint before the one in `file` is kept."""
    return file.with_name(f"before_{file.name}")


def stable(file: Path) -> Path:
    """Where the checkpoint at the start of the decay is kept, beside the last one in `file`."""
    return file.with_name("stable.ckpt")


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


class WrittenInPlace(TorchCheckpointIO):
    """Writes a checkpoint where it is to be. Lightning's own writes it where temporary files are, and moves it: there
    may be no room for it, and a kill would leave it for good.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write it as PyTorch does; raises OSError, which PyTorch itself, writing to a full disk, would not."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        Path(path).write_bytes(content.getbuffer())


def go_back_to(earlier: Path, file: Path) -> None:
    """Make a copy of `earlier` the checkpoint in `file`, and forget all that came after it."""
    fresh = file.with_suffix(".tmp")
    shutil.copyfile(earlier, fresh)
    sync(fresh)
    before(file).unlink(missing_ok=True)
    os.replace(fresh, file)


def replace_checkpoint(fresh: Path, file: Path) -> None:
    """Make `fresh` the checkpoint in `file`, and that the one before it; wherever this stops, one of them is there."""
    sync(fresh)
    if file.exists():
        os.replace(file, before(file))
    os.replace(fresh, file)


def sync(file: Path) -> None:
    """Wait until a file is on disk, so that a name is given only to what is there."""
    with file.open("rb") as written:
        os.fsync(written.fileno())
