"""The analysis of a study: from the folders of its runs to the Result that its report shows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pandas as pd

from llama_lab.config.trust import Trust
from llama_lab.formatting import count
from llama_lab.runs.record import MISSING, Record, is_run, missing_record, read_record
from llama_lab.study.learning_rate import best_rate, is_on_edge
from llama_lab.study.naming import divergence
from llama_lab.study.settings import RATE, different_settings
from llama_lab.study.speed import ArmSpeed, StudySpeed, measured_speed
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
    geometric_mean,
    judge,
    paired_contrast,
    paired_difference,
    pareto_front,
    rank_intervals,
    seeds_needed,
)
from llama_lab.study.study import Study

from .cautions import cautions
from .confounds import confounds, one_rate
from .drawings import drawings
from .environment import environment
from .inference import inference
from .ranking import rankings
from .result import (
    FIXED_COSTS,
    MEASURED_COSTS,
    METRICS,
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
    common_losses,
    final_losses,
)
from .scaling import scaled, scaling_sentences
from .telemetry import telemetry
from .verdict import answer

MAX_POINTS = 200  # of a curve
MAX_JUDGED = 40  # points of a curve of differences, each of which is tested

Judged = Mapping[str, Sequence[Record]]  # the runs that each arm is judged by
Table = Mapping[Metric, pd.DataFrame]  # of `final_losses`
Pair = tuple[str, str]  # an arm and its reference


def analyse(study: Study, folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, Trust is immutable
    """Read every run that a study lists, and compare its arms.

    folder: of the study, which the paths of its runs are relative to. trust: see `confounds`. Runs that did not finish,
    or never started, are reported and excluded from the comparison.
    """
    runs = _read(study, folder)
    of_arm = {arm.name: runs[runs["arm"] == arm.name] for arm in study.arms}
    records: list[Record] = runs["record"].tolist()
    tokens = {(r.environment.tokenizer_hash, r.environment.data_hash) for r in _started(records)}
    metric: Metric = "val/loss" if len(tokens) < 2 else "val/bits_per_byte"  # nats of other tokens mean something else
    rates = tuple(_learning_rates(name, own) for name, own in of_arm.items() if _is_swept(own))
    judged: Judged = {name: _judged(own)["record"].tolist() for name, own in of_arm.items()}
    losses = {unit: final_losses(judged, unit) for unit in METRICS}
    speed = measured_speed(folder)
    blocks = _blocks(study, judged, losses[metric])
    compared = _comparisons(study, judged, losses, blocks, metric, is_final=True)
    arms = _arm_results(study, judged, metric, compared, speed, is_swept=bool(rates))
    effects = _effects(study, losses[metric]) if study.is_factorial else ()
    tests = _tests(study, compared, effects)
    pairs = tuple(c for pair in _family(study) if (c := compared.get(pair))) if study.compare == "all" else ()
    ranks = _ranks(study, pairs)
    lengths = tuple(found for name, own in judged.items() if (found := _lengths(name, own)))
    verdict, sentences = answer(study, arms, effects, pairs, ranks, lengths, metric, tests)
    scaling = scaled(arms, metric) if study.design == "scaling" else None
    if scaling:
        scales = scaling_sentences(scaling)
        verdict, sentences = scales[0], (*scales, *sentences)
    return Result(
        study=study,
        metric=metric,
        tests=tests,
        verdict=verdict,
        answer=sentences,
        arms=arms,
        curves=tuple(curve for arm in arms for curve in _curves(arm.name, arm.records, metric)),
        front=Front(
            kv_cache=_best_trades(arms, metric, "kv_cache/bytes_per_token", 1),
            throughput=_best_trades(arms, metric, "perf/tokens_per_second", -1),
        ),
        inference=tuple(filter(None, (inference(arm.name, arm.records) for arm in arms))),
        effects=effects,
        learning_rates=rates,
        divergences=tuple(_divergence(run) for run in runs[runs["status"] != "done"].itertuples()),
        lengths=lengths,
        provenance=_provenance(records, judged, study.baseline),
        warnings=(
            *confounds(study, arms, records, rates, speed, trust),
            *cautions(study, arms, metric, blocks.noise() if blocks else {}),
        ),
        notes=(*study.notes, *one_rate(study, records, is_swept=bool(rates))),
        speed=speed,
        difference_curves=_difference_curves(study, judged, losses, metric),
        interactions=_interactions(study, arms, metric) if effects else (),
        telemetry=tuple(filter(None, (telemetry(arm.name, _shown(arm.records)) for arm in arms))),
        pairs=pairs,
        ranks=ranks,
        rankings=rankings(study, arms, pairs, speed, metric),
        records=tuple(records),
        drawings=drawings(study, arms, trust),
        scaling=scaling,
    )


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


# --- learning rates of an arm ---


def _is_swept(runs: pd.DataFrame) -> bool:
    return bool(runs["rate"].nunique() > 1)


def _best_rate(runs: pd.DataFrame) -> float:
    """The rate with the lowest mean loss among those with the most finished seeds; nan if no run finished."""
    losses = runs[runs["status"] == "done"].groupby("rate")["loss"]
    found = losses.agg(["size", "mean"]).sort_values(["size", "mean"], ascending=[False, True])
    return float(found.index[0]) if len(found) else math.nan


def _judged(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that an arm is judged by: all but its tuning runs.

    If learning rates are swept without tuning runs, those at the best rate; all of them if no run finished.
    """
    if runs["tunes"].notna().any():
        return runs[runs["tunes"].isna()]
    best = _best_rate(runs) if _is_swept(runs) else math.nan
    return runs if math.isnan(best) else runs[runs["rate"] == best]


