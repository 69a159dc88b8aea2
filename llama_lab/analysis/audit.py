"""Checks of runs' records against each other, and against what can be recomputed from them."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from math import ceil, inf, isclose, log, nan
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import TARGET, build, build_model
from llama_lab.config.grammar import escape
from llama_lab.config.schema import belongs, option_file
from llama_lab.config.trust import Trust, with_text
from llama_lab.drawing.anatomy import Anatomy, anatomy
from llama_lab.model import Cost
from llama_lab.model.cost import cost_metrics
from llama_lab.runs.folder import RESOLVED
from llama_lab.runs.record import MISSING, Record, trained_beside
from llama_lab.runs.stored import LOSSES, OF_THE_RUN, SIZES, Facts, Summary
from llama_lab.runs.study import Arm, Study
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.formatting import enumerate_some, number, three_digits

from .environments import is_resumed
from .sentences import MOST_KEYS, by_value, named, run_name
from .settings import INIT, RATE, SEEDS

MOST_UNEQUAL = 1.5  # fastest over slowest run of an arm

MOST_ASIDE = 3.0  # largest over smallest ratio of tokens to positions


def misrecorded(study: Study, records: Sequence[Record], trust: Trust) -> Iterator[str]:
    """A sentence for everything on record that cannot be right; for the arguments see `warnings`."""
    started = [record for record in records if record.status != MISSING]
    yield from _mislabelled(study, records)
    yield from _copies(started)
    yield from _unlike_their_curves(started)
    yield from _impossible(started, trust)
    yield from _unlike_positions(started)
    yield from _of_another_size(started, trust)


def rebuilt(record: Record, trust: Trust) -> Anatomy | str:
    """The parts of the model that a run's config describes, with its cost, or why it cannot be built and counted."""
    model = record.settings.get("model")
    if not isinstance(model, dict):
        return f"{RESOLVED} has no model"
    if not record.environment.vocab_size:
        return "environment.json has no vocab_size"
    try:
        trust.check(model, RESOLVED, lambda package: f"--trust {package} to llama-lab-compare")
    except ConfigError as error:
        return str(error)
    # A model on the meta device has no initial values, and one cache entry serves all seeds
    return _rebuilt(json.dumps(model | {"seed": 0}), record.environment.vocab_size)


@lru_cache(maxsize=256)
def _rebuilt(model: str, vocab_size: int) -> Anatomy | str:
    cfg = OmegaConf.create({"model": with_text(json.loads(model), escape)})
    try:
        with torch.device("meta"):
            decoder = build_model(cfg, vocab_size)
        return anatomy("", decoder, cfg.model)
    except Exception as error:  # a config may name any class, which may raise anything
        return first_line(error)


def _of_another_size(records: Sequence[Record], trust: Trust) -> Iterator[str]:
    def model(record: Record) -> str:
        """A key of everything that a model's costs depend on, so that each model is built once."""
        settings = {key: value for key, value in record.config.items() if belongs(key, ("model",)) and key not in SEEDS}
        return str((sorted(settings.items()), record.environment.vocab_size))

    models = by_value(records, [model(record) for record in records])
    costs = {run.path: found for runs in models.values() for found in [rebuilt(runs[0], trust)] for run in runs}
    unknown = [record for record in records if isinstance(costs[record.path], str)]
    for why, runs in by_value(unknown, [str(costs[record.path]) for record in unknown]).items():
        yield f"The sizes on record of {named(runs, records)} cannot be checked: {why}."
    wrong = {run.path: _misstated(run, found.cost) for run in records if isinstance(found := costs[run.path], Anatomy)}
    known = [record for record in records if record.path in wrong]
    for what, runs in by_value(known, [wrong[record.path] for record in known]).items():
        if what:
            yield f"The record of {named(runs, records)} states another size than the model has: {what}."


def _misstated(record: Record, cost: Cost) -> str:
    """`1,104,154 parameters instead of 1,840,256`, and so on; empty if every cost is right."""
    real = cost_metrics(cost)
    found = {}
    for stated in (record.costs, record.summary):
        for key in (key for key in SIZES | real if key in stated):
            computed = real.get(key, nan)  # a model that keeps no state has no bytes of it
            if not isclose(stated[key], computed, rel_tol=1e-6):
                found[key] = f"{number(stated[key])} {SIZES.get(key, key)} instead of {number(computed)}"
    return enumerate_some(list(found.values()), MOST_KEYS)


