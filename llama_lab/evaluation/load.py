"""A trained run, from its folder alone; a folder that cannot be one is refused by name."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config import build_model
from llama_lab.data.tokenizer import TextTokenizer
from llama_lab.data.tokens import TokenDataset
from llama_lab.errors import ConfigError
from llama_lab.model import Decoder
from llama_lab.training.display import open_display
from llama_lab.training.folder import RESOLVED, TOKENIZER, RunFolder
from llama_lab.training.run import open_dataset


@dataclass(frozen=True)
class TrainedRun:
    """A run's config, tokenizer, and model with the weights of its last checkpoint, after `step` optimizer steps.

    facts: environment.json, see `llama_lab/study/trial.py`.
    """

    folder: RunFolder
    cfg: DictConfig
    facts: dict[str, Any]
    tokenizer: TextTokenizer
    model: Decoder
    step: int

    def open_dataset(self) -> TokenDataset:
        """The text it was trained on, built if need be. Raises ConfigError if its source is no longer the same."""
        with open_display(0, rank=0) as display:
            dataset = open_dataset(self.cfg, display.prepare)
        for key in ("data_hash", "tokenizer_hash"):
            if getattr(dataset, key) != self.facts[key]:
                raise ConfigError(
                    f"run={self.folder.path}: was trained with {key} {self.facts[key][:8]}, but its source now gives "
                    f"{getattr(dataset, key)[:8]}; evaluate it where it was trained, or restore the files"
                )
        return dataset


def load_run(path: Path) -> TrainedRun:
    """Load a run, finished or not, onto the CPU. Raises ConfigError if the folder does not hold a whole one.

    Checkpoints are read as plain weights: one that would run code is refused. The config does name the classes that
    are built, so a folder from elsewhere deserves the trust that its code would.
    """
    folder = RunFolder(path)
    if not (path / RESOLVED).exists():
        raise ConfigError(f"run={path}: holds no run; name a run's folder, such as runs/llama/base/seed=1")
    if not folder.checkpoint.exists():
        raise ConfigError(f"run={path}: has no checkpoint yet; train it further with the same command")
    try:
        cfg = OmegaConf.load(path / RESOLVED)
        facts = folder.read_json("environment.json")
        tokenizer = TextTokenizer.load(path / TOKENIZER)
        vocab_size, tokenizer_hash = facts["vocab_size"], facts["tokenizer_hash"]
    except Exception as error:  # yaml, json, tokenizers and the file system raise what they like
        raise ConfigError(f"run={path}: is damaged, {first_line(error)}; train it again") from error
    assert isinstance(cfg, DictConfig)
    if tokenizer.hash != tokenizer_hash:
        raise ConfigError(f"run={path}: {TOKENIZER} is not the one it was trained with; restore the file")
    model: Decoder = build_model(cfg, vocab_size)
    weights, step = read_checkpoint(folder.checkpoint)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(
            f"run={path}: its checkpoint does not fit the model of its {RESOLVED}, {first_line(error)}; "
            f"restore the two files that belong together"
        ) from error
    return TrainedRun(folder, cfg, facts, tokenizer, model.eval(), step)


def read_checkpoint(file: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The model's weights in a checkpoint, and the optimizer step after which it was written. Raises ConfigError."""
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # a pickle of more than weights, or no pickle at all
        raise ConfigError(
            f"{file}: is no checkpoint of ours: it holds more than weights, and reading it could run code; "
            f"train the run again, or restore the file"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: is damaged, {first_line(error)}; train the run again, or restore it") from error
    try:
        weights = {name.removeprefix("model."): weight for name, weight in checkpoint["state_dict"].items()}
        return weights, int(checkpoint["global_step"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: is no checkpoint of ours; name a run that this program trained") from error


def first_line(error: BaseException) -> str:
    """What an error of a library says, short and as a part of a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:200]}"
