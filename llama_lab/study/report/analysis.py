"""The analysis of a study: from the folders of its runs to the Result that its report shows."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np

from llama_lab.config.trust import Trust
from llama_lab.formatting import count
from llama_lab.runs.evaluation import LengthLoss
from llama_lab.runs.record import MISSING, Record, is_run, missing_record, read_record
from llama_lab.study.learning_rate import Losses, best_rate, is_on_edge
from llama_lab.study.settings import RATE, different_settings
from llama_lab.study.speed import ArmSpeed, StudySpeed
from llama_lab.study.statistics import (
    Contrast,
    Effect,
    Estimate,
    Fit,
    PairedDifference,
    describe,
    estimate,
    factorial_effects,
    first_reach,
    fit_blocked,
    judge,
    paired_contrast,
    paired_difference,
    pareto_front,
    seeds_needed,
)
from llama_lab.study.study import Arm, Member, Study

from .cautions import cautions
from .confounds import confounds, one_rate
from .environment import environment
from .inference import inference
from .result import (
    FIXED_COSTS,
    MEASURED_COSTS,
    ArmResult,
    Comparison,
    Curve,
    CurveMetric,
    DifferenceCurve,
    Divergence,
    Front,
    Interaction,
    LearningRates,
    Lengths,
    Metric,
    Provenance,
    Reach,
    Result,
    ranked,
)
from .verdict import answer

MAX_POINTS = 200  # of a curve
MAX_JUDGED = 40  # points of a curve of differences, each of which is tested

Runs = list[tuple[Member, Record]]
Pair = tuple[str, str]  # an arm and its reference
_METRICS: tuple[Metric, ...] = ("val/loss", "val/bits_per_byte")


def analyse(study: Study, folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, Trust is immutable
    """Read every run that a study lists, and compare its arms.

    folder: of the study, which the paths of its runs are relative to. trust: see `confounds`. Runs that did not finish,
    or never started, are reported and excluded from the comparison.
    """
    runs = {arm.name: _read(arm, folder) for arm in study.arms}
    records = [record for members in runs.values() for _, record in members]
    metric = _metric(records)
    rates = tuple(_learning_rates(name, members) for name, members in runs.items() if _is_swept(members))
    judged = {name: _judged(members) for name, members in runs.items()}
    speed = StudySpeed.load(folder)
    blocks = _blocks(judged, metric)
    compared = _comparisons(study, judged, blocks, metric, is_final=True)
    arms = _arm_results(study, judged, metric, compared, speed, is_swept=bool(rates))
    effects = _effects(study, judged, metric) if study.design == "factorial" else ()
    tests = _tests(study, compared, effects)
    lengths = tuple(found for name, of_arm in judged.items() if (found := _lengths(name, _measured(of_arm))))
    verdict, sentences = answer(study, arms, effects, lengths, metric, tests)
    return Result(
        study=study,
        metric=metric,
        tests=tests,
        verdict=verdict,
        answer=sentences,
        arms=arms,
        curves=tuple(curve for arm in arms if arm.records for curve in _curves(arm.name, arm.records, metric)),
        front=_front(arms, metric),
        inference=tuple(filter(None, (inference(arm.name, arm.records) for arm in arms))),
        effects=effects,
        learning_rates=rates,
        divergences=tuple(
            _divergence(member, record) for members in runs.values() for member, record in members if not record.done
        ),
        lengths=lengths,
        provenance=_provenance(records, {r.seed for of_arm in judged.values() for r in of_arm}, judged[study.baseline]),
        warnings=(
            *confounds(study, arms, records, rates, speed, trust),
            *cautions(study, arms, metric, blocks.noise() if blocks else {}),
        ),
        notes=(*study.notes, *one_rate(study, records, is_swept=bool(rates))),
        speed=speed,
        difference_curves=_difference_curves(study, judged, metric),
        interactions=_interactions(study, arms, metric) if effects else (),
        records=tuple(records),
    )


def _read(arm: Arm, folder: Path) -> Runs:
    """The runs of an arm, with the name that the study gives it; they may have been trained under another."""
    runs = []
    for member in arm.members:
        path = folder / member.folder
        record = read_record(path) if is_run(path) else missing_record(path, arm.name, member.seed)
        runs.append((member, replace(record, arm=arm.name)))
    return runs


def _metric(records: Sequence[Record]) -> Metric:
    """Nats per token are comparable only between runs on the same tokens."""
    tokens = {(r.environment.tokenizer_hash, r.environment.data_hash) for r in records if r.status != MISSING}
    return "val/loss" if len(tokens) < 2 else "val/bits_per_byte"


# --- learning rates ---


def _by_rate(runs: Runs) -> dict[float, list[Record]]:
    """The records at each swept learning rate, in ascending order."""
    rates = sorted({member.learning_rate for member, _ in runs if member.learning_rate is not None})
    return {rate: [record for member, record in runs if member.learning_rate == rate] for rate in rates}


def _is_swept(runs: Runs) -> bool:
    return len(_by_rate(runs)) > 1


def _tuned(runs: Runs) -> Mapping[int, Losses]:
    """For each judged seed, the final losses of its tuning runs that finished or diverged."""
    found: dict[int, dict[float, float]] = {}
    for member, record in runs:
        if member.tunes is not None and member.learning_rate is not None and record.status in ("done", "diverged"):
            loss = record.summary["val/loss"] if record.done else math.inf
            found.setdefault(member.tunes, {})[member.learning_rate] = loss
    return found


def _best_rate(by_rate: dict[float, list[Record]]) -> float:
    """The rate with the lowest mean loss among those with the most finished seeds; nan if no run finished."""
    losses = {rate: _losses(records, "val/loss") for rate, records in by_rate.items()}
    finished = {rate: of_rate for rate, of_rate in losses.items() if of_rate}
    return min(finished, key=lambda r: (-len(finished[r]), fmean(finished[r])), default=math.nan)


def _judged(runs: Runs) -> list[Record]:
    """The records that an arm is judged by: all but its tuning runs.

    If learning rates are swept without tuning runs, those at the best rate; all of them if no run finished.
    """
    if any(member.tunes is not None for member, _ in runs):
        return [record for member, record in runs if member.tunes is None]
    best = _best_rate(_by_rate(runs)) if _is_swept(runs) else math.nan
    return [record for member, record in runs if math.isnan(best) or member.learning_rate == best]


def _learning_rates(arm: str, runs: Runs) -> LearningRates:
    by_rate, tuned = _by_rate(runs), _tuned(runs)
    rates = list(by_rate)
    best = _best_rate(by_rate)
    on_edge = any(map(is_on_edge, tuned.values())) if tuned else best in (rates[0], rates[-1])
    return LearningRates(
        arm=arm,
        rates=rates,
        loss=[_estimate(records, "val/loss") for records in by_rate.values()],
        diverged=[sum(record.status == "diverged" for record in records) for records in by_rate.values()],
        best=best,
        on_edge=on_edge,
        sensitivity=_sensitivity(list(by_rate.values())),
        chosen={seed: best_rate(losses) for seed, losses in tuned.items()},
    )


def _sensitivity(by_rate: Sequence[list[Record]]) -> float:
    """See LearningRates; nan if no run finished. A diverged run counts with the entropy of token frequencies."""
    capped = []
    for records in by_rate:
        ended = [record for record in records if record.status in ("done", "diverged")]
        losses = [min(r.summary.get("val/loss", math.inf), r.environment.unigram_entropy or math.inf) for r in ended]
        if losses:
            capped.append(fmean(losses))
    if not any(record.done for records in by_rate for record in records):
        return math.nan
    return fmean(capped) - min(capped)


# --- arms and comparisons ---


def _arm_results(
    study: Study,
    judged: dict[str, list[Record]],
    metric: Metric,
    compared: dict[Pair, Comparison],
    speed: StudySpeed | None,
    is_swept: bool,
) -> tuple[ArmResult, ...]:
    baseline, speeds = judged[study.baseline], speed.arms if speed else {}
    targets = {record.seed: record.summary[metric] for record in _finished(baseline)}
    return tuple(
        ArmResult(
            arm=arm,
            learning_rates=_rates(judged[arm.name]),
            records=tuple(judged[arm.name]),
            loss=_estimate(judged[arm.name], "val/loss"),
            bits=_estimate(judged[arm.name], "val/bits_per_byte"),
            to_previous=compared.get((arm.name, arm.previous)) if arm.previous else None,
            to_baseline=compared.get((arm.name, study.baseline)) if arm.name != study.baseline else None,
            to_reach=_to_reach(judged[arm.name], metric, targets, speeds.get(arm.name)),
            reach=_reach(judged[arm.name], baseline, metric),
            costs=_costs(judged[arm.name], speeds.get(arm.name)),
            difference=_difference(judged[arm.previous] if arm.previous else baseline, judged[arm.name], is_swept),
        )
        for arm in study.arms
    )


def _started(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.status != MISSING]


def _finished(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.done]


def _losses(records: Sequence[Record], metric: Metric) -> list[float]:
    return [record.summary[metric] for record in _finished(records)]


def _estimate(records: Sequence[Record], metric: Metric) -> Estimate | None:
    losses = _losses(records, metric)
    return estimate(losses) if losses else None


def _rates(records: Sequence[Record]) -> tuple[float, ...]:
    """The distinct learning rates of an arm's runs, in ascending order."""
    return tuple(sorted({record.config[RATE] for record in _started(records) if RATE in record.config}))


