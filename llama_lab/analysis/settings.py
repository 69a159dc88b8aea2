"""The settings of a study's runs: which may differ between arms, and which do."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from llama_lab.config import CONF_DIR
from llama_lab.config.schema import CHANGEABLE, belongs, flatten, option_file, options, read
from llama_lab.runs.folder import resolved
from llama_lab.runs.record import Record
from llama_lab.runs.study import Study

from .sentences import by_fault, by_value, disagreement, disagreements, first_and_more, sentence, values_in

if TYPE_CHECKING:  # SciPy takes a second, and planning needs none
    from .result import Result

SEEDS = ("data.seed", "model.seed")
TEXT = ("data.files", "data.source", "data.val_tokens", "tokenizer.sample_bytes")
BY_ROLE = ("data.val_half", "train.evaluations", "train.eval_lengths")  # of judged runs, or of tuning runs
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
MODEL = ("model", "size", "pattern")
COMPARED = ("model.max_seq_len",)  # a longer context lowers the loss of any model
WIDTH = "model.hidden_dim"  # solved for by matching
DIMENSIONS = ("dim", "n_layers", "n_heads")
MATCHED = ("params", "flops")
RATE = "optim.lr"
TOKENS = "train.tokens"
# What follows if runs differ in a setting, where that is not plain.
CONSEQUENCES = {
    "trainer.compile": "their speeds and last digits differ for another reason than their architecture",
    "train.ema": "the average takes time and memory, and leaves the losses of the last weights as they are",
}
UNSET = "unset"

# The config keys that a group of the model sets.
GROUPS = {
    **{group: (f"model.{group}",) for group in ("norm", "block", "position")},
    "attention": ("model.attention", "model.n_kv_heads"),
    "ffn": ("model.ffn", WIDTH),
    **{group: (f"model.{group}",) for group in ("embedding", "init")},
    "pattern": ("pattern", "model.layers"),
    "size": ("size", WIDTH, *(f"model.{key}" for key in (*DIMENSIONS, "head_dim", "n_kv_heads", "vocab_size"))),
}

CHOSEN = (*GROUPS, "optim", "schedule")  # groups of which all runs of an arm have one option

# The keys that the axes of a design set which are named after no group or key.
DERIVED = {"tokens_per_parameter": (TOKENS,)}

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
    covered = [key for group in groups for key in GROUPS.get(group, (group,))]
    keys = [key for key in _keys([reference, record]) if not belongs(key, (*_own(is_swept), *covered))]
    pairs = {key: (reference.config.get(key), record.config.get(key)) for key in keys}
    return groups | {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def planned_settings(
    axes: Collection[str], match: str, configs: Sequence[DictConfig], is_swept: bool = False
) -> list[dict[str, Any]]:
    """Each arm's values of the keys in which the arms of a plan differ; see `Arm.settings`, `_own`.

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
        if not belongs(key, (*_own(is_swept), *TEXT))
        and is_varied(key, values)
        and (_movers(key, axes, match, keys) or not is_varied(key, written))
    ]
    return [{key: config[key] for key in apart if key in config} for config in values]


def unequal_settings(result: "Result") -> Iterator[str]:
    """A sentence for every setting that differs between runs but should not."""
    study, records, axes, planned = result.study, result.started, result.study.axes, _planned(result.study)
    own = (*_own(result.is_swept), *TEXT, TOKENS)
    shared = [  # settings that neither an axis nor the study's plan sets
        key
        for key in _keys(records)
        if (key in COMPARED or not belongs(key, (*own, *MODEL)))
        and key not in planned
        and not any(_is_named(key, axis) for axis in axes)
    ]
    if values := disagreement(records, [f"all but the first {prefix(record.config)}" for record in records]):
        yield f"Losses are of different tokens, since those of an attention.prefix are not predicted: {values}."
    different = _different(records, [key for key in shared if key not in BY_ROLE])
    for runs in result.by_role:
        different |= _different(runs, [key for key in BY_ROLE if key in shared and key not in different])
    for key, values in different.items():
        yield sentence(f"{key} differs: {values}", CONSEQUENCES.get(key, ""))
    yield from _mixed_arms(study, records, (*own, *planned, *shared))
    yield from (_ungrouped if study.is_grouped else _unplanned)(study, records)
    yield from _off_axis(study, records, (*own, *shared))
    of_seed = {seed: [r for r in records if r.seed == seed] for seed in sorted({r.seed for r in records})}
    for key, (seed, runs) in product(SEEDS, of_seed.items()):
        if values := disagreement(runs, [str(record.config.get(key)) for record in runs]):
            yield f"{key} differs between the runs of seed {seed}: {values}."
    for seed, runs in of_seed.items() if INIT not in axes else ():
        if values := disagreement(runs, [record.environment.init_hash[:12] or "fresh weights" for record in runs]):
            yield f"The runs of seed {seed} start from different weights: {values}."


def _mixed_arms(study: Study, records: Sequence[Record], ignored: tuple[str, ...]) -> Iterator[str]:
    """The settings that may differ between arms, but not within one arm, whose runs are averaged."""
    keys = [key for key in _keys(records) if not belongs(key, ignored)]
    for arm in study.arms:
        runs = [record for record in records if record.arm == arm.name]
        if found := _different(runs, keys) or _different_options(runs, CHOSEN):
            yield f"Runs that are averaged as {arm.name} differ in {first_and_more(found)}."


