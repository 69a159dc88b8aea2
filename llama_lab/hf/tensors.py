"""Read and write safetensors, in one file or in shards with an index. Pickles, which can run code, are not read."""

import json
import re
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llama_lab.util.errors import ConfigError, first_line

from .settings import INFINITY

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that `read_weights` can read, whole or not."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in a folder by name, memory-mapped. Raises ConfigError for files that are missing or damaged."""
    if not has_weights(folder):
        if pickles := [name for name in PICKLES if (folder / name).exists()]:
            raise ConfigError(
                f"{folder}: its weights are in {pickles[0]}, a pickle, which can run any code; convert it where you "
                f"trust it: AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
            )
        raise ConfigError(f"{folder}: holds no {WEIGHTS}; name a folder that a model was saved or exported to")
    if not (folder / INDEX).exists():
        return read_file(folder / WEIGHTS)
    weights: dict[str, Tensor] = {}
    placed = read_index(folder / INDEX)
    for shard in sorted(set(placed.values())):
        if not (folder / shard).exists():
            raise ConfigError(f"{folder}: {shard} is missing, which {INDEX} names; copy or download it again")
        weights |= read_file(folder / shard)
    if missing := sorted(placed.keys() - weights.keys()):
        name = missing[0]
        raise ConfigError(
            f"{folder}: {placed[name]} lacks {name}, which {INDEX} places there; copy or download both again"
        )
    return weights


def read_index(file: Path) -> dict[str, str]:
    """The shard of each tensor. Raises ConfigError for a file that is no index, or names files elsewhere."""
    index = read_json(file)
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise ConfigError(f"{file}: has no weight_map; copy or download it again")
    for shard in placed.values():
        if Path(shard).name != shard:
            raise ConfigError(f"{file}: names {shard}, outside of its folder; take the model from where you trust it")
    return placed


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError."""
    try:
        content = json.loads(file.read_bytes(), parse_constant=infinity)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read, {first_line(error)}; copy or download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds no JSON object; copy or download it again")
    return content


def infinity(name: str) -> dict[str, str]:
    """Infinity as transformers writes it today. Raises ValueError for what else Python's parser takes for a number."""
    if name not in INFINITY.values():
        raise ValueError(f"{name} is no JSON number")
    return INFINITY


def check_finite(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for a weight that is NaN or infinite."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ConfigError(f"{folder}: its weight {name} is not finite; take an earlier checkpoint, or another copy")


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors in a file. Raises ConfigError."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: is damaged or no safetensors file, {first_line(error)}; copy or download it again"
        ) from error


def write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int | None = None) -> None:
    """Write tensors, in shards with an index if they are more than `max_shard_bytes`; a larger tensor has its own."""
    shards = split_shards(weights, max_shard_bytes)
    metadata = {"format": "pt"}  # which transformers asks for
    if len(shards) == 1:
        save_file({name: weights[name].contiguous() for name in weights}, folder / WEIGHTS, metadata)
        return
    placed: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        shard = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file({name: weights[name].contiguous() for name in names}, folder / shard, metadata)
        placed |= dict.fromkeys(names, shard)
    total = sum(weight.nbytes for weight in weights.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def split_shards(weights: Mapping[str, Tensor], max_bytes: int | None) -> list[list[str]]:
    """The names of the tensors in each file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        if shards[-1] and max_bytes is not None and size + weight.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += weight.nbytes
    return shards


def parse_size(option: str, text: str) -> int:
    """The bytes of a size such as `500MB` or `5GB`. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])?B?", text, re.IGNORECASE)
    size = 0 if found is None else int(float(found[1]) * 1000 ** " KMGT".index((found[2] or " ").upper()))
    if size < 1:
        raise ConfigError(f"{option}={text}: is no size; write it as 500MB or 5GB")
    return size


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def common_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that holds all weights."""
    return reduce(torch.promote_types, {weight.dtype for weight in weights.values()})
