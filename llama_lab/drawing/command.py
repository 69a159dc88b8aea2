"""`draw=FILE.svg`: an architecture as a picture, without training, and another one beside it."""

from pathlib import Path

import torch
from omegaconf import DictConfig

from llama_lab.config.components import build_model
from llama_lab.estimate.estimate import expected_vocabulary
from llama_lab.util.errors import ConfigError
from llama_lab.util.files import replace_text

from .anatomy import Anatomy, anatomy
from .picture import picture


def check_file(name: str) -> Path:
    """The file to draw into, which is overwritten. Raises ConfigError unless it can be an SVG file."""
    file = Path(name)
    if file.suffix != ".svg" and "=" in name:
        raise ConfigError(f"draw={name}: is a setting; name an SVG file before it, llama-lab draw model.svg {name}")
    if file.suffix != ".svg":
        raise ConfigError(f"draw={name}: the picture is an SVG file; name it so, draw={file.with_suffix('.svg')}")
    if file.is_dir():
        raise ConfigError(f"draw={name}: is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ConfigError(f"draw={name}: there is no folder {file.parent}; create it, or choose another")
    return file


def draw(cfg: DictConfig, name: str, against: tuple[DictConfig, str] | None) -> Path:
    """Draw the model of `cfg`, beside that of another config with its name. Returns the file. Raises ConfigError."""
    file = check_file(cfg.draw)
    one = anatomy_of(cfg, name)
    other = anatomy_of(*against) if against else None
    if other and not one.differs(other):
        raise ConfigError(f"draw_against={cfg.draw_against}: has the same parts; change one, or leave it out")
    replace_text(file, picture(one, other))
    return file


def anatomy_of(cfg: DictConfig, name: str) -> Anatomy:
    """The parts of the model that a config describes. Raises ConfigError for one that cannot be built or counted."""
    vocab_size, _ = expected_vocabulary(cfg)
    with torch.device("meta"):
        model = build_model(cfg, vocab_size, eot_id=0)
    return anatomy(name, model, cfg.model)
