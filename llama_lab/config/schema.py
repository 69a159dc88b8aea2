"""The schema of configs: groups, defaults, types of keys, and how commands treat each key.

A key without a record in KEYS has the type of its default; settings of a component have the types of its signature.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from llama_lab.util.errors import ConfigError, suggestion

from . import CONF_DIR
from .composing import merged, with_extended, with_options

# The groups of an architecture, in the default order of a ladder.
COMPONENTS = ("block", "norm", "position", "ffn", "attention", "embedding", "init", "pattern")
ENCODERS = ("encoder", "bert")  # of family, which predict no next token
INDIRECT = ("pattern", "bias", "expert", "size")  # keys that act through the parts of the model which they give

Kind = type | str
"""A type, or a string for the value itself."""
WORDS: dict[Kind, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number, and finite",
    str: "text",
    list: "a list",
    dict: "a component",
    NoneType: "",  # what may be null is said by `--help`
    "head": "head (Qwen 3's)",
    "projection": "projection (OLMo 2's), or null for none",
    "copies": "copies",
    "random": "random",
}


@dataclass(frozen=True)
class Key:
    """A key, or a group of keys.

    kinds: of its values, `NoneType` for null; none: that of its default. text: whether any value is plain text. path:
    "folder": a folder or a file, in which ~ is expanded; "list": one or several. role: "place": says where a run
    computes and how it is watched, makes no arm, and may change when an unfinished run is resumed; "identity": names a
    run; "budget": may change when a finished run is trained further. study, search: what a study or a search, which
    sets it for each run, has in its place. measures: whether it is a setting of `measure`.
    """

    kinds: tuple[Kind, ...] = ()
    text: bool = False
    path: Literal["folder", "list"] | None = None
    role: Literal["place", "identity", "budget"] | None = None
    study: str = ""
    search: str = ""
    measures: bool = False


def maybe(*kinds: Kind, **settings: Any) -> Key:
    """The record of a key that may be null."""
    return Key((*kinds, NoneType), **settings)


PRICED = "prices a study without training it; add study.dry_run=true, or leave this out"
KEYS = {
    "hydra": Key(role="identity"),
    "arch": Key(study="leave it out; a study's recipes are study.base and study.target, or study.recipes"),
    "name": maybe(str, int, role="identity"),
    "arm": maybe(
        str,
        int,
        role="identity",
        study="a study names its arms",
        search="a search names the arms of its trials; leave it out",
    ),
    "seed": Key(role="identity", study="leave it out; a study's seeds are study.seeds"),
    "runs_dir": Key(path="folder", role="place"),
    "overwrite": Key(role="place", study="study.overwrite=true retrains the runs whose settings have changed"),
    "resume": maybe(
        str,
        text=True,
        path="folder",
        role="place",
        study="run the same command again to resume a study",
        search="a search trains runs of its own, and the same command resumes them; leave it out",
    ),
    "init_from": maybe(str, path="folder"),
    "init_kv_heads": maybe(str),
    "init_experts": maybe("copies", "random"),
    "estimate": Key(
        role="place",
        study="study.dry_run=true prints a study's arms with their costs, and trains nothing",
        search="a search trains; leave out the sweeper to estimate one of its runs",
    ),
    "device": maybe(str, role="place", study=PRICED),
    "estimate_mfu": Key(role="place", study=PRICED),
    "draw": maybe(str, path="folder", role="place"),
    "draw_against": maybe(str, text=True, role="place"),
    "measure": maybe(
        str,
        text=True,
        path="folder",
        role="place",
        study="a study measures speeds at its end; study.measure_speed=false leaves that out",
        search="a search trains; leave out the sweeper to measure a study",
        measures=True,
    ),
    "trust": Key(role="place", study="a study trusts the components of its own command", measures=True),
    "bias": maybe(bool),
    "expert": maybe(str),
    "train.tokens": Key(role="budget"),
    "train.evaluations": Key(role="budget"),
    "schedule.warmup": Key(role="budget"),
    "train.micro_batch_size": maybe(int),
    "train.recompute": Key(role="place"),
    "train.grad_clip": maybe(float),
    "train.label_smoothing": maybe(float),
    "train.ema": maybe(float),
    "train.log_every": Key(role="place"),
    "train.telemetry": Key(role="place"),
    "train.checkpoint_every": Key(role="place"),
    "train.sample_tokens": Key(role="place"),
    "train.prompt": Key(text=True, role="place"),
    "trainer.accelerator": Key(role="place"),
    "trainer.devices": Key((int, "auto"), role="place"),
    "trainer.num_nodes": Key((int, "auto"), role="place"),
    "trainer.strategy": Key(role="place"),
    "trainer.profile": Key(role="place"),
    "trainer.precision": Key((str, int)),  # so that the check of precisions refuses 16
    "trainer.compile": Key((bool, "auto")),
    "callbacks": maybe(dict, list),
    "logger": Key(role="place"),
    "logger.entity": maybe(str),
    "logger.notes": maybe(str, text=True),
    "data.files": Key((list, str), path="list"),
    "data.cache_dir": Key(path="list", role="place", measures=True),
    "data.val_tokens": maybe(int),
    "data.val_document_chars": maybe(int),
    "data.val_block_chars": maybe(int),
    "data.max_overlap": maybe(float),
    "data.val_half": maybe(str),
    "data.val_fraction": maybe(float),
    "model.vocab_size": maybe(int),
    "model.attention.qk_norm": maybe("head", "projection"),
    "study.learning_rates": maybe(list),
    "study.tuning_seeds": maybe(list),
    # Of evaluations.
    "run": Key((str,), text=True, path="folder"),
    "beside": maybe(str),
    "cache_dtype": maybe(str),
    "prompt": maybe(str, text=True),
    "max_new_tokens": maybe(int),
    "top_k": maybe(int),
    "top_p": maybe(float),
    "min_p": maybe(float),
    "eval.task_path": maybe(str),
    "eval.fewshot": maybe(int),
    "eval.limit": maybe(int),
}

CHANGEABLE = tuple(name for name, key in KEYS.items() if key.role == "place")
UNNAMED = tuple(name for name, key in KEYS.items() if key.role in ("place", "identity"))
EXTENDABLE = tuple(name for name, key in KEYS.items() if key.role in ("place", "budget"))
FOLDERS = tuple(name for name, key in KEYS.items() if key.path == "folder")
PATHS = tuple(name for name, key in KEYS.items() if key.path)
TEXTS = tuple(name for name, key in KEYS.items() if key.text)
PLAIN: dict[str, Kind] = {"bool": bool, "int": int, "float": float, "str": str, "None": NoneType}


def belongs(key: str, roots: Sequence[str]) -> bool:
    """Whether `key` is one of `roots` or below one."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def groups() -> list[str]:
    """The names of the config groups."""
    return sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir())


