"""Load a trained run from its folder."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from llama_lab.config.components import build_model
from llama_lab.config.trust import Trust
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import open_dataset
from llama_lab.data.tokenizer import TextTokenizer
from llama_lab.model import Decoder
from llama_lab.runs.checkpoint import WEIGHTS, model_weights, read_checkpoint
from llama_lab.runs.folder import RESOLVED, TOKENIZER, RunFolder
from llama_lab.runs.json_file import reading
from llama_lab.runs.stored import Environment
from llama_lab.util.display import open_display
from llama_lab.util.errors import ConfigError, first_line

PARTS = ("data", "model", "tokenizer", "train", "trainer")  # of a config, that an evaluation reads


@dataclass(frozen=True)
class TrainedRun:
    """A run's config, tokenizer, and model with weights of its last checkpoint, after `step` optimizer steps.

    step: None of an imported model.
    """

    folder: RunFolder
    cfg: DictConfig
    environment: Environment
    tokenizer: TextTokenizer
    model: Decoder
    step: int | None

    def open_dataset(self) -> Dataset:
        """The text it was trained on, built if need be. Raises ConfigError if its source is no longer the same."""
        cfg = self.cfg.copy()
        if "path" in cfg.tokenizer:
            cfg.tokenizer.path, cfg.tokenizer.end_of_text = str(self.folder.path), None
        with open_display(0, rank=0) as display:
            dataset = open_dataset(cfg, display, self.environment.revisions)
        for key in ("data_hash", "tokenizer_hash"):
            trained_with = getattr(self.environment, key)
            if getattr(dataset.index, key) != trained_with:
                source = f"its source now gives {getattr(dataset.index, key)[:8]}; restore the files"
                raise ConfigError(f"run={self.folder.path}: was trained with {key} {trained_with!s:.8}, but {source}")
        return dataset


def load_run(path: Path, trust: Trust = Trust(), weights: str = "last") -> TrainedRun:  # noqa: B008, it is frozen
    """Load a run, finished or not, onto the CPU. Raises ConfigError if the folder does not hold a whole one.

    weights: `last`, or `ema` for the average that a run with `train.ema` keeps.

    Checkpoints are read as plain weights, and a config that names code which is not trusted is refused: a folder from
    elsewhere can run nothing.
    """
    check_weights(weights)
    folder = RunFolder(path)
    if not (path / RESOLVED).exists():
        raise ConfigError(f"run={path}: holds no run; name a run's folder, such as runs/llama/base/seed=1")
    if not folder.checkpoint.exists():
        raise ConfigError(f"run={path}: has no checkpoint yet, {folder.checkpoint.name}; train it on, or restore it")
    environment = Environment.load(path, needs=("vocab_size", "tokenizer_hash", "data_hash"))
    cfg = folder.config()
    with reading(path, RESOLVED):
        if missing := [part for part in PARTS if part not in cfg]:
            raise ValueError(f"it has no {', '.join(missing)}")
    trust.check(cfg, f"run={path}: its {RESOLVED}", lambda package: f"trust=[{package}]")
    with reading(path, TOKENIZER):
        tokenizer = TextTokenizer.load(path / TOKENIZER)
    if tokenizer.hash != environment.tokenizer_hash:
        raise ConfigError(f"run={path}: {TOKENIZER} is not the one it was trained with; restore the file")
    with reading(path, RESOLVED):
        model: Decoder = build_model(cfg, environment.vocab_size, tokenizer.eot_id)
    checkpoint = read_checkpoint(folder.checkpoint)
    state = model_weights(checkpoint, weights)
    if weights != "last" and not state:
        raise ConfigError(f"weights={weights}: {path} kept no average of its weights; train with train.ema=0.99")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = f"{first_line(error)}; restore the two files that belong together"
        raise ConfigError(f"run={path}: its checkpoint does not fit the model of its {RESOLVED}, {reason}") from error
    return TrainedRun(folder, cfg, environment, tokenizer, model.eval(), checkpoint["global_step"])


def check_weights(weights: str) -> None:
    """Raise ConfigError unless there is a kind of weights of this name."""
    if weights not in WEIGHTS:
        raise ConfigError(f"weights={weights}: unknown; choose {' | '.join(WEIGHTS)}")
