"""Composing in half the time: what Hydra and OmegaConf do again for every config, they do once in a process.

Composing takes an eighth of a second, and almost every test does it. What is composed stays the same, and so do errors.
"""

import gc
import os
import pickle
from functools import cache
from typing import Any

import omegaconf.base
import yaml
from hydra._internal import defaults_list
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.default_element import InputDefault
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf


def compose_quickly() -> None:
    """Change Hydra and OmegaConf in this process."""
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    omegaconf.base.parse = cache(omegaconf.base.parse)  # the trees of interpolations are only read
    keep_files()
    map_choices_where_they_are_used()
    gc.set_threshold(20_000, 20, 50)  # a config is thousands of small objects, which all live on


def keep_files() -> None:
    """Parse a YAML file once, until it is written again."""
    load = FileConfigSource.load_config
    known: dict[tuple[str, int, int], bytes] = {}

    def load_known(self: FileConfigSource, config_path: str) -> ConfigResult:
        file = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
        if not os.path.exists(file):
            return load(self, config_path)
        status = os.stat(file)
        key = (f"{self.provider} {file}", status.st_mtime_ns, status.st_size)
        if key not in known:
            known[key] = pickle.dumps(load(self, config_path))
        result: ConfigResult = pickle.loads(known[key])  # a copy, for composing changes it
        return result

    FileConfigSource.load_config = load_known  # type: ignore[method-assign]


def map_choices_where_they_are_used() -> None:
    """Gather the choices of all groups, as a config, only for a list of defaults with interpolations."""
    gather = defaults_list._create_interpolation_map

    def gather_if_used(overrides: Any, defaults: list[InputDefault], self_added: bool) -> DictConfig:
        if any(default.is_interpolation() for default in defaults):
            return gather(overrides, defaults, self_added)
        return OmegaConf.create()

    defaults_list._create_interpolation_map = gather_if_used
