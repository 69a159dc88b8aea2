"""Comparisons of arms by their losses: which pairs are tested together, and their intervals and p-values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pandas as pd

from llama_lab.runs.record import Record, finished
from llama_lab.runs.study import Study
from llama_lab.util.formatting import count

from .result import METRICS, ArmResult, Comparison, Interaction, Metric, Result, common_losses, final_losses
from .sentences import divergence
from .statistics import Contrast, Effect, describe, factorial_effects, judge, seeds_needed

Judged = Mapping[str, Sequence[Record]]  # the runs that each arm is judged by
Table = Mapping[Metric, pd.DataFrame]  # of `final_losses`
Pair = tuple[str, str]  # an arm and its reference


def compare_arms(study: Study, judged: Judged, losses: Table, metric: Metric, is_final: bool) -> dict[Pair, Comparison]:
    """Every arm against the one before it, the baseline and, if asked, all others, unless they share no seed.

    is_final: whether to estimate how many seeds are needed, which takes longer than everything else.
    """
    pairs = [(arm.name, arm.previous) for arm in study.arms if arm.previous]
    pairs += [*_to_baseline(study), *family(study)]
    found = {pair: c for pair in pairs if (c := _compare(*pair, judged, losses, metric))}
    testable = {pair: c for pair, c in found.items() if not c.untested and c.change.sd > 0}
    tested = {pair: testable[pair] for pair in (*family(study), *ends(study)) if pair in testable}
    if tested:
        table = losses[metric]
        samples = [(table[arm] - table[against]).dropna().to_numpy() for arm, against in tested]
        signs = np.array([[(name == arm) - (name == against) for name in table] for arm, against in tested])
        for (pair, comparison), contrast in zip(tested.items(), judge(samples, signs @ signs.T / 2), strict=True):
            found[pair] = _tested(comparison, contrast, len(tested), is_final)
    return found


def _compare(arm: str, against: str, judged: Judged, losses: Table, metric: Metric) -> Comparison | None:
    """The comparison over the seeds that both have finished, not yet tested; None without a common seed."""
    columns = {unit: np.column_stack([t[arm], t[against]]) for unit, t in losses.items()}  # (seeds, 2)
    is_pair = ~np.isnan(columns[metric]).any(axis=1)
    seeds = tuple(losses[metric].index[is_pair])
    if not seeds:
        return None
    pairs = (columns[unit][is_pair] for unit in METRICS)
    nats, bits = (describe(pair[:, 0] - pair[:, 1], scale=pair.max()) for pair in pairs)
    texts = {record.environment.data_hash for name in (arm, against) for record in finished(judged[name])}
    # The mean over the seeds that survive a divergence is biased.
    untested = " and ".join(filter(None, (divergence(name, judged[name]) for name in (arm, against))))
    if len(texts) > 1:
        untested = f"{arm} and {against} were trained on different texts"
    return Comparison(arm, against, seeds, nats if metric == "val/loss" else None, bits, untested=untested)


def noise(result: Result) -> dict[str, float]:
    """Each arm's standard deviation over the typical one, beyond what the median arm of its size does at each seed.

    Without arms that diverged; empty for fewer than three arms.
    """
    arms = {arm.name: arm for arm in result.arms if all(record.status != "diverged" for record in arm.records)}
    kept = final_losses({name: arm.records for name, arm in arms.items()}, result.metric)
    strata = [(arms[name].arm.previous or name) if result.scaling else "" for name in kept]
    spread = (kept.T - kept.T.groupby(strata).transform("median")).T.std()
    spread = spread[spread > 0]
    return dict(spread / spread.median()) if len(spread) > 2 else {}


def _tested(comparison: Comparison, contrast: Contrast, family: int, is_final: bool) -> Comparison:
    """A comparison with the interval and p of its contrast, which is in the unit that arms are judged in."""
    nats, bits = comparison.nats, comparison.bits
    factor = 1.0
    if nats:  # with one tokenizer, the two units differ by a factor
        factor = bits.sd / nats.sd
        nats = nats.with_test(contrast)
    bits = replace(bits, low=factor * contrast.low, high=factor * contrast.high, p=contrast.p)
    found = replace(comparison, nats=nats, bits=bits)
    if found.change.significant or not contrast.mean or not is_final:
        return found
    return replace(found, seeds_needed=seeds_needed(contrast, len(comparison.seeds), family))


def family(study: Study) -> list[Pair]:
    """The pairs that are tested together, as one family: those of the design's question, or all.

    All pairs take their direction from the comparisons to the baseline and to the step before.
    """
    if study.compare != "all":
        return question(study)
    others = [(later.name, arm.name) for arm, later in combinations(study.arms, 2)]
    return list({frozenset(pair): pair for pair in (*others, *_to_baseline(study), *question(study))}.values())


def question(study: Study) -> list[Pair]:
    """The pairs that answer the question of the design."""
    if study.is_factorial:  # its family is that of its effects
        return []
    steps = [(arm.name, arm.previous) for arm in study.arms if arm.previous]
    return steps or _to_baseline(study)


def _to_baseline(study: Study) -> list[Pair]:
    if study.design == "scaling":  # whose arms are compared within one size and budget
        return []
    return [(arm.name, study.baseline) for arm in study.arms if arm.name != study.baseline]


def ends(study: Study) -> list[Pair]:
    """The last arm of a ladder against its first; empty for a ladder of one step, or all pairs."""
    is_asked = study.is_chain and len(study.arms) > 2 and study.compare != "all"
    return [(study.arms[-1].name, study.baseline)] if is_asked else []


def describe_tests(study: Study, compared: dict[Pair, Comparison], effects: Sequence[Effect]) -> str:
    """See Result.tests."""
    sizes = [
        sum(pair in compared and compared[pair].change.is_tested for pair in pairs)
        for pairs in (family(study), ends(study))
    ]
    known_effects = sum(effect.change.is_tested for effect in effects)
    noun, to = ("step" if study.is_chain else "comparison"), ""
    if not any(arm.previous for arm in study.arms):
        to = " to the baseline"
    if study.compare == "all":
        noun, to = "pair", " of arms"
    tested = [f"the {count(sizes[0], noun)}{to}"] if sizes[0] else []
    tested += [f"the {count(known_effects, 'effect')}"] if known_effects else []
    tested += ["the last arm against the first"] if sizes[1] else []
    return f"moderated paired tests of {' and '.join(tested)}" if tested else "none"


def effects_of(study: Study, losses: pd.DataFrame) -> tuple[Effect, ...]:
    """The effects of a factorial, from the options of the baseline."""
    runs = [(arm.axes, seed, loss) for arm in study.arms for seed, loss in losses[arm.name].dropna().items()]
    if not runs:
        return ()
    return tuple(factorial_effects(_options(study), *map(list, zip(*runs, strict=True))))


def interactions_of(study: Study, arms: Sequence[ArmResult], metric: Metric) -> tuple[Interaction, ...]:
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


def _options(study: Study) -> dict[str, tuple[str, ...]]:
    """The options of each axis, the baseline's first."""
    arms = sorted(study.arms, key=lambda arm: arm.name != study.baseline)
    return {axis: tuple(dict.fromkeys(arm.axes[axis] for arm in arms)) for axis in arms[0].axes}