def _difference(
    reference: Sequence[Record], records: Sequence[Record], is_swept: bool
) -> dict[str, tuple[object, object]]:
    ours, theirs = _started(records), _started(reference)
    return different_settings(theirs[0], ours[0], is_swept) if ours and theirs else {}


def _family(study: Study) -> list[Pair]:
    """The pairs that are tested together, as one family that answers the question of the design."""
    if study.design == "factorial":  # its family is that of its effects
        return []
    steps = [(arm.name, arm.previous) for arm in study.arms if arm.previous]
    return steps or [(arm.name, study.baseline) for arm in study.arms if arm.name != study.baseline]


def _ends(study: Study) -> list[Pair]:
    """The last arm of a ladder against its first, a family of its own; empty for a ladder of one step."""
    return [(study.arms[-1].name, study.baseline)] if study.is_chain and len(study.arms) > 2 else []


@dataclass(frozen=True)
class Blocks:
    """The model of arm and seed over all arms without a diverged run. cells: (arm, seed) of each value of the fit."""

    fit: Fit
    cells: list[tuple[str, int]]

    def weights(self, comparison: Comparison) -> list[float]:
        """The weights whose sum over the values is the mean difference."""
        share = {comparison.arm: 1 / len(comparison.seeds), comparison.against: -1 / len(comparison.seeds)}
        return [share.get(arm, 0.0) if seed in comparison.seeds else 0.0 for arm, seed in self.cells]

    def noise(self) -> dict[str, float]:
        """Each arm's standard deviation over the typical one; empty for fewer than three arms."""
        of_arm = {
            arm: float(self.fit.noise[group]) for (arm, _), group in zip(self.cells, self.fit.groups, strict=True)
        }
        return of_arm if len(of_arm) > 2 else {}


