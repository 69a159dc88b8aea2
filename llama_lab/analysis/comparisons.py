"""Comparisons of arms by their losses: which pairs are tested together, and their intervals and p-values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pandas as pd

from llama_lab.data.objectives import targets_of
from llama_lab.runs.record import Record, finished
from llama_lab.runs.study import Pair, Study
from llama_lab.util.formatting import conjoin, count

from .documents import over_documents
from .result import BITS, Comparison, Interaction, Loss, Result, common_losses, final_losses
from .sentences import divergence
from .statistics import Effect, PairedDifference, contrast_name, describe, factorial_effects, judge, seeds_needed

NO_LEVEL_LEFT = "seeds were added after a report that spent the whole level of 5%"
Judged = Mapping[str, Sequence[Record]]  # the runs that each arm is judged by
Table = Mapping[Loss, pd.DataFrame]  # of `final_losses`


def compare_arms(study: Study, judged: Judged, losses: Table, metric: Loss, is_final: bool) -> dict[Pair, Comparison]:
    """Every arm against the one before it, the baseline and, if asked, all others, unless they share no seed.

    is_final: whether to estimate how many seeds are needed, which takes longer than everything else.
    """
    pairs = [*study.steps, *study.to_baseline, *study.family]
    found = {pair: c for pair in pairs if (c := _compare(*pair, judged, losses, metric))}
    shares = {pair: study.level_share(len(c.seeds)) for pair, c in found.items()}
    for pair, c in found.items():
        if shares[pair] == 0:
            found[pair] = replace(c, untested=c.untested or NO_LEVEL_LEFT)
    testable = {pair for pair, c in found.items() if not c.untested and c.change.sd > 0}
    tested = [pair for pair in dict.fromkeys((*study.family, *study.ends)) if pair in testable]
    tests = judge_pairs(losses[metric], tested, [shares[pair] for pair in tested])
    for pair, test in zip(tested, tests, strict=True):
        c = found[pair]
        # With one tokenizer, the two units differ by a factor.
        bits = c.bits and c.bits.with_test(test, c.bits.sd / c.change.sd)
        c = replace(c, nats=c.nats and c.nats.with_test(test), bits=bits)
        is_needed = is_final and test.mean and not test.significant
        found[pair] = replace(c, seeds_needed=seeds_needed(test, len(tested) / shares[pair])) if is_needed else c
    return found


def judge_pairs(table: pd.DataFrame, pairs: Sequence[Pair], shares: Sequence[float] = ()) -> list[PairedDifference]:
    """Test the differences between columns as one family, each over the rows that both have. shares: see `judge`."""
    samples = [(table[arm] - table[against]).dropna().to_numpy() for arm, against in pairs]
    signs = np.array([[(name == arm) - (name == against) for name in table] for arm, against in pairs])
    return judge(samples, signs @ signs.T / 2, shares) if pairs else []


def _compare(arm: str, against: str, judged: Judged, losses: Table, metric: Loss) -> Comparison | None:
    """The comparison over the seeds that both have finished, not yet tested; None without a common seed."""
    columns = {unit: np.column_stack([t[arm], t[against]]) for unit, t in losses.items()}  # (seeds, 2)
    is_pair = ~np.isnan(columns[metric]).any(axis=1)
    seeds = tuple(losses[metric].index[is_pair])
    if not seeds:
        return None
    pairs = {unit: column[is_pair] for unit, column in columns.items()}
    changes = {unit: describe(pair[:, 0] - pair[:, 1], scale=pair.max()) for unit, pair in pairs.items()}
    texts = {record.environment.data_hash for name in (arm, against) for record in finished(judged[name])}
    # The mean over the seeds that survive a divergence is biased.
    untested = " and ".join(filter(None, (divergence(name, judged[name]) for name in (arm, against))))
    kinds = sorted({targets_of(record.config) for name in (arm, against) for record in finished(judged[name])})
    if len(kinds) > 1:
        untested = f"losses of {conjoin(kinds)} do not compare"
    if len(texts) > 1:
        untested = f"{arm} and {against} were trained on different texts"
    nats = changes[metric] if metric != BITS else None
    others = over_documents(judged[arm], judged[against]) if metric == "val/loss" else None
    return Comparison(arm, against, seeds, nats, changes.get(BITS), untested=untested, over_documents=others)


def noise(result: Result) -> dict[str, float]:
    """Each arm's standard deviation over the typical one; empty for fewer than three arms. See `deviations`."""
    spread = deviations(result).std()
    spread = spread[spread > 0]
    return dict(spread / spread.median()) if len(spread) > 2 else {}