def _mislabelled(study: Study, records: Sequence[Record]) -> Iterator[str]:
    """Runs that were trained with another seed or learning rate than the study lists."""
    members = [member for arm in study.arms for member in arm.members]
    for member, record in zip(members, records, strict=True):
        if record.status == MISSING:
            continue
        seeds = (record.seed, record.config.get("seed", record.seed))
        pairs: list[tuple[str, Any, Any]] = [("seed", member.seed, seed) for seed in seeds]
        if member.learning_rate is not None:
            pairs.append((RATE, member.learning_rate, record.config.get(RATE)))
        for key, listed, real in dict.fromkeys(pair for pair in pairs if pair[1] != pair[2]):
            yield f"{run_name(record)} is listed with {key}={listed}, and was trained with {key}={real}."


def _copies(records: Sequence[Record]) -> Iterator[str]:
    """Runs with equal losses at every evaluation, to the last digit, which different seeds or arms never have."""
    finished = [record for record in records if record.done and "val/loss" in record.summary]
    curves = [[(row["tokens"], row["val/loss"]) for row in record.metrics if "val/loss" in row] for record in finished]
    losses = [str((record.summary["val/loss"], curve)) for record, curve in zip(finished, curves, strict=True)]
    by_arm: dict[str, dict[tuple[Any, Any], str]] = {}
    for record, own in zip(finished, losses, strict=True):
        by_arm.setdefault(record.arm, {})[record.seed, record.config.get(RATE)] = own
    original: dict[str, str] = {}  # the first arm that has the same losses as each arm, which may be itself
    for arm, ours in by_arm.items():
        common = {other: ours.keys() & by_arm[other].keys() for other in original.values()}
        equal = (other for other, keys in common.items() if keys and all(ours[k] == by_arm[other][k] for k in keys))
        original[arm] = next(equal, arm)
    for arm in by_arm:
        if alike := [other for other in by_arm if original[other] == arm and other != arm]:
            yield (
                f"{enumerate_some([arm, *alike], MOST_KEYS)} have the same losses at every seed: one is a copy of "
                f"another, or their settings are equivalent."
            )
    apart = [(run, own) for run, own in zip(finished, losses, strict=True) if original[run.arm] == run.arm]
    for runs in by_value(*zip(*apart, strict=True)).values() if apart else ():
        if len(runs) > 1:
            yield f"{named(runs, ())} have the same losses, to the last digit: one is a copy of another."


def _unlike_their_curves(records: Sequence[Record]) -> Iterator[str]:
    """Runs whose summary.json disagrees with the end of their metrics.csv."""
    finished = [record for record in records if record.done]
    logged = dict.fromkeys(key for record in finished for row in record.metrics for key in row)
    ends = [key for record in finished for key in record.summary if "/" in key and key not in record.costs]
    for key in (key for key in dict.fromkeys((*LOSSES, *logged, *ends)) if key not in OF_THE_RUN):
        last = [next((row[key] for row in reversed(record.metrics) if key in row), None) for record in finished]
        pairs = [(record.summary.get(key), end) for record, end in zip(finished, last, strict=True)]
        texts = [
            ""
            if pair[0] == pair[1] or str(pair[0]) == str(pair[1])  # nan is not nan
            else " for ".join("none" if one is None else f"{one:.10g}" for one in pair)
            for pair in pairs
        ]
        for text, runs in by_value(finished, texts).items():
            if text:
                yield f"summary.json and metrics.csv disagree on the last {key} of {named(runs, finished)}: {text}."


def _impossible(records: Sequence[Record], trust: Trust) -> Iterator[str]:
    """Finished runs whose record cannot have come of training: a sentence for each rule that some break."""
    rules: dict[str, Callable[[Record], bool]] = {
        "A loss is not a positive number": lambda run: any(not 0 < run.summary.get(key, 1) < inf for key in LOSSES),
        "metrics.csv lacks rows": _lacks_rows,
        "metrics.csv has tokens that are not in proportion to steps, or a clock that goes back": _out_of_order,
        "metrics.csv has bits per byte that are not those of its losses": _has_other_bits,
        "metrics.csv has learning rates that are not those of the schedule": lambda run: _has_other_rates(run, trust),
        "metrics.csv has a KV cache of another size than the record": lambda run: any(
            row[key] != run.costs.get(key) for row in run.metrics for key in row if key.startswith("kv_cache/")
        ),
        "summary.json and environment.json state other facts": _has_other_facts,
        "eval.json has another loss at the trained length": _is_evaluated_otherwise,
        "init_from and the hash of the initial weights do not agree": lambda run: (
            bool(run.config.get(INIT)) != bool(run.environment.init_hash)
            or bool(run.start and run.start.hash != run.environment.init_hash)
        ),
        "The options on record are not those of the config": _has_other_options,
    }
    for what, is_broken in rules.items():
        if broken := [record for record in records if record.done and is_broken(record)]:
            yield f"{what}: {named(broken, records)}."


