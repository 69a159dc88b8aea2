"""The statistics of paired runs. SciPy's and statsmodels' tests under the names that the report uses."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 10_000
ROUNDING = 1e-13  # of a difference, relative to what it is between
EFFECT_TEST = "t-test over seeds of the effect within each seed"

Columns = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with the 95% confidence interval by Student's t; sd, low and high are nan for one seed."""

    n: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference over pairs, its 95% confidence interval and the paired t-test's two-sided p.

    sd: of the differences; nan for one pair. low, high and p are nan for one pair, and where all differences are equal:
    a spread of exactly zero is that of runs that are copies of each other, and no evidence.
    """

    n: int
    mean: float
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


@dataclass(frozen=True)
class Effect:
    """A main effect or an interaction of a factorial study: the mean over seeds of what it is within each seed.

    low, high, p: of the t-test over seeds, as for a PairedDifference. axes: one name for a main effect, two for an
    interaction. mean: change of the loss as the axis goes from the base's option to the target's, averaged over all
    settings of the others; for an interaction, half the change of one effect as the other axis goes over. aliases:
    interactions that a fraction cannot tell from it.
    """

    axes: tuple[str, ...]
    mean: float
    low: float
    high: float
    p: float
    corrected_p: float
    aliases: tuple[tuple[str, ...], ...] = ()


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value, with its t interval."""
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return Estimate(1, mean, math.nan, math.nan, math.nan)
    sd = float(np.std(values, ddof=1))
    if sd == 0:  # SciPy's interval of no width is nan
        return Estimate(n, mean, 0.0, mean, mean)
    low, high = stats.t.interval(1 - LEVEL, n - 1, mean, sd / math.sqrt(n))
    return Estimate(n, mean, sd, float(low), float(high))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> PairedDifference:
    """values minus reference, pair by pair; at least one pair."""
    return _mean_difference(np.subtract(values, reference), scale=max(map(abs, (*values, *reference))))


def _mean_difference(differences: Columns, scale: float) -> PairedDifference:
    """The t-test of differences against zero. scale: of the values that they are between, for what rounding makes."""
    n, mean = len(differences), float(differences.mean())
    if n == 1:
        return PairedDifference(1, mean)
    sd, rounding = float(differences.std(ddof=1)), ROUNDING * scale
    if sd <= rounding:
        return PairedDifference(n, mean if abs(mean) > rounding else 0.0, 0.0)
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(1 - LEVEL)
    return PairedDifference(n, mean, sd, float(interval.low), float(interval.high), float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p of each; nan stays nan, and does not count as a comparison."""
    p = np.array(p_values, dtype=float)
    known = ~np.isnan(p)
    if known.any():
        p[known] = multipletests(p[known], LEVEL, "holm")[1]
    return [float(corrected) for corrected in p]


def seeds_needed(mean: float, sd: float, level: float = LEVEL) -> int | None:
    """How many pairs a paired two-sided t-test needs for 80% power, if differences are like those seen.

    level: of the test; for one of m comparisons that are corrected together, 0.05 / m. None if more than 10,000, or if
    mean or sd tell nothing, as a spread of exactly zero.
    """
    if math.isnan(mean) or math.isnan(sd) or mean == 0 or sd == 0:
        return None
    effect = abs(mean) / sd
    few, test = range(2, MOST_SEEDS + 1), TTestPower()

    def enough(n: int) -> bool:
        # One tail at half the level: of two, SciPy's share of the other one is nan where it is tiny.
        power = float(test.power(effect, n, level / 2, alternative="larger"))
        return power >= POWER or math.isnan(power)  # nan only for more than seven seeds and a power next to 1

    index = bisect_left(few, True, key=enough)  # power grows with n, and a search by halves cannot fail to converge
    return few[index] if index < len(few) else None


def factorial_effects(levels: Sequence[dict[str, int]], seeds: Sequence[int], values: Sequence[float]) -> list[Effect]:
    """Main effects and pairwise interactions: t-tests over seeds of each effect within a seed, by least squares.

    levels, seeds, values: an entry of each per run; levels are -1 or +1 for each axis. A seed whose runs cannot tell an
    effect from the others is left out of it. What the design cannot tell apart is reported once, a main effect before
    an interaction, with the others as its aliases; what never varies, or no seed can estimate, is left out.
    Interactions of three axes and more count as none. Holm's correction is over all effects.
    """
    blocks = np.array([[float(seed == block) for block in sorted(set(seeds))] for seed in seeds])
    columns = _term_columns(levels)
    kept, aliases = _estimable(blocks, columns)
    design = np.column_stack([*(columns[term] for term in kept), np.ones(len(seeds))])
    losses = np.asarray(values, dtype=float)
    within = np.array([_within(design[block > 0], losses[block > 0]) for block in blocks.T])  # (seeds, terms)
    scale = float(np.abs(losses).max())
    found = {
        term: _mean_difference(known, scale)
        for term, of_seeds in zip(kept, within.T, strict=False)  # the last one is the intercept
        if (known := of_seeds[~np.isnan(of_seeds)]).size
    }
    corrected = holm([effect.p for effect in found.values()])
    return [
        Effect(term, effect.mean, effect.low, effect.high, effect.p, corrected_p, tuple(aliases[term]))
        for (term, effect), corrected_p in zip(found.items(), corrected, strict=True)
    ]


def _within(design: Columns, losses: Columns) -> Columns:
    """The change from -1 to +1 of each column, by least squares over one seed's runs; nan where they do not tell it."""
    inverse = np.linalg.pinv(design)
    is_told = np.isclose(np.diag(inverse @ design), 1)  # what the runs cannot tell apart shares its weight
    return np.where(is_told, 2 * (inverse @ losses), math.nan)


Term = tuple[str, ...]


def _term_columns(levels: Sequence[dict[str, int]]) -> dict[Term, Columns]:
    """The column of each main effect, then of each pairwise interaction."""
    axes = list(levels[0])
    terms: list[Term] = [*((axis,) for axis in axes), *combinations(axes, 2)]
    return {term: np.array([math.prod(run[axis] for axis in term) for run in levels], dtype=float) for term in terms}


def _estimable(blocks: Columns, columns: dict[Term, Columns]) -> tuple[list[Term], dict[Term, list[Term]]]:
    """The terms that can be told apart, in order of preference, and for each those that cannot be told from it."""
    kept: list[Term] = []
    aliases: dict[Term, list[Term]] = {}
    design = blocks
    for term, column in columns.items():
        weights, *_ = np.linalg.lstsq(design, column)
        if not np.allclose(design @ weights, column):
            design = np.column_stack([design, column])
            kept.append(term)
            aliases[term] = []
            continue
        for alias, weight in zip(kept, weights[blocks.shape[1] :], strict=True):
            if abs(weight) > 1e-9:
                aliases[alias].append(term)
    return kept, aliases


def pareto_front(costs: Sequence[float], losses: Sequence[float]) -> list[bool]:
    """Whether no other point is at least as good in both, lower being better, and better in one; ties stay."""
    points = list(zip(costs, losses, strict=True))
    return [
        not any(other[0] <= cost and other[1] <= loss and other != (cost, loss) for other in points)
        for cost, loss in points
    ]


def first_reach(xs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The x at which a curve first comes down to `target`, linear between its points; None if it never does."""
    points = list(zip(xs, losses, strict=True))
    if points and points[0][1] <= target:
        return points[0][0]
    for (x, loss), (next_x, next_loss) in pairwise(points):
        if next_loss <= target:
            return x + (next_x - x) * (loss - target) / (loss - next_loss)
    return None
