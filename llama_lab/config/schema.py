"""The keys of the configs, each with one record of what it may hold and what commands may do with it.

A key without a record holds what its default holds. The settings of a component take their kinds from its signature.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from inspect import signature
from pydoc import ErrorDuringImport, locate
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

Kind = type | str
"""A type, or a string for the value itself."""


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


PRICED = "a study trains on this machine; study.dry_run=true prints what its arms cost"
KEYS = {
    "hydra": Key(role="identity"),
    "arch": Key(study="a study's recipes are study.base and study.target, or study.recipes"),
    "name": maybe(str, int, role="identity"),
    "arm": maybe(
        str,
        int,
        role="identity",
        study="a study names its arms",
        search="a search names the arms of its trials; leave it out",
    ),
    "seed": Key(role="identity", study="a study's seeds are study.seeds"),
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
    "train.tokens": Key(role="budget"),
    "train.evaluations": Key(role="budget"),
    "schedule.warmup": Key(role="budget"),
    "train.micro_batch_size": maybe(int),
    "train.recompute": Key(role="place"),
    "train.grad_clip": maybe(float),
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
    "logger": Key(role="place"),
    "logger.entity": maybe(str),
    "logger.notes": maybe(str, text=True),
    "data.files": Key((list, str), path="list"),
    "data.cache_dir": Key(path="list", role="place", measures=True),
    "data.document_chars": maybe(int),
    "data.val_tokens": maybe(int),
    "data.val_half": maybe(str),
    "data.val_fraction": maybe(float),
    "data.name": maybe(str),
    "data.val_split": maybe(str),
    "data.document_start": maybe(str),
    "data.max_bytes": maybe(int),
    "data.revision": maybe(str),
    "data.data_files": maybe(str, list, dict),
    "model.vocab_size": maybe(int),
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
    return list if get_origin(annotation) in (Sequence, list, tuple) else dict