def _ungrouped(study: Study, records: Sequence[Record]) -> Iterator[str]:
    """The model settings in which a comparison's arms differ, other than those that it groups runs by."""
    if "arm" in study.axes:  # an arm's name stands for all of its settings
        return
    grouped = {*study.axes} | (GROUPS.keys() - {"size"} if "arch" in study.axes else set())
    groups = _different_options(records, [group for group in GROUPS if group not in grouped])
    matched = (WIDTH,) if study.match in MATCHED else ()
    covered = (*SEEDS, *COMPARED, *matched, *grouped, *_keys_set_by(grouped), *_keys_set_by(groups))
    keys = [key for key in _keys(records) if belongs(key, MODEL) and not belongs(key, covered)]
    if found := groups | _different(records, keys):
        yield f"Arms differ in more than what they are grouped by: {first_and_more(found)}."


def _unplanned(study: Study, records: Sequence[Record]) -> Iterator[str]:
    """The settings in which a run differs from what the study's plan recorded for its arm."""
    plans = {arm.name: arm.settings or {} for arm in study.arms}
    found = {}
    for key in _planned(study):
        pairs = [(text_of(record.config, key), text_of(plans[record.arm], key)) for record in records]
        if faults := by_fault(records, [f"{own} instead of {plan}" if own != plan else "" for own, plan in pairs]):
            found[key] = values_in(faults, records)
    if found:
        yield f"Runs have other settings than the study planned: {first_and_more(found)}."


def _off_axis(study: Study, records: Sequence[Record], ignored: tuple[str, ...]) -> Iterator[str]:
    """The settings in which arms differ although the axes that can change them have equal levels.

    If the study recorded its plan: those in which all planned arms are equal. ignored: settings that are free, or
    compared between all runs.
    """
    planned, keys, axes_of = _planned(study), _keys(records), {arm.name: arm.axes for arm in study.arms}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for key in (key for key in keys if not belongs(key, (*ignored, *planned))):
        movers = () if planned else _movers(key, study.axes, study.match, keys)
        if study.is_grouped and not movers:  # see `_ungrouped`
            continue
        levels = [str([axes_of[record.arm].get(axis) for axis in movers]) for record in records]
        for runs in by_value(records, levels).values():
            values = Counter(arm for arm, _ in {(record.arm, text_of(record.config, key)) for record in runs})
            whole = [record for record in runs if values[record.arm] == 1]  # `_mixed_arms` reports the others
            if different := _different(whole, [key]).get(key):
                found.setdefault(movers, {}).setdefault(key, different)
    for movers, settings in found.items():
        what = f"Arms of the same {', '.join(movers)} differ in" if movers else "Arms differ in more than their axes:"
        yield f"{what} {first_and_more(settings)}."


@cache
def follows() -> dict[str, frozenset[str]]:
    """The keys of a model that some packaged option computes from others, with these."""
    files = [CONF_DIR / "config.yaml", *(option_file(group, option) for group in GROUPS for option in options(group))]
    pairs = [(key, REFERENCE.findall(str(value))) for file in files for key, value in read(file)[0].items()]
    return {
        key: frozenset(other for one, others in pairs if one == key for other in others)
        for key in {one for one, others in pairs if others and belongs(one, ("model", "size"))}
    }


def _movers(key: str, axes: Collection[str], match: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The axes that may change a setting, directly or through a key that it follows. keys: of all configs."""
    if key == WIDTH and match in MATCHED:
        return tuple(sorted(axes))
    copied = COPIED if key == "model.layers" else ()
    through = {axis for other in (*follows().get(key, ()), *copied) for axis in _movers(other, axes, match, keys)}

    def moves(axis: str) -> bool:
        if axis in (keys_of := GROUPS | DERIVED):
            return belongs(key, keys_of[axis])
        if axis == "arch":
            return belongs(key, _keys_set_by(GROUPS.keys() - {"size"}))
        is_key = any(_is_named(other, axis) and not belongs(other, OWN) for other in keys)
        return _is_named(key, axis) if is_key else belongs(key, MODEL)  # an unknown name may set any of these

    return tuple(axis for axis in sorted(axes) if axis in through or moves(axis))


def _is_named(key: str, axis: str) -> bool:
    """Whether an axis is a key, a node above it, or its last part, such as `warmup`."""
    return belongs(key, (axis,)) or key.rpartition(".")[2] == axis


def _planned(study: Study) -> tuple[str, ...]:
    """The keys in which the study's planned arms differ; none if it recorded no plan."""
    return tuple(sorted({key for arm in study.arms for key in arm.settings or ()}))


def _own(is_swept: bool) -> tuple[str, ...]:
    """The settings of each run. is_swept: whether its learning rate is one."""
    return (*OWN, RATE) if is_swept else OWN


def _keys_set_by(groups: Iterable[str]) -> list[str]:
    return [key for group in groups for key in GROUPS.get(group, ())]


def _keys(records: Sequence[Record]) -> list[str]:
    return sorted({key for record in records for key in record.config})


def _different(records: Sequence[Record], keys: Sequence[str]) -> dict[str, str]:
    """The keys in which runs differ, with a text of which runs have which value; null is as if it were not there."""
    known = [key for key in keys if any(record.config.get(key) is not None for record in records)]
    return disagreements(records, {key: [text_of(record.config, key) for record in records] for key in known})


def _different_options(records: Sequence[Record], groups: Collection[str]) -> dict[str, str]:
    """The config groups of which runs have different options, with a text of which runs have which."""
    chosen = {group: [str(one.environment.choices.get(group, UNSET)) for one in records] for group in groups}
    return disagreements(records, chosen)


def prefix(config: Mapping[str, Any]) -> int:
    """The number of first tokens that some layer of a flat config's model sees at once; 1 without a prefix."""
    layers = [flatten(one) for one in config.get("model.layers") or ()]
    found = [config.get("model.attention.prefix"), *(one.get("attention.prefix") for one in layers)]
    return max((size for size in found if size), default=1)


def text_of(config: Mapping[str, Any], key: str) -> str:
    """A setting as text, the same for 16 and 16.0."""
    value = config.get(key, UNSET)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