def _learning_rates(arm: str, runs: pd.DataFrame) -> LearningRates:
    best, ended = _best_rate(runs), runs.dropna(subset=["rate", "loss"])
    by_rate = {rate: own["record"].tolist() for rate, own in runs.groupby("rate")}
    by_seed = ended.groupby("tunes")  # the tuning runs of each judged seed that finished or diverged
    tuned = {int(seed): dict(zip(own["rate"], own["loss"], strict=True)) for seed, own in by_seed}
    rates = list(by_rate)
    return LearningRates(
        arm=arm,
        rates=rates,
        loss=[_estimate(records, "val/loss") for records in by_rate.values()],
        diverged=[sum(record.status == "diverged" for record in records) for records in by_rate.values()],
        best=best,
        on_edge=any(map(is_on_edge, tuned.values())) if tuned else best in (rates[0], rates[-1]),
        sensitivity=_sensitivity(ended),
        chosen={seed: best_rate(losses) for seed, losses in tuned.items()},
    )


def _sensitivity(ended: pd.DataFrame) -> float:
    """See LearningRates; nan if no run finished. A diverged run counts with the entropy of token frequencies."""
    if not (ended["status"] == "done").any():
        return math.nan
    entropy = [record.environment.unigram_entropy or math.inf for record in ended["record"]]
    capped = ended["loss"].clip(upper=entropy).groupby(ended["rate"]).mean()
    return float(capped.mean() - capped.min())


# --- arms and comparisons ---


def _arm_results(
    study: Study,
    judged: Judged,
    metric: Metric,
    compared: dict[Pair, Comparison],
    speed: StudySpeed | None,
    is_swept: bool,
) -> tuple[ArmResult, ...]:
    speeds = speed.arms if speed else {}
    finished = {record.seed: record for record in _finished(judged[study.baseline])}
    if study.design == "scaling":  # whose baseline is of another size
        finished = {}
    return tuple(
        ArmResult(
            arm=arm,
            learning_rates=tuple(sorted({r.config[RATE] for r in _started(judged[arm.name]) if RATE in r.config})),
            records=tuple(judged[arm.name]),
            loss=_estimate(judged[arm.name], "val/loss"),
            bits=_estimate(judged[arm.name], "val/bits_per_byte"),
            accuracy=_estimate(judged[arm.name], "val/accuracy"),
            ema=_estimate(judged[arm.name], "val/ema_loss"),
            to_previous=compared.get((arm.name, arm.previous)) if arm.previous else None,
            to_baseline=compared.get((arm.name, study.baseline)) if arm.name != study.baseline else None,
            to_reach=_to_reach(judged[arm.name], metric, finished, speeds.get(arm.name)),
            reach=_reach(judged[arm.name], metric, finished),
            costs=_costs(judged[arm.name], speeds.get(arm.name)),
            difference=_difference(judged[arm.previous or study.baseline], judged[arm.name], is_swept),
        )
        for arm in study.arms
    )