def _comparisons(
    study: Study, judged: dict[str, list[Record]], blocks: Blocks | None, metric: Metric, is_final: bool
) -> dict[Pair, Comparison]:
    """Every arm against the one before it and against the baseline; pairs without a common seed are left out.

    is_final: whether to estimate how many seeds are needed, which takes longer than everything else.
    """
    pairs = [(arm.name, arm.previous) for arm in study.arms if arm.previous]
    pairs += [(arm.name, study.baseline) for arm in study.arms if arm.name != study.baseline]
    found = {pair: c for pair in pairs if (c := _compare(*pair, judged, metric))}
    testable = {pair: c for pair, c in found.items() if not c.untested and c.difference.sd > 0}
    family = {pair: testable[pair] for pair in _family(study) if pair in testable}
    if family and blocks:
        contrasts = judge(blocks.fit, np.array([blocks.weights(comparison) for comparison in family.values()]))
        for (pair, comparison), contrast in zip(family.items(), contrasts, strict=True):
            found[pair] = _tested(comparison, contrast, len(family), is_final)
    for pair in _ends(study):
        if pair in testable:  # by their own runs alone, without the arms in between
            found[pair] = _tested(testable[pair], paired_contrast(testable[pair].difference), 1, is_final)
    return found


def _compare(arm: str, against: str, judged: dict[str, list[Record]], metric: Metric) -> Comparison | None:
    """The comparison over the seeds that both have finished, not yet tested; None without a common seed."""
    ours, theirs = ({r.seed: r.summary for r in _finished(judged[name])} for name in (arm, against))
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    if not seeds:
        return None
    nats, bits = (
        describe(
            np.array([ours[seed][key] - theirs[seed][key] for seed in seeds]),
            scale=max(max(ours[seed][key], theirs[seed][key]) for seed in seeds),
        )
        for key in _METRICS
    )
    untested = _of_other_texts(arm, against, judged) or _diverged(arm, against, judged)
    return Comparison(arm, against, seeds, nats if metric == "val/loss" else None, bits, untested=untested)


