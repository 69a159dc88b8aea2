"""Checks of runs' records against each other, and against what can be recomputed from them."""

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import compress, pairwise
from math import ceil, inf, isclose, log, nan
from operator import itemgetter
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import build, build_model
from llama_lab.config.grammar import escape
from llama_lab.config.trust import Trust, with_text
from llama_lab.drawing.anatomy import Anatomy, anatomy
from llama_lab.model import Cost
from llama_lab.model.cost import cost_metrics
from llama_lab.runs.folder import RESOLVED
from llama_lab.runs.record import MISSING, Record, finished, trained_beside
from llama_lab.runs.stored import LOSSES, OF_THE_RUN, SIZES, SPEED, RunMetadata, Summary
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.formatting import enumerate_some, number, three_digits

from .environments import is_resumed
from .result import Result
from .sentences import MOST_KEYS, by_value, faults_in, listing, named, run_name
from .settings import INIT, RATE

MOST_UNEQUAL = 1.5  # fastest over slowest run of an arm
MOST_ASIDE = 3.0  # largest over smallest ratio of tokens to positions


def rebuilt(record: Record, trust: Trust) -> Anatomy | str:
    """The parts of the model that a run's config describes, with its cost, or why it cannot be built and counted."""
    parts = {key: record.settings.get(key) for key in ("model", "objective")}
    if not isinstance(model := parts["model"], dict):
        return f"{RESOLVED} has no model"
    if not record.environment.vocab_size:
        return "environment.json has no vocab_size"
    try:
        trust.check(parts, RESOLVED, lambda package: f"--trust {package} to llama-lab-compare")
    except ConfigError as error:
        return str(error)
    # A model on the meta device has no initial values, and one cache entry serves all seeds
    return _rebuilt(json.dumps(parts | {"model": model | {"seed": 0}}), record.environment.vocab_size)


@lru_cache(maxsize=256)
def _rebuilt(parts: str, vocab_size: int) -> Anatomy | str:
    cfg = OmegaConf.create(with_text(json.loads(parts), escape))
    try:
        with torch.device("meta"):
            decoder = build_model(cfg, vocab_size)
        return anatomy("", decoder, cfg.model)
    except Exception as error:  # a config may name any class, which may raise anything
        return first_line(error)


def of_another_size(result: Result) -> Iterator[str]:
    """Runs whose model has other costs than are on record, or cannot be rebuilt."""
    records = result.started
    models = [rebuilt(record, result.trust) for record in records]
    pairs = list(zip(records, models, strict=True))
    unchecked = [record for record, model in pairs if isinstance(model, str)]
    reasons = [model for model in models if isinstance(model, str)]
    yield from listing(f"Sizes on record of {named(unchecked, records)} cannot be checked", reasons)
    wrong = ["" if isinstance(model, str) else _misstated(record, model.cost) for record, model in pairs]
    yield from faults_in("Records state other sizes than models have", records, wrong)


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


def mislabelled(result: Result) -> Iterator[str]:
    """Runs that were trained with another seed or learning rate than the study lists."""
    faults = []
    for member, record in result.members:
        pairs: list[tuple[str, Any, Any]] = [
            ("seed", member.seed, record.seed),
            ("seed", member.seed, record.config.get("seed", record.seed)),
            (RATE, member.learning_rate, record.config.get(RATE)),
        ]
        unlike = [pair for pair in dict.fromkeys(pairs) if pair[1] not in (None, pair[2])]
        texts = (f"{key}={real} instead of {listed}" for key, listed, real in unlike if record.status != MISSING)
        faults.append(", ".join(texts))
    yield from faults_in("Runs were trained otherwise than the study lists them", result.records, faults)


def copies(result: Result) -> Iterator[str]:
    """Runs with equal losses at every evaluation, to the last digit, which different seeds or arms never have."""
    done = [record for record in finished(result.records) if "val/loss" in record.summary]
    curves = [[(row["tokens"], row["val/loss"]) for row in record.metrics if "val/loss" in row] for record in done]
    losses = [str((record.summary["val/loss"], curve)) for record, curve in zip(done, curves, strict=True)]
    by_arm: dict[str, dict[tuple[Any, Any], str]] = {}
    for record, own in zip(done, losses, strict=True):
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
    apart = [original[record.arm] == record.arm for record in done]
    for runs in by_value([*compress(done, apart)], [*compress(losses, apart)]).values():
        if len(runs) > 1:
            yield f"{named(runs)} have the same losses, to the last digit: one is a copy of another."