def _started(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.status != MISSING]


def _finished(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.done]


def _estimate(records: Sequence[Record], metric: Metric | Literal["val/accuracy", "val/ema_loss"]) -> Estimate | None:
    found = [record.summary[metric] for record in _finished(records) if metric in record.summary]
    return estimate(found) if found else None


def _difference(
    reference: Sequence[Record], records: Sequence[Record], is_swept: bool
) -> dict[str, tuple[object, object]]:
    ours, theirs = _started(records), _started(reference)
    return different_settings(theirs[0], ours[0], is_swept) if ours and theirs else {}


def _family(study: Study) -> list[Pair]:
    """The pairs that are tested together, as one family: those of the design's question, or all.

    All pairs take their direction from the comparisons to the baseline and to the step before.
    """
    if study.compare != "all":
        return _question(study)
    others = [(later.name, arm.name) for arm, later in combinations(study.arms, 2)]
    return list({frozenset(pair): pair for pair in (*others, *_to_baseline(study), *_question(study))}.values())


def _question(study: Study) -> list[Pair]:
    """The pairs that answer the question of the design."""
    if study.is_factorial:  # its family is that of its effects
        return []
    steps = [(arm.name, arm.previous) for arm in study.arms if arm.previous]
    return steps or _to_baseline(study)


def _to_baseline(study: Study) -> list[Pair]:
    if study.design == "scaling":  # whose arms are compared within one size and budget
        return []
    return [(arm.name, study.baseline) for arm in study.arms if arm.name != study.baseline]


def _ends(study: Study) -> list[Pair]:
    """The last arm of a ladder against its first, a family of its own; empty for a ladder of one step, or all pairs."""
    is_own = study.is_chain and len(study.arms) > 2 and study.compare != "all"
    return [(study.arms[-1].name, study.baseline)] if is_own else []


def _ranks(study: Study, pairs: Sequence[Comparison]) -> dict[str, tuple[int, int]]:
    """See Result.ranks."""
    clear = [(c.change.mean, c.arm, c.against) for c in pairs if c.change.significant]
    differ = [(arm, against) if mean < 0 else (against, arm) for mean, arm, against in clear]
    tested = {name for c in pairs if c.change.is_tested for name in (c.arm, c.against)}
    return rank_intervals([arm.name for arm in study.arms if arm.name in tested], differ)


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
    study: Study, judged: Judged, losses: Table, blocks: Blocks | None, metric: Metric, is_final: bool
) -> dict[Pair, Comparison]:
    """Every arm against the one before it, the baseline and, if asked, all others, unless they share no seed.

    is_final: whether to estimate how many seeds are needed, which takes longer than everything else.
    """
    pairs = [(arm.name, arm.previous) for arm in study.arms if arm.previous]
    pairs += [*_to_baseline(study), *_family(study)]
    found = {pair: c for pair in pairs if (c := _compare(*pair, judged, losses, metric))}
    testable = {pair: c for pair, c in found.items() if not c.untested and c.change.sd > 0}
    family = {pair: testable[pair] for pair in _family(study) if pair in testable}
    if family and blocks:
        contrasts = judge(blocks.fit, np.array([blocks.weights(comparison) for comparison in family.values()]))
        for (pair, comparison), contrast in zip(family.items(), contrasts, strict=True):
            found[pair] = _tested(comparison, contrast, len(family), is_final)
    for pair in _ends(study):
        if pair in testable:  # by their own runs alone, without the arms in between
            found[pair] = _tested(testable[pair], paired_contrast(testable[pair].change), 1, is_final)
    return found


def _compare(arm: str, against: str, judged: Judged, losses: Table, metric: Metric) -> Comparison | None:
    """The comparison over the seeds that both have finished, not yet tested; None without a common seed."""
    columns = {unit: table[[arm, against]].to_numpy() for unit, table in losses.items()}  # (seeds, 2)
    is_pair = ~np.isnan(columns[metric]).any(axis=1)
    seeds = tuple(losses[metric].index[is_pair])
    if not seeds:
        return None
    pairs = (columns[unit][is_pair] for unit in METRICS)
    nats, bits = (describe(pair[:, 0] - pair[:, 1], scale=pair.max()) for pair in pairs)
    texts = {record.environment.data_hash for name in (arm, against) for record in _finished(judged[name])}
    # The mean over the seeds that survive a divergence is biased.
    untested = " and ".join(filter(None, (divergence(name, judged[name]) for name in (arm, against))))
    if len(texts) > 1:
        untested = f"{arm} and {against} were trained on different texts"
    return Comparison(arm, against, seeds, nats if metric == "val/loss" else None, bits, untested=untested)