def _diverged(arm: str, against: str, judged: dict[str, list[Record]]) -> str:
    """Which of the two diverged, and how often: the mean over the surviving seeds is biased."""
    runs = {name: [record.status == "diverged" for record in judged[name]] for name in (arm, against)}
    return " and ".join(
        f"{name} diverged in {sum(ends)} of {count(len(ends), 'seed')}" for name, ends in runs.items() if any(ends)
    )


def _of_other_texts(arm: str, against: str, judged: dict[str, list[Record]]) -> str:
    texts = {record.environment.data_hash for name in (arm, against) for record in _finished(judged[name])}
    return f"{arm} and {against} were trained on different texts" if len(texts) > 1 else ""


def _blocks(judged: dict[str, list[Record]], metric: Metric) -> Blocks | None:
    """None if every arm diverged in some run, or none finished."""
    arms = {name: records for name, records in judged.items() if not any(r.status == "diverged" for r in records)}
    seeds = sorted({record.seed for records in arms.values() for record in _finished(records)})
    losses = np.full((len(arms), len(seeds)), np.nan)
    for row, records in enumerate(arms.values()):
        for record in _finished(records):
            losses[row, seeds.index(record.seed)] = record.summary[metric]
    names = list(arms)
    cells = [(names[row], seeds[column]) for row, column in np.argwhere(~np.isnan(losses))]
    return Blocks(fit_blocked(losses), cells) if cells else None


def _tested(comparison: Comparison, contrast: Contrast, family: int, is_final: bool) -> Comparison:
    """A comparison with the interval and p of its contrast, which is in the unit that arms are judged in."""
    nats, bits = comparison.nats, comparison.bits
    factor = 1.0
    if nats:  # with one tokenizer, the two units differ by a factor
        factor = bits.sd / nats.sd
        nats = nats.with_test(contrast)
    bits = replace(bits, low=factor * contrast.low, high=factor * contrast.high, p=contrast.p)
    found = replace(comparison, nats=nats, bits=bits)
    if found.significant or not is_final:
        return found
    return replace(found, seeds_needed=seeds_needed(contrast, len(comparison.seeds), family))


def _tests(study: Study, compared: dict[Pair, Comparison], effects: Sequence[Effect]) -> str:
    """See Result.tests."""
    sizes = [
        sum(pair in compared and not math.isnan(compared[pair].difference.p) for pair in pairs)
        for pairs in (_family(study), _ends(study))
    ]
    known_effects = sum(not math.isnan(effect.change.p) for effect in effects)
    noun, to = ("step", "") if any(arm.previous for arm in study.arms) else ("comparison", " to the baseline")
    families = [f"max-t over the {count(sizes[0], noun)}{to}"] if sizes[0] else []
    families += [f"max-t over the {count(known_effects, 'effect')}"] if known_effects else []
    families += ["a paired t-test of the last arm against the first"] if sizes[1] else []
    return " and, on its own, ".join(families) or "none"


