"""The settings of a study's runs: which may differ between arms, and which do in a plan."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llama_lab.config import CONF_DIR
from llama_lab.config.composing import read_file
from llama_lab.config.schema import CHANGEABLE, INDIRECT, belongs, flatten, option_file, options
from llama_lab.runs.folder import resolved
from llama_lab.runs.record import Record
from llama_lab.runs.study import MATCHED

SEEDS = ("data.seed", "model.seed")
TEXT = ("data.files", "data.source", "data.pair_files", "data.val_tokens", "tokenizer.sample_bytes")
INIT = "init_from"
# Settings that may differ, and why; all others are compared.
FREE = {
    **dict.fromkeys(CHANGEABLE, "where a run computes and how it is watched: facts say what came of it"),
    **dict.fromkeys(("name", "arm", "study"), "names"),
    **dict.fromkeys(("seed", *SEEDS), "equal in all runs of one seed, and different in those of others"),
    INIT: "the hashes of initial weights are compared",
    **dict.fromkeys(TEXT, "the hashes of data and tokenizer are compared"),
}
OWN = tuple(key for key in FREE if key not in TEXT)  # of each run
MODEL = ("model", *INDIRECT)
COMPARED = ("model.max_seq_len",)  # a longer context lowers the loss of any model
WIDTH, MIXER_WIDTH = "model.hidden_dim", "model.attention.value_dim"  # solved for by matching; see `width_key`
FFN = "model.ffn"  # a key of its own only in a model whose block leaves it out
DIMENSIONS = ("dim", "n_layers", "n_heads")
KIND = ("model._target_", "objective._target_")  # family and objective, or what both make
RATE = "optim.lr"
TOKENS = "train.tokens"
UNSET = "unset"

# The config keys that a group of the model sets.
GROUPS = {
    **{group: (f"model.{group}",) for group in ("norm", "block", "position")},
    "attention": ("model.attention", "model.n_kv_heads"),
    "ffn": (FFN, WIDTH),
    **{group: (f"model.{group}",) for group in ("embedding", "init")},
    "pattern": ("pattern", "model.layers"),
    "family": tuple(f"model.{key}" for key in ("_target_", "encoder_layers", "cross_attention")),
    "size": ("size", WIDTH, *(f"model.{key}" for key in (*DIMENSIONS, "head_dim", "n_kv_heads", "vocab_size"))),
}

# The keys that the axes of a design set which are named after no group of the model or key.
DERIVED = {"tokens_per_parameter": (TOKENS,), "objective": ("objective", "model._target_")}

# What layers that differ have copies of.
COPIED = tuple(f"model.{part}" for part in ("n_layers", "max_seq_len")) + tuple(
    key for group in ("attention", "ffn", "position", "norm", "block") for key in GROUPS[group]
)
REFERENCE = re.compile(r"\$\{(\w+\.[\w.]+)\}")  # to another key


def different_settings(reference: Record, record: Record, is_swept: bool) -> dict[str, tuple[Any, Any]]:
    """(reference's value, record's value) by setting in which two runs differ, without names, seeds and hardware.

    A setting is a group of which they choose other options, or a config key that no such group sets.
    """
    ours, theirs = record.environment.choices, reference.environment.choices
    options = {group: (theirs.get(group), ours.get(group)) for group in ours if not belongs(group, (*OWN, "hydra"))}
    groups = {group: pair for group, pair in options.items() if pair[0] != pair[1]}
    known = keys_of([reference, record])
    keys = [key for key in known if not belongs(key, (*own_settings(is_swept), *keys_set_by(groups, known)))]
    pairs = {key: (reference.config.get(key), record.config.get(key)) for key in keys}
    return groups | {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def planned_settings(
    axes: Collection[str], match: str, configs: Sequence[DictConfig], is_swept: bool = False
) -> list[dict[str, Any]]:
    """Each arm's values of the keys in which the arms of a plan differ; see `Arm.settings`, `own_settings`.

    Includes only keys that an axis sets, or that all arms compute from other keys in the same way: any other difference
    is a mistake, which a plan does not excuse.
    """
    values = [flatten(resolved(cfg)) for cfg in configs]
    written = [flatten(OmegaConf.to_container(cfg)) for cfg in configs]
    keys = sorted({key for config in values for key in config})

    def is_varied(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
        return len({text_of(config, key) for config in configs}) > 1

    apart = [
        key
        for key in keys
        if not belongs(key, (*own_settings(is_swept), *TEXT))
        and is_varied(key, values)
        and (movers_of(key, axes, match, keys) or not is_varied(key, written))
    ]
    return [{key: config[key] for key in apart if key in config} for config in values]


@cache
def follows() -> dict[str, frozenset[str]]:
    """The keys of a model that some packaged option computes from others, with these."""
    files = [CONF_DIR / "config.yaml", *(option_file(group, option) for group in GROUPS for option in options(group))]
    pairs = [
        (key, REFERENCE.findall(str(value)))
        for file in files
        for key, value in flatten(read_file(file).settings).items()
    ]
    return {
        key: frozenset(other for one, others in pairs if one == key for other in others)
        for key in {one for one, others in pairs if others and belongs(one, ("model", "size"))}
    }


def movers_of(key: str, axes: Collection[str], match: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The axes that may change a setting, directly or through a key that it follows. keys: of all configs."""
    if key in (WIDTH, MIXER_WIDTH) and match in MATCHED:
        return tuple(sorted(axes))
    copied = COPIED if key == "model.layers" else ()
    through = {axis for other in (*follows().get(key, ()), *copied) for axis in movers_of(other, axes, match, keys)}

    def moves(axis: str) -> bool:
        if axis in GROUPS | DERIVED:
            return belongs(key, keys_set_by([axis], keys))
        if axis == "arch":
            return belongs(key, keys_set_by(GROUPS.keys() - {"size"}, keys))
        is_key = any(is_named(other, axis) and not belongs(other, OWN) for other in keys)
        return is_named(key, axis) if is_key else belongs(key, MODEL)  # an unknown name may set any of these

    return tuple(axis for axis in sorted(axes) if axis in through or moves(axis))


def is_named(key: str, axis: str) -> bool:
    """Whether an axis is a key, a node above it, or its last part, such as `warmup`."""
    return belongs(key, (axis,)) or key.rpartition(".")[2] == axis


def own_settings(is_swept: bool) -> tuple[str, ...]:
    """The settings of each run. is_swept: whether its learning rate is one."""
    return (*OWN, RATE) if is_swept else OWN


def keys_set_by(groups: Collection[str], keys: Collection[str]) -> list[str]:
    """The config keys that these groups set, those that a block leaves out too. keys: of all configs."""
    left_out = (FFN, WIDTH) if "block" in groups and FFN in keys else ()
    return [key for group in groups for key in (GROUPS | DERIVED).get(group, (group,))] + [*left_out]


def keys_of(records: Sequence[Record]) -> list[str]:
    """The config keys of some runs."""
    return sorted({key for record in records for key in record.config})


def text_of(config: Mapping[str, Any], key: str) -> str:
    """A setting as text, the same for 16 and 16.0."""
    value = config.get(key, UNSET)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
