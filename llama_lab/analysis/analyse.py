"""The analysis of a study: from the folders of its runs to the Result that its report shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from llama_lab.config.trust import Trust
from llama_lab.runs.folder import RESOLVED, is_run
from llama_lab.runs.record import Record, finished, missing_record, read_record, started, trained_beside
from llama_lab.runs.stored import FIXED_COSTS, MEASURED_COSTS
from llama_lab.runs.study import Arm, ArmSpeed, Pair, Study, StudySpeed, measured_speed

from .architectures import architectures
from .comparisons import Judged, compare_arms, describe_tests, effects_of, interactions_of
from .confounds import notes, warnings
from .curves import difference_curves, drawn, loss_curves
from .depth_profiles import telemetry
from .environments import environment
from .inference import inference
from .learning_rates import is_swept, judged_runs, learning_rates
from .ranking import rankings
from .result import (
    BITS,
    SECOND_HALF,
    SPEEDS,
    ArmResult,
    Comparison,
    Lengths,
    Loss,
    Reach,
    Result,
    estimate_of,
    final_losses,
    judged_by,
)
from .scaling_gains import scaled
from .settings import RATE, different_settings
from .statistics import estimate, first_reach, geometric_mean, paired_difference
from .verdict import answer

RecordPair = tuple[Record, Record]


def analyse(study: Study, folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, Trust is immutable
    """Read every run that a study lists, and compare its arms.

    folder: of the study, which the paths of its runs are relative to. trust: see Result. Runs that did not finish, or
    never started, are reported and excluded from the comparison.
    """
    runs = _read(study, folder)
    of_arm = {arm.name: runs[runs["arm"] == arm.name] for arm in study.arms}
    records: list[Record] = runs["record"].tolist()
    rates = tuple(learning_rates(name, own) for name, own in of_arm.items() if is_swept(own))
    judged: Judged = {name: judged_runs(own)["record"].tolist() for name, own in of_arm.items()}
    units = judged_by([record for own in judged.values() for record in started(own)])
    metric, losses = units[0], {unit: final_losses(judged, unit) for unit in units}
    speed = measured_speed(folder) if study.is_in(folder) else None
    compared = compare_arms(study, judged, losses, metric, is_final=True)
    effects = effects_of(study, judged, losses[metric]) if study.is_factorial else ()
    facts = pd.DataFrame([environment(record.environment) for record in started(records)])
    first = next(iter(started(judged[study.baseline])), None)
    result = Result(
        study=study,
        metric=metric,
        tests=describe_tests(study, compared, effects),
        records=tuple(records),
        seeds=tuple(sorted({record.seed for own in judged.values() for record in own})),
        environment={fact: facts[fact].value_counts(sort=False).to_dict() for fact in facts},
        baseline_config=(first.path / RESOLVED).read_text() if first else "",
        effects=effects,
        pairs=tuple(c for pair in study.family if (c := compared.get(pair))) if study.compare == "all" else (),
        difference_curves=difference_curves(study, judged, losses, metric),
        learning_rates=rates,
        lengths=tuple(found for name, own in judged.items() if (found := _lengths(name, own))),
        speed=speed,
        trust=trust,
    )
    arms = tuple(_arm_result(result, arm, judged, compared) for arm in study.arms)
    result = replace(result, arms=arms, unfinished=tuple(pair for pair in result.members if not pair[1].done))
    ranked, is_timed = rankings(result), speed is not None and of_arm.keys() <= speed.arms.keys()
    result = replace(
        result,
        curves=tuple(curve for arm in arms for curve in loss_curves(arm.name, arm.records, metric)),
        inference=tuple(filter(None, (inference(arm.name, arm.records) for arm in arms))),
        interactions=interactions_of(result) if effects else (),
        telemetry=tuple(filter(None, (telemetry(arm.name, drawn(arm.records)) for arm in arms))),
        ranks={one.arm: one.ranks for one in ranked[0].standings if one.ranks} if ranked else {},
        rankings=ranked,
        architectures=architectures(result),
        scaling=scaled(arms, metric, is_timed) if study.is_scaling else None,
    )
    verdict, sentences = answer(result)
    return replace(result, verdict=verdict, answer=sentences, warnings=warnings(result), notes=notes(result))


def _read(study: Study, folder: Path) -> pd.DataFrame:
    """A row per member of the study, with its record, under the arm's name in the study.

    Columns: arm, rate and tunes (see Member), status, loss (`val/loss`, infinite where a run diverged; nan unless it
    ended), record.
    """
    rows = []
    for arm, member in [(one.name, member) for one in study.arms for member in one.members]:
        path = folder / member.folder
        record = read_record(path) if is_run(path) else missing_record(path, arm, member.seed)
        loss = math.inf if record.status == "diverged" else record.summary.get("val/loss", math.nan)
        record = replace(record, arm=arm)
        rows.append((arm, member.learning_rate, member.tunes, record.status, loss, record))
    runs = pd.DataFrame(rows, columns=["arm", "rate", "tunes", "status", "loss", "record"])
    return runs.astype({"rate": float, "tunes": float})


def _arm_result(result: Result, arm: Arm, judged: Judged, compared: Mapping[Pair, Comparison]) -> ArmResult:
    study, metric, records = result.study, result.metric, judged[arm.name]
    speed = result.speed.arms.get(arm.name) if result.speed else None
    ours, theirs = started(records), started(judged[arm.previous or study.baseline])
    baseline = {} if study.is_scaling else {record.seed: record for record in finished(judged[study.baseline])}
    pairs = [(record, baseline[record.seed]) for record in records if record.seed in baseline]
    return ArmResult(
        arm=arm,
        learning_rates=tuple(sorted({record.config[RATE] for record in ours if RATE in record.config})),
        records=tuple(records),
        loss=estimate_of(records, result.nats),
        bits=estimate_of(records, BITS) if metric != SECOND_HALF else None,
        accuracy=estimate_of(records, "val/accuracy"),
        ema=estimate_of(records, "val/ema_loss"),
        to_previous=compared.get((arm.name, arm.previous or "")),
        to_baseline=compared.get((arm.name, study.baseline)),
        to_reach=_to_reach(pairs, metric, speed),
        reach=_reach(pairs, metric),
        costs=_costs(records, speed, result.speed),
        difference=different_settings(theirs[0], ours[0], result.is_swept) if ours and theirs else {},
    )


def _costs(records: Sequence[Record], speed: ArmSpeed | None, measured: StudySpeed | None) -> dict[str, float]:
    """An arm's FIXED_COSTS, and means over its finished runs of its MEASURED_COSTS.

    speed: as measured in turn, which replaces what the runs logged; without it, runs beside others have none.
    """
    known = next((record.costs for record in started(records)), {})
    fixed = {key: known[key] for key in FIXED_COSTS if key in known}
    logged = {key: [r.summary[key] for r in finished(records) if key in r.summary] for key in MEASURED_COSTS}
    costs = fixed | {key: fmean(values) for key, values in logged.items() if values}
    if speed is None or measured is None:
        return {key: value for key, value in costs.items() if key not in SPEEDS or not trained_beside(records)}
    trained_on = {(one.environment.device, one.environment.devices) for one in finished(records)}
    mfu = costs.pop("perf/mfu", None)
    if mfu and trained_on == {(measured.device, measured.devices)}:
        costs["perf/mfu"] = mfu * speed.costs["perf/tokens_per_second"] / costs["perf/tokens_per_second"]
    return costs | speed.costs


def _to_reach(pairs: Sequence[RecordPair], metric: Loss, speed: ArmSpeed | None) -> dict[str, float]:
    """See ArmResult.to_reach; pairs: an arm's runs, each with the finished baseline of its seed.

    Seconds follow from the speed that was measured in turn, or else are those that the runs logged, if none trained
    beside another.
    """
    reached: dict[str, list[float]] = {}
    for record, baseline in pairs:
        tokens, seconds = (_reaches(record, baseline, metric, axis) for axis in ("tokens", "seconds"))
        if tokens is None or seconds is None:
            return {}
        found = {"tokens": tokens, "flops": tokens * record.costs["train_flops_per_token"]}
        if speed:
            found["seconds"] = tokens / speed.costs["perf/tokens_per_second"]
        elif not trained_beside(record for record, _ in pairs):
            found["seconds"] = seconds
        reached = {key: [*reached.get(key, ()), value] for key, value in found.items()}
    return {key: fmean(values) for key, values in reached.items()}


def _reach(pairs: Sequence[RecordPair], metric: Loss) -> Reach | None:
    """None without curves, or without a seed that both have finished."""
    ratios, censored = {}, set()
    for record, baseline in (pair for pair in pairs if pair[0].done):
        own, whole = (_reaches(one, baseline, metric) for one in (record, baseline))
        evaluated = [row["tokens"] for row in record.metrics if metric in row]
        if evaluated and whole:
            ratios[record.seed] = (evaluated[-1] if own is None else own) / whole
            censored |= {record.seed} if own is None else set()
    if not ratios:
        return None
    return Reach(ratios, frozenset(censored), None if censored else geometric_mean([*ratios.values()]))


def _reaches(record: Record, baseline: Record, metric: Loss, axis: str = "tokens") -> float | None:
    """The tokens (or seconds) of training at which a run first has the baseline's final loss; None if it never has."""
    rows = [row for row in record.metrics if metric in row and row["step"]]  # step 0: what a warm start begins with
    target = baseline.summary.get(metric, -math.inf)
    return first_reach([row[axis] for row in rows], [row[metric] for row in rows], target)