def _lacks_rows(run: Record) -> bool:
    """Whether an evaluation, or, of a run in one session, a logged step is missing before the last row."""
    if not run.metrics or is_resumed(run):  # a longer budget has other evaluations
        return False
    last, passes, every = int(run.metrics[-1]["step"]), *map(run.config.get, ("train.evaluations", "train.log_every"))
    wanted = {
        "val/loss": ceil(last / passes) if passes else 0,
        "train/loss": 0 if run.environment.earlier_sessions else every,
    }
    return any(
        not {row["step"] for row in run.metrics if key in row}.issuperset(range(step, last, step))
        for key, step in wanted.items()
        if step
    )


def _out_of_order(run: Record) -> bool:
    rows, last = run.metrics, run.metrics[-1] if run.metrics else {}
    uneven = any(not isclose(row["tokens"] * last["step"], last["tokens"] * row["step"]) for row in rows)
    return uneven or any(before["seconds"] > row["seconds"] for before, row in pairwise(rows))


def _has_other_bits(run: Record) -> bool:
    factor = log(2) * run.environment.bytes_per_token
    return any(
        not isclose(row["val/bits_per_byte"] * factor, row["val/loss"], rel_tol=1e-6)
        for row in run.metrics
        if factor and "val/bits_per_byte" in row and "val/loss" in row
    )


def _has_other_rates(run: Record, trust: Trust) -> bool:
    """Checked at the steps of the run, whatever its budget; not for schedules that are not trusted."""
    stored = run.settings.get("schedule")
    if stored is None or RATE not in run.config or is_resumed(run):
        return False
    try:
        trust.check(stored, RESOLVED, str)
    except ConfigError:
        return False  # the model of such a run is named, or its schedule is the user's own
    schedule, last, peak = build(DictConfig(stored), "schedule"), int(run.summary["step"]), run.config[RATE]
    rates = {int(row["step"]): row["optim/lr"] for row in run.metrics if "optim/lr" in row}
    return any(not isclose(rate, peak * schedule(step, last), rel_tol=1e-6) for step, rate in rates.items())


def _has_other_facts(run: Record) -> bool:
    """Whether the copy in summary.json differs."""
    own, copy = run.environment, Summary.load(run.path)
    return any(getattr(own, fact.name) != getattr(copy, fact.name) for fact in fields(Facts) if fact.name != "metrics")


def _is_evaluated_otherwise(run: Record) -> bool:
    """By more than another device or precision explains."""
    found = run.evaluation.lengths[0].loss if run.evaluation.lengths else None
    return found is not None and not isclose(found, run.summary["val/loss"], rel_tol=0.01)


def _has_other_options(run: Record) -> bool:
    """Whether a packaged option on record builds something that the config does not name."""
    named = TARGET.findall((run.path / RESOLVED).read_text(encoding="utf-8"))
    built = [_built_by(group, option) for group, option in run.environment.choices.items()]
    return any(target not in named for target in built if target)


@lru_cache(maxsize=256)
def _built_by(group: str, option: str) -> str | None:
    """What a packaged option builds; None for one that builds nothing, or is the user's own."""
    file = option_file(group, option)
    target = TARGET.search(file.read_text(encoding="utf-8")) if file.exists() else None
    return target[1] if target else None


def _unlike_positions(records: Sequence[Record]) -> Iterator[str]:
    """The runs with the smallest and the largest ratio of tokens to positions; without any the two are equal."""
    ratios = [1.0 if (ratio := record.environment.token_to_position_ratio) is None else ratio for record in records]
    if ratios and max(ratios) > MOST_ASIDE * min(ratios):
        ends = (f"{number(end(ratios), 2)} in {run_name(records[ratios.index(end(ratios))])}" for end in (min, max))
        yield f"Tokens over positions are {' and '.join(ends)} at the start: where that is small, positions drown them."


def unequal_speeds(arms: Sequence[Arm], records: Sequence[Record]) -> Iterator[str]:
    """A sentence about the arms whose runs logged unequal speeds, which names the most unequal two runs."""
    key = "perf/tokens_per_second"
    unequal = []
    for arm in arms:
        ours = [record for record in records if record.arm == arm.name and not trained_beside([record])]
        runs = [record for record in ours if record.done and record.summary.get(key)]
        runs.sort(key=lambda record: record.summary[key])
        if runs and runs[-1].summary[key] > MOST_UNEQUAL * runs[0].summary[key]:
            unequal.append((runs[-1].summary[key] / runs[0].summary[key], arm.name, runs[0], runs[-1]))
    if unequal:
        ratio, name, *ends = max(unequal, key=lambda found: found[0])
        within = name if len(unequal) == 1 else f"{len(unequal)} arms, most within {name},"
        slow, fast = (f"{three_digits(run.summary[key])} in {run_name(run)}" for run in ends)
        yield (
            f"Logged speeds within {within} differ by a factor of {number(ratio, 1)}, from {slow} to {fast} tokens per "
            f"second: the machine was under other load, and they cannot be compared."
        )
