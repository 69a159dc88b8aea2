"""Compose further configs, in a command or outside."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, flag_override

from . import CONF_DIR

_loaders: list[ConfigLoader] = []


def last_loader() -> ConfigLoader | None:
    """Hydra's config loader; after it, when a config is still read, the last one; None before. It keys caches."""
    if GlobalHydra.instance().is_initialized():
        _loaders[:] = [GlobalHydra.instance().config_loader()]
    return _loaders[0] if _loaders else None


@contextmanager
def composing() -> Iterator[ConfigLoader]:
    """Context manager: makes `hydra.compose` work, with the user's config folders in a command."""
    is_ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_ready else hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


@lru_cache(maxsize=256)
def with_option(group: str, option: str, loader: ConfigLoader | None) -> tuple[list[str], DictConfig | None]:
    """The options of a group, and the config with one of them (read only); None if there is none such.

    loader: `last_loader()`; another one may find other files.
    """
    with composing() as found:
        options = found.get_group_options(group)
        return options, hydra.compose("config", overrides=[f"{group}={option}"]) if option in options else None


def run_config(cfg: DictConfig, choices: dict[str, Any]) -> tuple[DictConfig, dict[str, Any]]:
    """A run's config and choices, without Hydra's node and what is the study's alone; changes `cfg` in place."""
    return without(cfg, "hydra", "study", "match"), choices | {"study": None}


def without(cfg: DictConfig, *keys: str) -> DictConfig:
    """Delete these keys from a config in place, if present, and return it."""
    with flag_override(cfg, ["struct", "readonly"], False):
        for key in keys:
            cfg.pop(key, None)
    return cfg
