"""A checkpoint in parts: a folder with a file of each process, which holds its rows of every sharded tensor.

Rank 0's part also holds the checkpoint as one device would write it, with sharded tensors on the meta device, so any
number of processes can read what any other number wrote. PyTorch's distributed checkpoints (DCP) are not used: their
metadata is a pickle, which may run code, and their data has no checksums.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

Join = Callable[[list[Tensor]], Any]
"""Combines a tensor's rows, those of rank 0 first."""


def write_part(checkpoint: dict[str, Any], folder: Path, rank: int, world_size: int) -> None:
    """Write the part of a checkpoint of process `rank` of `world_size`, and wait until it is on disk."""
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


def own_rows(tensor: Tensor | Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of a tensor that is given whole, or as the rows of each process."""
    pieces = [tensor] if isinstance(tensor, Tensor) else tensor
    found, first = [pieces[0][:0]], 0
    for piece in pieces:
        found.append(piece[max(start - first, 0) : max(stop - first, 0)])
        first += len(piece)
    return torch.cat(found)
