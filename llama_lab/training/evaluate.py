"""Evaluate a run from its folder alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config import build_model
from llama_lab.data.tokens import TokenDataset
from llama_lab.errors import ConfigError
from llama_lab.model import Decoder

from .folder import RunFolder
from .hardware import choose_hardware
from .length import evaluation
from .run import open_dataset, quiet_libraries


@dataclass(frozen=True)
class TrainedRun:
    """A run's config, data, and model with the weights of its last checkpoint."""

    cfg: DictConfig
    dataset: TokenDataset
    model: Decoder
    step: int


def load_run(folder: RunFolder) -> TrainedRun:
    """Load a run. Raises ConfigError if the folder holds none, or its data are no longer what it was trained on."""
    if not folder.checkpoint.exists():
        raise ConfigError(f"{folder.path}: holds no checkpoint; name a run's folder, such as runs/llama/base/seed=1")
    cfg = OmegaConf.load(folder.path / "resolved.yaml")
    assert isinstance(cfg, DictConfig)
    dataset = open_dataset(cfg, lambda *_: None)
    trained_on = folder.read_json("environment.json")["data_hash"]
    if dataset.data_hash != trained_on:
        raise ConfigError(
            f"{folder.path}: was trained on data {trained_on[:8]}, but its source now holds {dataset.data_hash[:8]}; "
            f"evaluate it where it was trained, or restore the files"
        )
    checkpoint = torch.load(folder.checkpoint, map_location="cpu", weights_only=True)
    model: Decoder = build_model(cfg, dataset.vocab_size)
    weights = checkpoint["state_dict"]
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    return TrainedRun(cfg, dataset, model, checkpoint["global_step"])


def evaluate(path: Path) -> dict[str, Any]:
    """Read the whole validation set with a run's last checkpoint, at all lengths that its config asks for.

    Writes and returns eval.json; see `evaluation`. Raises ConfigError.
    """
    quiet_libraries()
    folder = RunFolder(path)
    run = load_run(folder)
    here = OmegaConf.merge(run.cfg.trainer, {"accelerator": "auto", "devices": 1, "num_nodes": 1})
    assert isinstance(here, DictConfig)
    result = evaluation(run.cfg, run.dataset, run.model, choose_hardware(here), run.step)
    folder.write_json("eval.json", result)
    return result
