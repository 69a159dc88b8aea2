"""Checkpoints on disk: the last one and the previous one, since a power cut may truncate a file.

A checkpoint is a file, or, of a sharded run that is not done, a folder with a part of each process, which holds its
rows of every sharded tensor. Rank 0's part also holds the checkpoint as one device would write it, with sharded tensors
on the meta device, so any number of processes can read what any other number wrote. PyTorch's distributed checkpoints
(DCP) are not used: their metadata is a pickle, which may run code, and their data has no checksums.
"""

import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import discard, sync

Join = Callable[[list[Tensor]], Any]
"""Combines a tensor's rows, those of rank 0 first."""
WEIGHTS = {"last": "model.", "ema": "ema."}
"""The weights that a run may leave, the last ones and the moving average of all, and how their names begin."""


def read_checkpoint(path: Path, join: Join = torch.cat) -> dict[str, Any]:
    """The content of a checkpoint, its tensors memory-mapped. Raises ConfigError if it is damaged, or not ours.

    Nothing but plain values and tensors is read: a pickle that would run code is refused. join: see `load_checkpoint`.
    """
    try:
        for file in part_files(path) if path.is_dir() else [path]:
            written = file.stat()
            check_sums(file, written.st_ino, written.st_size, written.st_mtime_ns)
        content: Any = load_checkpoint(path, join)
    except pickle.UnpicklingError as error:  # a pickle of more than weights
        problem = "is no checkpoint of ours: it holds more than weights, and reading it could run code"
        raise ConfigError(f"{path}: {problem}; train the run again, or restore the file") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: is damaged, {first_line(error)}; train the run again, or restore it") from error
    weights, step = (content.get(key) if isinstance(content, dict) else None for key in ("state_dict", "global_step"))
    if not isinstance(weights, dict) or not isinstance(step, int) or not all(isinstance(name, str) for name in weights):
        raise ConfigError(f"{path}: is no checkpoint of ours; name a run that this program trained")
    return content  # type: ignore[no-any-return]


@cache
def check_sums(file: Path, *version: int) -> None:
    """Raise BadZipFile if a file does not match its checksums, which PyTorch writes but does not verify.

    This reads the whole file, so each version of it, by inode, size and time, is checked once.
    """
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"{damaged} has another checksum than when it was written")


def load_checkpoint(path: Path, join: Join = torch.cat) -> dict[str, Any]:
    """The content of a checkpoint that is known to be whole, its tensors memory-mapped.

    join: combines the rows of a sharded tensor, one piece per process.
    """
    if path.is_dir():
        return join_parts([load_checkpoint(file) for file in part_files(path)], join)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # type: ignore[no-any-return]


def model_weights(checkpoint: dict[str, Any], weights: str = "last") -> dict[str, Any]:
    """The weights in a checkpoint by their names in the `Decoder`; empty if it has none of the kind `weights`."""
    prefix = WEIGHTS[weights]
    return {n.removeprefix(prefix): weight for n, weight in checkpoint["state_dict"].items() if n.startswith(prefix)}


def checkpoint_step(checkpoint: Path | None) -> int:
    """The optimizer step of a checkpoint found by `newest_whole`; 0 for None."""
    return 0 if checkpoint is None else int(load_checkpoint(checkpoint, list)["global_step"])


def before(file: Path) -> Path:
    """Where the checkpoint before the one in `file` is kept."""
    return file.with_name(f"before_{file.name}")


def stable(file: Path) -> Path:
    """Where the checkpoint at the start of the decay is kept, beside the last one in `file`."""
    return file.with_name("stable.ckpt")


def existing(file: Path) -> list[Path]:
    """The checkpoint in `file` and the one before it, without those that do not exist."""
    return [candidate for candidate in (file, before(file)) if candidate.exists()]


def newest_whole(file: Path) -> Path | None:
    """The checkpoint to resume from: `file`, or the previous one if that is damaged, which is printed.

    None if there is none. Raises ConfigError if there are some, and none is whole.
    """
    found = existing(file)
    for candidate in found:
        try:
            read_checkpoint(candidate, list)  # which reads no tensor
        except ConfigError as error:
            print(error, file=sys.stderr)
        else:
            return candidate
    if found:
        raise ConfigError(f"{file}: is damaged, and there is no whole one before it; start over with overwrite=true")
    return None