def _blocks(study: Study, judged: Judged, losses: pd.DataFrame) -> Blocks | None:
    """None if every arm diverged in some run, or none finished.

    What a seed does differs from size to size: in a scaling study only arms of one size and budget share it.
    """
    diverged = [name for name, records in judged.items() if any(r.status == "diverged" for r in records)]
    kept = losses.drop(columns=diverged).dropna(how="all")
    cells = [(kept.columns[arm], kept.index[seed]) for arm, seed in np.argwhere(kept.T.notna().to_numpy())]
    references = {arm.name: arm.previous or arm.name for arm in study.arms}
    strata = [references[name] for name in kept] if study.design == "scaling" else None
    return Blocks(fit_blocked(kept.T.to_numpy(), strata), cells) if cells else None


def _tested(comparison: Comparison, contrast: Contrast, family: int, is_final: bool) -> Comparison:
    """A comparison with the interval and p of its contrast, which is in the unit that arms are judged in."""
    nats, bits = comparison.nats, comparison.bits
    factor = 1.0
    if nats:  # with one tokenizer, the two units differ by a factor
        factor = bits.sd / nats.sd
        nats = nats.with_test(contrast)
    bits = replace(bits, low=factor * contrast.low, high=factor * contrast.high, p=contrast.p)
    found = replace(comparison, nats=nats, bits=bits)
    if found.change.significant or not is_final:
        return found
    return replace(found, seeds_needed=seeds_needed(contrast, len(comparison.seeds), family))


def _tests(study: Study, compared: dict[Pair, Comparison], effects: Sequence[Effect]) -> str:
    """See Result.tests."""
    sizes = [
        sum(pair in compared and compared[pair].change.is_tested for pair in pairs)
        for pairs in (_family(study), _ends(study))
    ]
    known_effects = sum(effect.change.is_tested for effect in effects)
    noun, to = ("step" if study.is_chain else "comparison"), ""
    if not any(arm.previous for arm in study.arms):
        to = " to the baseline"
    if study.compare == "all":
        noun, to = "pair", " of arms"
    families = [f"max-t over the {count(sizes[0], noun)}{to}"] if sizes[0] else []
    families += [f"max-t over the {count(known_effects, 'effect')}"] if known_effects else []
    families += ["a paired t-test of the last arm against the first"] if sizes[1] else []
    return " and, on its own, ".join(families) or "none"


def _reaches(record: Record, metric: Metric, baseline: Record, axis: str = "tokens") -> float | None:
    """The tokens (or seconds) of training at which a run first has the baseline's final loss; None if it never has."""
    rows = [row for row in record.metrics if metric in row and row["step"]]  # step 0: what a warm start begins with
    return first_reach([row[axis] for row in rows], [row[metric] for row in rows], baseline.summary[metric])


def _to_reach(
    records: Sequence[Record], metric: Metric, baseline: Mapping[int, Record], speed: ArmSpeed | None
) -> dict[str, float]:
    """See ArmResult.to_reach; baseline: its finished runs by seed.

    Seconds follow from the speed that was measured side by side, or else are those that the runs logged.
    """
    reached = []
    for record in (record for record in records if record.seed in baseline):
        tokens, seconds = (_reaches(record, metric, baseline[record.seed], axis) for axis in ("tokens", "seconds"))
        if tokens is None or seconds is None:
            return {}
        if speed:
            seconds = tokens / speed.costs["perf/tokens_per_second"]
        reached.append({"tokens": tokens, "flops": tokens * record.costs["train_flops_per_token"], "seconds": seconds})
    return {key: fmean([one[key] for one in reached]) for key in reached[0]} if reached else {}


