"""Compose configs and build models faster: what Hydra and OmegaConf do again and again is done once."""

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import omegaconf.base
from hydra._internal import defaults_list
from omegaconf import DictConfig, OmegaConf, grammar_parser

from llama_lab.config.components import CONF_DIR

CONFIGS = (str(CONF_DIR), str(Path(hydra.__file__).parent))


def work_faster(replace: Callable[[Any, str, Any], None]) -> None:
    """Replace functions of libraries by ones that return the same; `replace` is `setattr` or one that is undone."""
    known: dict[str, bytes] = {}
    load, choices = OmegaConf.load, defaults_list._create_interpolation_map

    def read_once(file: Any) -> Any:
        """A YAML file of ours or of Hydra's."""
        path = str(getattr(file, "name", file))
        if not path.startswith(CONFIGS):
            return load(file)
        if path not in known:
            known[path] = pickle.dumps(load(file))
        return pickle.loads(known[path])

    def choices_if_needed(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig | None:
        """What defaults may refer to, where they do."""
        refer = any(default.is_interpolation() for default in defaults if not default.is_self())
        return choices(overrides, defaults, self_added) if refer else None

    replace(OmegaConf, "load", read_once)
    replace(defaults_list, "_create_interpolation_map", choices_if_needed)
    replace(omegaconf.base, "parse", cache(grammar_parser.parse))