def go_back_to(earlier: Path, file: Path) -> None:
    """Replace the checkpoint in `file` by a copy of `earlier`, and delete the one before it."""
    fresh = file.with_suffix(".tmp")
    discard(fresh)
    if earlier.is_dir():
        shutil.copytree(earlier, fresh)
    else:
        shutil.copyfile(earlier, fresh)
    for part in fresh.rglob("*"):
        sync(part)
    replace_checkpoint(fresh, file)
    discard(before(file))


def replace_checkpoint(fresh: Path, file: Path) -> None:
    """Move `file` to `before(file)`, and `fresh` to `file`; wherever this is interrupted, one of them exists."""
    sync(fresh)
    if file.exists():
        discard(before(file))  # no folder can be replaced
        os.replace(file, before(file))
    os.replace(fresh, file)
    sync(file.parent)


def consolidate(file: Path) -> None:
    """Replace the newest checkpoint, if it is in parts, by the file that one device would have written.

    Wherever this is interrupted, a whole one exists, and this can be repeated.
    """
    parts = file if file.exists() else before(file)
    if parts.is_dir():
        fresh = file.with_suffix(".tmp")
        discard(fresh)
        write_file(load_checkpoint(parts), fresh)
        replace_checkpoint(fresh, file)


def write_part(checkpoint: dict[str, Any], folder: Path, rank: int, world_size: int) -> None:
    """Write the part of a checkpoint of process `rank` of `world_size`, and wait until it is on disk."""
    from torch.distributed.tensor import DTensor  # takes half a second to import, and commands only read

    rows: list[Tensor] = []

    def cut(tensor: DTensor) -> Tensor:
        rows.append(tensor.to_local())
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    whole = apply_to_collection(checkpoint, DTensor, cut)
    part = {"global_step": checkpoint["global_step"], "rows": rows} | ({"whole": whole} if rank == 0 else {})
    write_file(part, part_file(folder, rank, world_size))


def write_file(content: Any, path: Path) -> None:
    """Write `content` with `torch.save`, and wait until it is on disk. Raises OSError."""
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # PyTorch's, about the archive that it cannot end after an OSError
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        file.flush()
        os.fsync(file.fileno())


def part_file(folder: Path, rank: int, world_size: int) -> Path:
    """The file of one process."""
    return folder / f"{rank}_of_{world_size}.ckpt"


def part_files(folder: Path) -> list[Path]:
    """The files of all processes, by rank. Raises FileNotFoundError if one is missing."""
    found = {file.name for file in folder.iterdir()}
    if not found:
        raise FileNotFoundError("it is empty")
    world_size = int(max(found).removesuffix(".ckpt").rpartition("_")[2])
    files = [part_file(folder, rank, world_size) for rank in range(world_size)]
    if missing := [file.name for file in files if file.name not in found]:
        raise FileNotFoundError(f"{missing[0]} is missing")
    return files


def join_parts(parts: Sequence[dict[str, Any]], join: Join) -> dict[str, Any]:
    """The whole checkpoint, the rows of each sharded tensor combined by `join`, once if it is tied.

    Raises ValueError for parts that were not written together.
    """
    if not all(isinstance(part, dict) and {"global_step", "rows"} <= part.keys() for part in parts):
        raise ValueError("one of its files is no part of a checkpoint")
    if len({part["global_step"] for part in parts}) > 1:
        raise ValueError("its parts are from different steps")
    tensors = zip(*(part["rows"] for part in parts), strict=True)
    joined: dict[int, Any] = {}

    def fill(tensor: Tensor) -> Any:
        if not tensor.is_meta:
            return tensor
        rows = list(next(tensors))
        if (key := rows[0].data_ptr()) not in joined:
            joined[key] = join(rows)
        return joined[key]

    return apply_to_collection(parts[0]["whole"], Tensor, fill)  # type: ignore[no-any-return]
