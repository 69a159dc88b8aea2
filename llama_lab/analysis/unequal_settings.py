"""Warnings of settings that differ between a study's runs but should not."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from llama_lab.config.schema import belongs, flatten
from llama_lab.runs.record import Record
from llama_lab.runs.study import MATCHED, Study

from .result import SECOND_HALF, Result
from .sentences import by_fault, by_value, disagreement, disagreements, first_and_more, sentence, values_in
from .settings import (
    COMPARED,
    GROUPS,
    INIT,
    MIXER_WIDTH,
    MODEL,
    SEEDS,
    TEXT,
    TOKENS,
    UNSET,
    WIDTH,
    is_named,
    keys_of,
    keys_set_by,
    movers_of,
    own_settings,
    text_of,
)

BY_ROLE = ("data.val_half", "train.evaluations", "train.eval_lengths")  # of judged runs, or of tuning runs
CHOSEN = (*GROUPS, "optim", "schedule")  # groups of which all runs of an arm have one option
# What follows if runs differ in a setting, where that is not plain.
CONSEQUENCES = {
    "trainer.compile": "their speeds and last digits differ for another reason than their architecture",
    "train.ema": "the average takes time and memory, and leaves the losses of the last weights as they are",
}


def unequal_settings(result: Result) -> Iterator[str]:
    """A sentence for every setting that differs between runs but should not."""
    study, records, axes, planned = result.study, result.started, result.study.axes, _planned(result.study)
    own = (*own_settings(result.is_swept), *TEXT, TOKENS)
    shared = [  # settings that neither an axis nor the study's plan sets
        key
        for key in keys_of(records)
        if (key in COMPARED or not belongs(key, (*own, *MODEL)))
        and key not in planned
        and not any(is_named(key, axis) for axis in axes)
    ]
    if result.metric != SECOND_HALF and (values := disagreement(records, [predicted(r.config) for r in records])):
        given = "those of an attention.prefix are not predicted, nor those of a prefix, nor those of a source"
        yield f"Losses are of different tokens, since {given}: {values}."
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
    keys = [key for key in keys_of(records) if not belongs(key, ignored)]
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
    matched, known = (WIDTH, MIXER_WIDTH) if study.match in MATCHED else (), keys_of(records)
    covered = (*SEEDS, *COMPARED, *matched, *grouped, *keys_set_by(grouped | groups.keys(), known))
    keys = [key for key in known if belongs(key, MODEL) and not belongs(key, covered)]
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
    planned, keys, axes_of = _planned(study), keys_of(records), {arm.name: arm.axes for arm in study.arms}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for key in (key for key in keys if not belongs(key, (*ignored, *planned))):
        movers = () if planned else movers_of(key, study.axes, study.match, keys)
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


def _planned(study: Study) -> tuple[str, ...]:
    """The keys in which the study's planned arms differ; none if it recorded no plan."""
    return tuple(sorted({key for arm in study.arms for key in arm.settings or ()}))


def _different(records: Sequence[Record], keys: Sequence[str]) -> dict[str, str]:
    """The keys in which runs differ, with a text of which runs have which value; null is as if it were not there."""
    known = [key for key in keys if any(record.config.get(key) is not None for record in records)]
    return disagreements(records, {key: [text_of(record.config, key) for record in records] for key in known})


def _different_options(records: Sequence[Record], groups: Collection[str]) -> dict[str, str]:
    """The config groups of which runs have different options, with a text of which runs have which."""
    chosen = {group: [str(one.environment.choices.get(group, UNSET)) for one in records] for group in groups}
    return disagreements(records, chosen)


def predicted(config: Mapping[str, Any]) -> str:
    """Which tokens of a validation window a flat config's model predicts: those that no layer or encoder is shown."""
    halves = "model.encoder_layers" in config or "objective.least" in config
    if halves and "data.pair_files._target_" not in config:  # these have sources
        return "the second half of each window"
    layers = [flatten(one) for one in config.get("model.layers") or ()]
    found = [config.get("model.attention.prefix"), *(one.get("attention.prefix") for one in layers)]
    return f"all but the first {max((size for size in found if size), default=1)}"


def predicted_share(config: Mapping[str, Any]) -> float:
    """The share of a window's tokens that a flat config's model predicts in training, in the mean."""
    length: int = config["model.max_seq_len"]
    if least := config.get("objective.least"):
        return float(length + 3 - least) / 2 / length  # of prefixes from `least` to length - 1
    return 1 - length // 2 / length if "model.encoder_layers" in config else 1