def unlike_their_curves(result: Result) -> Iterator[str]:
    """Runs whose summary.json disagrees with the end of their metrics.csv."""
    done = finished(result.records)
    logged = dict.fromkeys(key for record in done for row in record.metrics for key in row)
    ends = [key for record in done for key in record.summary if "/" in key and key not in record.costs]
    keys, faults = [key for key in dict.fromkeys((*LOSSES, *logged, *ends)) if key not in OF_THE_RUN], []
    for record in done:
        last = {key: row[key] for row in record.metrics for key in row}
        pairs = {key: (record.summary.get(key), last.get(key)) for key in keys}
        texts = (
            f"{key} {' for '.join('none' if one is None else f'{one:.10g}' for one in pair)}"
            for key, pair in pairs.items()
            if str(pair[0]) != str(pair[1]) and pair[0] != pair[1]  # nan is not nan
        )
        faults.append(enumerate_some(list(texts), MOST_KEYS))
    yield from faults_in("summary.json and metrics.csv disagree on the last values", done, faults)


def impossible(result: Result) -> Iterator[str]:
    """Finished runs whose record cannot have come of training: a sentence for each fault that some have."""
    records, done = result.started, finished(result.records)
    faults = [_faults(run, result.trust) for run in done]
    for what in faults[0] if faults else ():
        if broken := [run for run, found in zip(done, faults, strict=True) if found[what]]:
            yield f"{what}: {named(broken, records)}."


def _faults(run: Record, trust: Trust) -> dict[str, bool]:
    """Whether a finished run's record has each fault."""
    rows, last, environment = run.metrics, run.metrics[-1] if run.metrics else {}, run.environment
    uneven = any(not isclose(row["tokens"] * last["step"], last["tokens"] * row["step"]) for row in rows)
    nats_per_bit = log(2) * environment.bytes_per_token
    in_both = [row for row in rows if nats_per_bit and "val/bits_per_byte" in row and "val/loss" in row]
    facts, at_trained = Summary.load(run.path), run.evaluation.lengths[0].loss if run.evaluation.lengths else None
    return {
        "A loss is not a positive number": any(not 0 < run.summary.get(key, 1) < inf for key in LOSSES),
        "metrics.csv lacks rows": _lacks_rows(run),
        "metrics.csv has tokens that are not in proportion to steps, or a clock that goes back": (
            uneven or any(before["seconds"] > row["seconds"] for before, row in pairwise(rows))
        ),
        "metrics.csv has bits per byte that are not those of its losses": any(
            not isclose(row["val/bits_per_byte"] * nats_per_bit, row["val/loss"], rel_tol=1e-6) for row in in_both
        ),
        "metrics.csv has learning rates that are not those of the schedule": _has_other_rates(run, trust),
        "metrics.csv has a KV cache of another size than the record": any(
            row[key] != run.costs.get(key) for row in rows for key in row if key.startswith("kv_cache/")
        ),
        "summary.json and environment.json state other facts": any(
            getattr(environment, fact.name) != getattr(facts, fact.name)
            for fact in fields(RunMetadata)
            if fact.name != "metrics"
        ),
        "eval.json has another loss at the trained length": (  # by more than another device or precision explains
            at_trained is not None and not isclose(at_trained, run.summary["val/loss"], rel_tol=0.01)
        ),
        "init_from and the hash of the initial weights do not agree": (
            bool(run.config.get(INIT)) != bool(environment.init_hash)
            or bool(run.start and run.start.hash != environment.init_hash)
        ),
    }


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


def unlike_positions(result: Result) -> Iterator[str]:
    """The runs with the smallest and the largest ratio of tokens to positions; without any the two are equal."""
    ratios = [(run.environment.token_to_position_ratio, run_name(run)) for run in result.started]
    known = [(1.0 if ratio is None else ratio, name) for ratio, name in ratios] or [(1.0, "")]
    least, most = min(known, key=itemgetter(0)), max(known, key=itemgetter(0))
    if most[0] > MOST_ASIDE * least[0]:
        ends = (f"{number(ratio, 2)} in {name}" for ratio, name in (least, most))
        yield f"Tokens over positions are {' and '.join(ends)} at the start: where that is small, positions drown them."


def unequal_speeds(result: Result) -> Iterator[str]:
    """A sentence about the arms whose runs logged unequal speeds, which names the most unequal two runs."""
    unequal = []
    for arm in result.study.arms:
        runs = [run for run in finished(result.records) if run.arm == arm.name and not trained_beside([run])]
        runs = sorted((run for run in runs if run.summary.get(SPEED)), key=lambda run: run.summary[SPEED])
        is_measured = result.speed and arm.name in result.speed.arms
        if runs and not is_measured and runs[-1].summary[SPEED] > MOST_UNEQUAL * runs[0].summary[SPEED]:
            unequal.append((runs[-1].summary[SPEED] / runs[0].summary[SPEED], arm.name, runs[0], runs[-1]))
    if unequal:
        ratio, name, *ends = max(unequal, key=itemgetter(0))
        within = name if len(unequal) == 1 else f"{len(unequal)} arms, most within {name},"
        slow, fast = (f"{three_digits(run.summary[SPEED])} in {run_name(run)}" for run in ends)
        yield (
            f"Logged speeds within {within} differ by a factor of {number(ratio, 1)}, from {slow} to {fast} tokens per "
            f"second: the machine was under other load, and they cannot be compared."
        )