def in_two_groups(result: Result) -> dict[str, list[float]]:
    """The sorted losses of each arm whose seeds fall into two groups, whose mean describes neither.

    The gap between them is wider than three times either group, and than five typical standard deviations. See
    `deviations`; empty for fewer than three arms or seeds.
    """
    found = deviations(result)
    typical = found.std().median()
    apart = {}
    for name, column in found.items() if len(found.columns) > 2 else ():
        values = np.sort(column.dropna())
        gaps = np.diff(values)
        if len(gaps) < 2:
            continue
        place = int(gaps.argmax())
        widest = max(np.ptp(values[: place + 1]), np.ptp(values[place + 1 :]))
        if gaps[place] > max(3 * widest, 5 * typical):
            arm = next(arm for arm in result.arms if arm.name == name)
            apart[arm.name] = sorted(record.summary[result.metric] for record in finished(arm.records))
    return apart


def deviations(result: Result) -> pd.DataFrame:
    """Each run's loss minus the median arm's of its size at its seed, (seeds, arms); without arms that diverged."""
    arms = {arm.name: arm for arm in result.arms if all(record.status != "diverged" for record in arm.records)}
    kept = final_losses({name: arm.records for name, arm in arms.items()}, result.metric)
    strata = [(arms[name].arm.previous or name) if result.scaling else "" for name in kept]
    return (kept.T - kept.T.groupby(strata).transform("median")).T


def describe_tests(study: Study, compared: dict[Pair, Comparison], effects: Sequence[Effect]) -> str:
    """See Result.tests."""
    of_family, of_ends = (
        sum(pair in compared and compared[pair].change.is_tested for pair in pairs)
        for pairs in (study.family, study.ends)
    )
    of_effects = sum(effect.change.is_tested for effect in effects)
    noun, to = "step" if study.is_chain else "comparison", "" if study.steps else " to the baseline"
    if study.compare == "all":
        noun, to = "pair", " of arms"
    tested = [f"the {count(of_family, noun)}{to}"] if of_family else []
    tested += [f"the {count(of_effects, 'effect')}"] if of_effects else []
    first = "the first" if study.baseline == study.arms[0].name else study.baseline
    tested += [f"the last arm against {first}"] if of_ends else []
    if of_family + of_effects + of_ends == 1:
        return "a paired t-test"
    return f"moderated paired tests of {' and '.join(tested)}" if tested else "none"


def effects_of(study: Study, judged: Judged, losses: pd.DataFrame) -> tuple[Effect, ...]:
    """The effects of a factorial, from the options of the baseline; not tested where an arm diverged."""
    runs = [(arm.axes, seed, loss) for arm in study.arms for seed, loss in losses[arm.name].dropna().items()]
    if not runs:
        return ()
    levels, seeds, values = map(list, zip(*runs, strict=True))
    effects = factorial_effects(_options(study), levels, seeds, values, study.level_share)
    if any(divergence(name, records) for name, records in judged.items()):
        untested = [PairedDifference(one.change.n, one.change.mean, one.change.sd) for one in effects]
        effects = [replace(one, change=change) for one, change in zip(effects, untested, strict=True)]
    return tuple(effects)


def interactions_of(result: Result) -> tuple[Interaction, ...]:
    """For each pair of axes all of whose combinations were run, over the seeds that all arms have finished."""
    means = common_losses(result.arms, result.metric).mean()
    axes = pd.DataFrame({arm.name: arm.arm.axes for arm in result.arms}).T
    options, changes = _options(result.study), {effect.axes: effect.change for effect in result.effects}
    varied = {axis: known for axis, known in options.items() if len(known) > 1}
    found = []
    for pair in combinations(varied, 2):
        levels = varied[pair[0]], varied[pair[1]]
        cells = means.groupby([axes[axis] for axis in pair]).mean().reindex(list(product(*levels)))
        if cells.notna().all():
            rows = cells.to_numpy(dtype=float).reshape(len(levels[0]), len(levels[1]))
            first, second = ([contrast_name(options, axis, option) for option in varied[axis]] for axis in pair)
            tested = tuple(
                tuple(changes.get((one, other)) if i and j else None for j, other in enumerate(second))
                for i, one in enumerate(first)
            )
            found.append(Interaction(pair, levels, tuple(map(tuple, rows.tolist())), tested))
    return tuple(found)


def _options(study: Study) -> dict[str, tuple[str, ...]]:
    """The options of each axis, the baseline's first."""
    arms = sorted(study.arms, key=lambda arm: arm.name != study.baseline)
    return {axis: tuple(dict.fromkeys(arm.axes[axis] for arm in arms)) for axis in arms[0].axes}
