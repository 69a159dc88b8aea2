"""Checks that every setting has a value of the same kind as its default."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from llama_lab.util.errors import ConfigError, suggestion

from .grammar import flatten
from .keys import group_of, options

Kind = type | str
"""A type, or a string for the value itself."""

# Settings that may be null, with their kinds otherwise.
NULLABLE: dict[str, tuple[Kind, ...]] = {
    "name": (str, int),
    "arm": (str, int),
    "resume": (str,),
    "init_from": (str,),
    "init_kv_heads": (str,),
    "measure": (str,),
    "device": (str,),
    "draw": (str,),
    "draw_against": (str,),
    "logger.entity": (str,),
    "logger.notes": (str,),
    "study.axes": (list,),
    "study.base": (str,),
    "study.learning_rates": (list,),
    "study.tuning_seeds": (list,),
    "study.kv_heads": (list,),
    "study.share": (float,),
    "train.micro_batch_size": (int,),
    "train.grad_clip": (float,),
    "train.ema": (float,),
    "data.document_chars": (int,),
    "data.val_tokens": (int,),
    "data.val_half": (str,),
    "data.val_fraction": (float,),
    "data.name": (str,),
    "data.val_split": (str,),
    "data.document_start": (str,),
    "data.max_bytes": (int,),
    "data.revision": (str,),
    "data.data_files": (str, list, dict),
    "tokenizer.sample_bytes": (int,),
    "tokenizer.end_of_text": (str,),
    "model.vocab_size": (int,),
    "model.position.scaling": (dict,),
    "model.attention.window": (int,),
    "model.attention.chunk": (int,),
    "model.attention.prefix": (int,),
    "model.attention.scale": (float,),
    "model.attention.temperature": (dict,),
    "model.attention.clip_qkv": (float,),
    "model.attention.qk_norm": (str,),
    "model.attention.qk_bias": (bool,),
    "model.attention.softcap": (float,),
    "model.attention.gate": (str,),
    "model.attention.query_rank": (int,),
    "model.attention.latent_eps": (float,),
    "model.attention.value_residual": (float, str),
    "model.embedding.logit_softcap": (float,),
    "beside": (str,),
    "cache_dtype": (str,),
    "prompt": (str,),
    "max_new_tokens": (int,),
    "top_k": (int,),
    "top_p": (float,),
    "min_p": (float,),
    "eval.task_path": (str,),
    "eval.fewshot": (int,),
    "eval.limit": (int,),
}
NOT_NULLABLE: dict[str, tuple[Kind, ...]] = {
    "model.position.scaling.short_factors": (float, list),
    "model.position.scaling.long_factors": (float, list),
    "run": (str,),
    "data.files": (list, str),
    "study.axis": (str, list),
    "trainer.devices": (int, "auto"),
    "trainer.precision": (str, int),  # so that the check of precisions refuses 16
    "trainer.num_nodes": (int, "auto"),
    "trainer.compile": (bool, "auto"),
}

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number, and finite",
    str: "text",
    list: "a list",
    dict: "a component",
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
        kinds = NULLABLE.get(key) or NOT_NULLABLE.get(key) or (type(defaults[key]),)
        if (value is None and key in NULLABLE) or kinds == (type(None),):
            continue
        if not any(is_kind(value, kind) for kind in kinds):
            wanted = " or ".join(kind if isinstance(kind, str) else WORDS.get(kind, kind.__name__) for kind in kinds)
            raise ConfigError(f"{key}={'null' if value is None else value}: must be {wanted}")


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