def _to_reach(
    records: Sequence[Record], metric: Metric, targets: dict[int, float], speed: ArmSpeed | None
) -> dict[str, float]:
    """See ArmResult.to_reach; targets: the baseline's final loss at each seed.

    Seconds follow from the speed that was measured side by side, or else are those that the runs logged.
    """
    reached = []
    for record in (record for record in records if record.seed in targets):
        rows = [row for row in record.metrics if metric in row]
        losses = [row[metric] for row in rows]
        target = targets[record.seed]
        tokens, seconds = (first_reach([row[x] for row in rows], losses, target) for x in ("tokens", "seconds"))
        if tokens is None or seconds is None:
            return {}
        if speed:
            seconds = tokens / speed.costs["perf/tokens_per_second"]
        reached.append({"tokens": tokens, "flops": tokens * record.costs["train_flops_per_token"], "seconds": seconds})
    return {key: fmean([one[key] for one in reached]) for key in reached[0]} if reached else {}


def _reach(records: Sequence[Record], baseline: Sequence[Record], metric: Metric) -> Reach | None:
    """None without curves, or without a seed that both have finished."""
    ratios, censored = {}, set()
    references = {record.seed: record for record in _finished(baseline)}
    for record in (record for record in _finished(records) if record.seed in references):
        reference = references[record.seed]
        tokens, losses = _validation(record, metric)
        target = reference.summary[metric]
        own, baselines = first_reach(tokens, losses, target), first_reach(*_validation(reference, metric), target)
        if not tokens or not baselines:
            continue
        ratios[record.seed] = (tokens[-1] if own is None else own) / baselines
        if own is None:
            censored.add(record.seed)
    if not ratios:
        return None
    logs = estimate([math.log(ratio) for ratio in ratios.values()])
    mean = Estimate(logs.n, math.exp(logs.mean), logs.sd, math.exp(logs.low), math.exp(logs.high))
    return Reach(ratios, frozenset(censored), None if censored else mean)


def _validation(record: Record, metric: Metric) -> tuple[list[float], list[float]]:
    """The tokens and losses of a run's validation curve."""
    rows = [row for row in record.metrics if metric in row]
    return [row["tokens"] for row in rows], [row[metric] for row in rows]


def _costs(records: Sequence[Record], speed: ArmSpeed | None) -> dict[str, float]:
    """An arm's FIXED_COSTS, and means over its finished runs of its MEASURED_COSTS.

    speed: as measured side by side, which replaces what the runs logged.
    """
    started, finished = _started(records), _finished(records)
    fixed = {key: started[0].costs[key] for key in FIXED_COSTS if started and key in started[0].costs}
    logged = {key: [record.summary[key] for record in finished if key in record.summary] for key in MEASURED_COSTS}
    costs = fixed | {key: fmean(values) for key, values in logged.items() if values}
    if speed is None:
        return costs
    if "perf/mfu" in costs:  # in proportion to the speed
        costs["perf/mfu"] *= speed.costs["perf/tokens_per_second"] / costs["perf/tokens_per_second"]
    return costs | speed.costs


# --- charts ---


def _curves(arm: str, records: Sequence[Record], metric: Metric) -> list[Curve]:
    """The curves of the finished runs, or, if none finished, of the others up to the first one's end.

    The training loss is left out if arms are judged in bits per byte.
    """
    shown = _finished(records) or [record for record in records if record.metrics]
    drawn: tuple[CurveMetric, ...] = (metric, "train/loss") if metric == "val/loss" else (metric,)
    return [curve for one in drawn if (curve := _curve(arm, shown, one))]