def _lengths(arm: str, records: Sequence[Record]) -> Lengths | None:
    """The losses at the lengths that all evaluated runs share, the trained one first; None without any."""
    evaluated = [record.evaluation.lengths for record in finished(records) if record.evaluation.lengths]
    runs = [pd.DataFrame(lengths).assign(run=i) for i, lengths in enumerate(evaluated)]
    by_length = pd.concat(runs).groupby("length", sort=False) if runs else ()
    shared = {int(n): entries.set_index("run") for n, entries in by_length if len(entries) == len(runs)}
    if not shared:
        return None
    trained = next(iter(shared))
    losses = pd.DataFrame({n: entries["loss"] for n, entries in shared.items()}, dtype=float)  # (runs, lengths)
    loss, changes, by_position = {}, {}, {}
    for n, entries in shared.items():
        known, pairs = losses[n].dropna(), losses.loc[losses[[n, trained]].notna().all(axis=1)]
        loss[n] = estimate(known) if len(known) else None
        changes[n] = paired_difference(pairs[n], pairs[trained]) if len(pairs) else None
        buckets = entries[entries["losses"].astype(bool)]
        if len(buckets):
            positions, means = (np.mean(buckets[key].tolist(), axis=0).tolist() for key in ("positions", "losses"))
            by_position[n] = (positions, means)
    return Lengths(arm, trained, loss, by_position, changes)