def options(group: str) -> list[str]:
    """The names of a packaged group's options."""
    return sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml"))


def option_file(group: str, option: str) -> Path:
    """The file of a packaged option."""
    return CONF_DIR / group / f"{option}.yaml"


@cache
def keys_of(file: Path) -> frozenset[str]:
    """The keys that a packaged config file sets, including those of the files that it extends."""
    path = file.relative_to(CONF_DIR).with_suffix("").as_posix()
    return frozenset(flatten(merged(with_extended(path))))


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config: `{"train.tokens": 2e6}`; lists are values."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        k: v for key, child in node.items() for k, v in flatten(child, f"{prefix}.{key}" if prefix else key).items()
    }


def default_settings(choices: Mapping[str, str | None], config: str = "config") -> dict[str, Any]:
    """A config's settings with these group choices and no key changed, flattened; mandatory ones are None."""
    # An experiment is no default: it may be mistyped like the command line.
    groups = {g: option for g, option in choices.items() if option and g != "experiment" and not g.startswith("hydra/")}
    return flat_defaults(with_options(groups, config))


def flat_defaults(composed: DictConfig) -> dict[str, Any]:
    """The settings of a config, flattened and resolved; mandatory ones are None."""
    defaults = deepcopy(composed)
    for key, value in flatten(OmegaConf.to_container(defaults)).items():
        if value == "???":
            OmegaConf.update(defaults, key, None)
    return flatten(OmegaConf.to_container(defaults, resolve=True))


def check_kinds(cfg: DictConfig, defaults: dict[str, Any]) -> None:
    """Raise ConfigError for an undeclared setting, or a value of the wrong type."""
    written = flatten(OmegaConf.to_container(cfg))
    for key, value in flatten(OmegaConf.to_container(cfg, resolve=True)).items():
        if any(default is None and key.startswith(f"{parent}.") for parent, default in defaults.items()):
            continue  # part of a component that replaces null
        if key not in written:
            continue  # part of a component that is read from another option, such as an expert
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
    places = (component, f"{component}.source", f"{component}.pair_files")  # `data` has the settings of its source
    targets = [target for place in places if (target := OmegaConf.select(cfg, f"{place}._target_"))]
    declared = declared_kinds(targets[0], name) if targets else ()
    return declared or (() if default is None else (type(default),))


def component_advice(key: str, value: object) -> str:
    """What to write instead of a single value for a component or a group of settings."""
    group = next((part for part in reversed(key.split(".")) if part in groups()), None)  # `ffn` of model.ffn.activation
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


def declared_kinds(target: str, name: str) -> tuple[Kind, ...]:
    """The kinds that a component, or a class that it extends, declares for a setting; empty if there are none.

    Empty also for a component that cannot be imported, which is reported as it is built.
    """
    try:
        component: Any = locate(target)
    except ErrorDuringImport:
        component = None
    if component is None:
        return ()
    bases = getattr(component, "__mro__", ())[1:]
    for one in (component, *(vars(base)["__init__"] for base in bases if "__init__" in vars(base))):
        parameter = signature(one).parameters.get(name)
        if parameter is not None and parameter.annotation is not parameter.empty:
            annotation = parameter.annotation
            annotation = annotation.type if isinstance(annotation, InitVar) else annotation
            if isinstance(annotation, str):  # in a file that postpones annotations
                parts = annotation.split(" | ")
                return tuple(PLAIN[part] for part in parts) if {*parts} <= PLAIN.keys() else ()
            is_union = get_origin(annotation) in (Union, UnionType)
            return tuple(dict.fromkeys(map(kind_of, get_args(annotation) if is_union else (annotation,))))
    return ()


def kind_of(annotation: Any) -> Kind:
    """The kind of value in a config for a parameter's type: a component where it is no plain value or list."""
    if annotation in PLAIN.values():
        return annotation  # type: ignore[no-any-return]
    return list if get_origin(annotation) in (Sequence, Iterable, list, tuple) else dict