def _curve(arm: str, records: Sequence[Record], metric: CurveMetric) -> Curve | None:
    rows = [{row["tokens"]: row for row in record.metrics if metric in row} for record in records]
    tokens = _thin(sorted(set.intersection(*map(set, rows))), MAX_POINTS) if rows else []
    if not tokens:
        return None

    def over_runs(combine: Callable[[list[float]], float], key: str) -> list[float]:
        return [combine([run[at][key] for run in rows]) for at in tokens]

    return Curve(
        arm=arm,
        metric=metric,
        tokens=tokens,
        flops=[at * records[0].costs["train_flops_per_token"] for at in tokens],
        seconds=over_runs(fmean, "seconds"),
        mean=over_runs(fmean, metric),
        low=over_runs(min, metric),
        high=over_runs(max, metric),
    )


def _thin(xs: list[float], most: int) -> list[float]:
    """At most `most` of xs, evenly spaced and ending in the last."""
    stride = math.ceil(len(xs) / most)
    return xs[::-1][::stride][::-1] if xs else xs


def _difference_curves(study: Study, judged: dict[str, list[Record]], metric: Metric) -> tuple[DifferenceCurve, ...]:
    """The family of comparisons, or of effects, at every evaluation that all finished runs share.

    Each evaluation is tested exactly as the final losses are. If all runs have one length, the curves end in those.
    """
    rows = {name: [(record, _evaluations(record)) for record in records] for name, records in judged.items()}
    finished = [(record, of_run) for runs in rows.values() for record, of_run in runs if record.done]
    shared = set.intersection(*(set(of_run) for _, of_run in finished)) if finished else set()
    ends = {record.summary["tokens"] for record, _ in finished}
    if len(ends) == 1:
        shared = {tokens for tokens in shared if tokens < min(ends)} | ends
    points: dict[Pair, list[tuple[float, PairedDifference]]] = {}
    for tokens in _thin(sorted(shared), MAX_JUDGED):
        then = {
            name: [replace(record, summary=of_run[tokens]) if record.done else record for record, of_run in runs]
            for name, runs in rows.items()
            if ends != {tokens}
        }
        for pair, found in _differences(study, then or judged, metric).items():
            points.setdefault(pair, []).append((tokens, found))
    return tuple(
        DifferenceCurve(*pair, *map(list, zip(*((at, d.mean, d.low, d.high) for at, d in found), strict=True)))
        for pair, found in points.items()
    )


def _evaluations(record: Record) -> dict[float, dict[str, float]]:
    """The rows of a run's evaluations by tokens."""
    return {row["tokens"]: row for row in record.metrics if all(metric in row for metric in _METRICS)}


def _differences(study: Study, judged: dict[str, list[Record]], metric: Metric) -> Mapping[Pair, PairedDifference]:
    """The study's family by (arm, reference), or by (effect, "")."""
    if study.design == "factorial":
        return {(effect.name, ""): effect.change for effect in _effects(study, judged, metric)}
    compared = _comparisons(study, judged, _blocks(judged, metric), metric, is_final=False)
    return {pair: compared[pair].difference for pair in _family(study) if pair in compared}


def _interactions(study: Study, arms: Sequence[ArmResult], metric: Metric) -> tuple[Interaction, ...]:
    """For each pair of axes all of whose combinations were run, over the seeds that all arms have finished."""
    _, means = ranked(arms, metric)
    base = next(arm for arm in study.arms if arm.name == study.baseline).axes
    others = {axis: next((a.axes[axis] for a in study.arms if a.axes[axis] != base[axis]), "") for axis in base}
    levels = {axis: (base[axis], other) for axis, other in others.items() if other}
    found = []
    for first, second in combinations(levels, 2):
        cells = [
            [means[a.name] for a in arms if a.name in means and (a.arm.axes[first], a.arm.axes[second]) == (one, other)]
            for one in levels[first]
            for other in levels[second]
        ]
        if all(cells):
            a, b, c, d = map(fmean, cells)
            found.append(Interaction((first, second), (levels[first], levels[second]), ((a, b), (c, d))))
    return tuple(found)