def _reach(records: Sequence[Record], metric: Metric, baseline: Mapping[int, Record]) -> Reach | None:
    """None without curves, or without a seed that both have finished."""
    ratios, censored = {}, set()
    for record in (record for record in _finished(records) if record.seed in baseline):
        own, whole = (_reaches(one, metric, baseline[record.seed]) for one in (record, baseline[record.seed]))
        evaluated = [row["tokens"] for row in record.metrics if metric in row]
        if evaluated and whole:
            ratios[record.seed] = (evaluated[-1] if own is None else own) / whole
            censored |= {record.seed} if own is None else set()
    if not ratios:
        return None
    return Reach(ratios, frozenset(censored), None if censored else geometric_mean([*ratios.values()]))


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


def _logged(records: Sequence[Record], *metrics: str) -> pd.DataFrame:
    """The rows of metrics.csv that have these metrics, with `arm` and `seed`, at the tokens that all runs share."""
    columns = ["tokens", "seconds", *metrics]
    tables = [
        pd.DataFrame(record.metrics, columns=columns).dropna().assign(arm=record.arm, seed=record.seed, run=i)
        for i, record in enumerate(records)
    ]
    rows = pd.concat(tables).drop_duplicates(["run", "tokens"], keep="last")
    return rows[rows.groupby("tokens")["run"].transform("size") == len(records)]


def _curves(arm: str, records: Sequence[Record], metric: Metric) -> Iterator[Curve]:
    """The curves of the finished runs, or, if none finished, of the others up to the first one's end.

    The training loss is left out if arms are judged in bits per byte.
    """
    shown = _shown(records)
    drawn: tuple[CurveMetric, ...] = (metric, "train/loss") if metric == "val/loss" else (metric,)
    for one in drawn if shown else ():
        rows = _logged(shown, one).groupby("tokens")
        points = rows.agg(seconds=("seconds", "mean"), mean=(one, "mean"), low=(one, "min"), high=(one, "max"))
        points = points.loc[_thin(list(points.index), MAX_POINTS)]
        tokens = points.index.tolist()
        flops = [n * shown[0].costs["train_flops_per_token"] for n in tokens]
        if tokens:
            yield Curve(arm, one, tokens, flops, **{name: points[name].tolist() for name in points})


def _shown(records: Sequence[Record]) -> list[Record]:
    """The finished runs, or, if none finished, those that logged anything."""
    return _finished(records) or [record for record in records if record.metrics]


def _thin(xs: list[float], most: int) -> list[float]:
    """At most `most` of xs, evenly spaced and ending in the last."""
    stride = math.ceil(len(xs) / most)
    return xs[::-1][::stride][::-1] if xs else xs


def _difference_curves(study: Study, judged: Judged, final: Table, metric: Metric) -> tuple[DifferenceCurve, ...]:
    """The family of comparisons, or of effects, at every evaluation that all finished runs share.

    Each evaluation is tested exactly as the final losses are. If all runs have one length, the curves end in those.
    """
    finished = [record for records in judged.values() for record in _finished(records)]
    if not finished:
        return ()
    rows = _logged(finished, *METRICS)
    at = dict(list(rows.groupby("tokens")))
    ends = {record.summary["tokens"] for record in finished}
    if len(ends) == 1:
        at = {tokens: of_all for tokens, of_all in at.items() if tokens < min(ends)} | dict.fromkeys(ends)
    points: dict[Pair, list[tuple[float, PairedDifference]]] = {}
    for tokens in _thin(list(at), MAX_JUDGED):
        losses = final
        if (then := at[tokens]) is not None:
            tables = {unit: then.pivot_table(unit, "seed", "arm", aggfunc="last") for unit in METRICS}
            losses = {unit: table.reindex(columns=list(judged)) for unit, table in tables.items()}
        if study.is_factorial:
            found = {(effect.name, ""): effect.change for effect in _effects(study, losses[metric])}
        else:
            blocks = _blocks(study, judged, losses[metric])
            compared = _comparisons(study, judged, losses, blocks, metric, is_final=False)
            found = {pair: compared[pair].change for pair in _question(study) if pair in compared}
        for pair, difference in found.items():
            points.setdefault(pair, []).append((tokens, difference))
    return tuple(
        DifferenceCurve(*pair, *map(list, zip(*((x, d.mean, d.low, d.high) for x, d in own), strict=True)))
        for pair, own in points.items()
    )


