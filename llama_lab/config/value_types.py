"""Checks that every setting has a value of the same kind as its default."""

import math
from collections.abc import Mapping
from functools import lru_cache
from types import NoneType
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from llama_lab.util.errors import ConfigError, suggestion

from .grammar import flatten
from .keys import group_of, options
from .schema import KEYS, Kind, declared_kinds

WORDS: dict[Kind, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number, and finite",
    str: "text",
    list: "a list",
    dict: "a component",
    NoneType: "",  # what may be null is said by `--help`
}


def default_settings(choices: Mapping[str, str | None], config: str = "config") -> dict[str, Any]:
    """A config's settings with these group choices and no key changed, flattened; mandatory ones are None."""
    # An experiment is no default: it may be mistyped like the command line.
    groups = {g: option for g, option in choices.items() if option and g != "experiment" and not g.startswith("hydra/")}
    overrides = tuple(f"{group}={option}" for group, option in groups.items())
    return dict(composed_settings(config, overrides, GlobalHydra.instance().config_loader()))


@lru_cache(maxsize=256)
def composed_settings(config: str, overrides: tuple[str, ...], loader: ConfigLoader) -> dict[str, Any]:
    """`default_settings`, cached for the jobs of a sweep that differ in keys alone. loader: Hydra's current one."""
    defaults = hydra.compose(config, overrides=list(overrides))
    for key, value in flatten(OmegaConf.to_container(defaults)).items():
        if value == "???":
            OmegaConf.update(defaults, key, None)
    return flatten(OmegaConf.to_container(defaults, resolve=True))


def check_kinds(cfg: DictConfig, defaults: dict[str, Any]) -> None:
    """Raise ConfigError for a setting that no config file declares, or one of another kind than its default."""
    written = flatten(OmegaConf.to_container(cfg))
    for key, value in flatten(OmegaConf.to_container(cfg, resolve=True)).items():
        if any(default is None and key.startswith(f"{parent}.") for parent, default in defaults.items()):
            continue  # part of a component that replaces null
        if key.startswith("pattern."):
            continue  # rules of any names, which their resolver checks
        if any(default.startswith(f"{key}.") for default in defaults):
            raise ConfigError(f"{key}={value}: is not a single setting; {component_advice(key, value)}")
        if key not in defaults:
            raise ConfigError(f"{key}={value}: nothing reads this key; leave it out, or see them all with `--cfg job`")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ConfigError(f"{key}={value}: does not fit into 64 bits; make it smaller")
        if str(written[key]).startswith("${"):
            continue  # the key that it refers to is checked
        kinds = kinds_of(key, value, defaults[key], cfg)
        if kinds and not any(is_kind(value, kind) for kind in kinds):
            wanted = " or ".join(str(word) for kind in kinds if (word := WORDS.get(kind, kind)))
            raise ConfigError(f"{key}={'null' if value is None else value}: must be {wanted}")


def kinds_of(key: str, value: object, default: object, cfg: DictConfig) -> tuple[Kind, ...]:
    """The kinds of value of a setting: by its record, its default, or its component's signature; empty for any."""
    if (record := KEYS.get(key)) and record.kinds:
        return record.kinds
    if default is not None and is_kind(value, type(default)):
        return (type(default),)
    component, _, name = key.rpartition(".")
    target = OmegaConf.select(cfg, f"{component}._target_")
    declared = declared_kinds(target, name) if target else ()
    return declared or (() if default is None else (type(default),))


def component_advice(key: str, value: object) -> str:
    """What to write instead of a single value for a component or a group of settings."""
    group = group_of(key)
    if group is None:
        return f"set its own keys, such as {key}.<key>=<value>"
    if value in options(group):
        return f"a component is chosen by its group, {group}={value}"
    known = options(group)
    return f"a component is chosen by its group, {group}={' | '.join(known)}{suggestion(str(value), known)}"


def is_kind(value: object, kind: Kind) -> bool:
    """Whether a value is of a kind. Whole numbers count as numbers; true and false do not."""
    if isinstance(kind, str):
        return value == kind
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