def _front(arms: Sequence[ArmResult], metric: Metric) -> Front:
    return Front(
        kv_cache=_best_trades(arms, metric, "kv_cache/bytes_per_token", 1),
        throughput=_best_trades(arms, metric, "perf/tokens_per_second", -1),
    )


def _best_trades(arms: Sequence[ArmResult], metric: Metric, cost: str, sign: int) -> tuple[str, ...]:
    """The arms on the front of loss, over common seeds, and cost; sign -1 for a cost of which more is better."""
    _, means = ranked(arms, metric)
    known = [
        (arm.name, sign * arm.costs[cost], means[arm.name]) for arm in arms if cost in arm.costs and arm.name in means
    ]
    on_front = pareto_front([cost for _, cost, _ in known], [loss for _, _, loss in known])
    return tuple(name for (name, _, _), is_on in zip(known, on_front, strict=True) if is_on)


def _effects(study: Study, judged: dict[str, list[Record]], metric: Metric) -> tuple[Effect, ...]:
    """The effects of a two-level factorial: -1 is the baseline's option, +1 the other."""
    base = next(arm for arm in study.arms if arm.name == study.baseline).axes
    runs = [(arm, record) for arm in study.arms for record in _finished(judged[arm.name])]
    if not runs:
        return ()
    levels = [{axis: -1 if arm.axes[axis] == option else 1 for axis, option in base.items()} for arm, _ in runs]
    return tuple(factorial_effects(levels, [r.seed for _, r in runs], [r.summary[metric] for _, r in runs]))


def _divergence(member: Member, record: Record) -> Divergence:
    tokens = max((row["tokens"] for row in record.metrics), default=0.0)
    is_tuning = member.tunes is not None
    return Divergence(record.arm, record.seed, record.status, tokens, record.message, member.learning_rate, is_tuning)


def _measured(records: Sequence[Record]) -> list[Record]:
    return [record for record in _finished(records) if record.evaluation.lengths]


def _lengths(arm: str, records: Sequence[Record]) -> Lengths | None:
    """The losses at the lengths that all records were evaluated at, the trained one first; None without any."""
    by_length = [{entry.length: entry for entry in record.evaluation.lengths} for record in records]
    lengths = [n for n in (by_length[0] if by_length else ()) if all(n in entries for entries in by_length)]
    if not lengths:
        return None
    losses = {n: [loss for e in by_length if (loss := e[n].loss) is not None] for n in lengths}
    known = {n: [entries[n] for entries in by_length if entries[n].losses] for n in lengths}
    return Lengths(
        arm=arm,
        trained=lengths[0],
        lengths=lengths,
        loss=[estimate(losses[n]) if losses[n] else None for n in lengths],
        by_position={
            n: (_means([e.positions for e in entries]), _means([e.losses for e in entries]))
            for n, entries in known.items()
            if entries
        },
        changes=[_change(by_length, lengths[0], n) for n in lengths],
    )


def _change(by_length: Sequence[dict[int, LengthLoss]], trained: int, length: int) -> PairedDifference | None:
    """The loss at a length minus that at the trained one, over the runs that have both; None without any."""
    pairs = [(entries[length].loss, entries[trained].loss) for entries in by_length]
    known = [(now, then) for now, then in pairs if now is not None and then is not None]
    return paired_difference(*zip(*known, strict=True)) if known else None


def _means(lists: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*lists, strict=True)]


def _provenance(records: Sequence[Record], seeds: Collection[int], baseline: Sequence[Record]) -> Provenance:
    facts = [environment(record) for record in _started(records)]
    names = facts[0] if facts else {}
    first = next(iter(_started(baseline)), None)
    return Provenance(
        seeds=tuple(sorted(seeds)),
        environment={name: dict(Counter(values[name] for values in facts)) for name in names},
        baseline_config=(first.path / "resolved.yaml").read_text() if first else "",
    )