def _interactions(study: Study, arms: Sequence[ArmResult], metric: Metric) -> tuple[Interaction, ...]:
    """For each pair of axes all of whose combinations were run, over the seeds that all arms have finished."""
    means = common_losses(arms, metric).mean()
    axes = pd.DataFrame({arm.name: arm.axes for arm in study.arms}).T
    varied = {axis: options for axis, options in _options(study).items() if len(options) > 1}
    found = []
    for pair in combinations(varied, 2):
        levels = varied[pair[0]], varied[pair[1]]
        cells = means.groupby([axes[axis] for axis in pair]).mean().reindex(list(product(*levels)))
        if cells.notna().all():
            rows = cells.to_numpy(dtype=float).reshape(len(levels[0]), len(levels[1]))
            found.append(Interaction(pair, levels, tuple(map(tuple, rows.tolist()))))
    return tuple(found)


def _best_trades(arms: Sequence[ArmResult], metric: Metric, cost: str, sign: int) -> tuple[str, ...]:
    """The arms on the front of loss, over common seeds, and cost; sign -1 for a cost of which more is better."""
    means = common_losses(arms, metric).mean().dropna()
    costs = {arm.name: sign * arm.costs[cost] for arm in arms if cost in arm.costs and arm.name in means}
    on_front = pareto_front(list(costs.values()), [means[name] for name in costs])
    return tuple(name for name, is_on in zip(costs, on_front, strict=True) if is_on)


def _effects(study: Study, losses: pd.DataFrame) -> tuple[Effect, ...]:
    """The effects of a factorial, from the options of the baseline."""
    runs = [(arm.axes, seed, loss) for arm in study.arms for seed, loss in losses[arm.name].dropna().items()]
    if not runs:
        return ()
    return tuple(factorial_effects(_options(study), *map(list, zip(*runs, strict=True))))


def _options(study: Study) -> dict[str, tuple[str, ...]]:
    """The options of each axis, the baseline's first."""
    arms = sorted(study.arms, key=lambda arm: arm.name != study.baseline)
    return {axis: tuple(dict.fromkeys(arm.axes[axis] for arm in arms)) for axis in arms[0].axes}


def _divergence(run: Any) -> Divergence:
    tokens = max((row["tokens"] for row in run.record.metrics), default=0.0)
    rate, is_tuning = (None if math.isnan(run.rate) else run.rate), not math.isnan(run.tunes)
    return Divergence(run.arm, run.record.seed, run.status, tokens, run.record.message, rate, is_tuning)


def _lengths(arm: str, records: Sequence[Record]) -> Lengths | None:
    """The losses at the lengths that all evaluated runs share, the trained one first; None without any."""
    evaluated = [record.evaluation.lengths for record in _finished(records) if record.evaluation.lengths]
    runs = [pd.DataFrame(lengths).assign(run=i) for i, lengths in enumerate(evaluated)]
    by_length = pd.concat(runs).groupby("length", sort=False) if runs else ()
    shared = {int(n): entries.set_index("run") for n, entries in by_length if len(entries) == len(runs)}
    if not shared:
        return None
    trained = next(iter(shared))
    losses = pd.DataFrame({n: entries["loss"] for n, entries in shared.items()}, dtype=float)  # (runs, lengths)
    pairs = {n: losses[n].to_frame("longer").assign(trained=losses[trained]).dropna() for n in losses}
    buckets = {n: entries[entries["losses"].astype(bool)] for n, entries in shared.items()}
    return Lengths(
        arm=arm,
        trained=trained,
        lengths=list(shared),
        loss=[estimate(known) if len(known := losses[n].dropna()) else None for n in losses],
        by_position={
            n: (np.mean(own["positions"].tolist(), axis=0).tolist(), np.mean(own["losses"].tolist(), axis=0).tolist())
            for n, own in buckets.items()
            if len(own)
        },
        changes=[paired_difference(pair["longer"], pair["trained"]) if len(pair) else None for pair in pairs.values()],
    )


def _provenance(records: Sequence[Record], judged: Judged, baseline: str) -> Provenance:
    facts = pd.DataFrame([environment(record.environment) for record in _started(records)])
    first = next(iter(_started(judged[baseline])), None)
    return Provenance(
        seeds=tuple(sorted({record.seed for own in judged.values() for record in own})),
        environment={name: facts[name].value_counts(sort=False).to_dict() for name in facts},
        baseline_config=(first.path / "resolved.yaml").read_text() if first else "",
    )
