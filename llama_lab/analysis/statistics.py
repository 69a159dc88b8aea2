"""The statistics of a study: arms that share seeds, tested together. docs/statistics.md has their error rates."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import chdtr, ndtr, stdtr, stdtrit

from llama_lab.util.formatting import with_interval

from .power import LEVEL, POWER, power_of

MOST_SEEDS = 10_000
ROUNDING = 1e-13  # error of a difference, relative to its operands
TINY = 1e-300
STEP = 0.25  # of the grid of log standard deviations
NOISE_RATIOS = (4, 6, 8, 10, 12, 16, 20)  # of noisy to quiet contrasts, in steps: 2.7 to 150
NOISY_SHARES = (0.125, 0.25, 0.5, 0.75)
SPREADS = (0.1, 0.3)  # of log standard deviations of one kind
OUTLIERS = 0.01

Columns = npt.NDArray[np.float64]
SeedRange = tuple[int | None, int | None]  # None: more than MOST_SEEDS
Term = tuple[str, ...]  # the axes of an effect


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% confidence interval by Student's t; sd, low and high are nan for one seed."""

    n: int
    mean: float
    sd: float = math.nan
    low: float = math.nan
    high: float = math.nan

    is_difference: ClassVar[bool] = False  # is shown with a sign

    @property
    def text(self) -> str:
        """`3.71 [3.60, 3.82]`; the mean alone without an interval."""
        return self.shown()

    def shown(self, digits: int | None = None) -> str:
        """The `text` with so many decimals; default: those of its own interval."""
        return with_interval(self.mean, self.low, self.high, self.is_difference, digits)


@dataclass(frozen=True)
class PairedDifference(Estimate):
    """The mean difference over pairs, with its 95% interval and the two-sided p that agrees with it.

    sd: standard deviation of the differences; nan for one pair. low, high, p: from the paired t-test, or, simultaneous
    and adjusted, from a family (see `judge`); nan if untested, which one pair and equal differences always are: runs
    with a spread of exactly zero are copies of each other, and no evidence. plain_p: of paired t-tests, adjusted by
    Holm's method; nan likewise. error, df: standard error and degrees of freedom of the test.
    """

    p: float = math.nan
    plain_p: float = math.nan
    error: float = math.nan
    df: float = math.nan

    is_difference: ClassVar[bool] = True

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; the mean twice without one."""
        return (self.low, self.high) if math.isfinite(self.high - self.low) else (self.mean, self.mean)

    @property
    def is_tested(self) -> bool:
        """Whether it has a p."""
        return not math.isnan(self.p)

    @property
    def significant(self) -> bool:
        """Whether p is below 5%: the interval excludes zero."""
        return self.p < LEVEL

    @property
    def verdict(self) -> str:
        """`lower` or `higher` if significant, else `not significant` or `not tested`."""
        if not self.is_tested:
            return "not tested"
        return "not significant" if not self.significant else "lower" if self.mean < 0 else "higher"

    def is_undecided(self, margin: float) -> bool:
        """Whether it is tested, and its interval is neither within the margin nor beyond it."""
        is_within = max(-self.low, self.high) < margin
        is_beyond = max(self.low, -self.high) > margin
        return self.is_tested and not (is_within or is_beyond)

    def with_test(self, test: "PairedDifference", unit: float = 1.0) -> Self:
        """This difference with the interval and p of a test whose values are in such units."""
        low, high, error = (float(unit * value) for value in (test.low, test.high, test.error))
        return replace(self, low=low, high=high, p=test.p, plain_p=test.plain_p, error=error, df=test.df)


@dataclass(frozen=True)
class Effect:
    """A main effect or an interaction of a factorial study: the mean over seeds of the effect within each seed.

    axes: one name for a main effect, two for an interaction: of the axis, or, where some axis has more than two
    options, `axis=option`. change: with the interval and p of the family of all effects; its mean is the change of the
    loss from the first option of the axis to this one, averaged over all settings of the other axes, or, for an
    interaction, half the change of one effect from the first option of the other axis to this one. aliases:
    interactions that a fraction of the design cannot separate from this effect.
    """

    axes: tuple[str, ...]
    change: PairedDifference
    aliases: tuple[tuple[str, ...], ...] = ()
    against: ClassVar[str] = ""  # has no reference arm, unlike a Comparison

    @property
    def name(self) -> str:
        """`norm`, or `norm × ffn` for an interaction."""
        return term_name(self.axes)


def term_name(axes: Sequence[str]) -> str:
    """The name of the effect of one axis, or of the interaction of several."""
    return " \u00d7 ".join(axes)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value, with its t interval, which has no width if all values are equal."""
    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return Estimate(1, mean)
    sd = float(np.std(values, ddof=1))
    half = float(-stdtrit(n - 1, LEVEL / 2)) * sd / math.sqrt(n)
    return Estimate(n, mean, sd, mean - half, mean + half)


def geometric_mean(values: Sequence[float]) -> Estimate:
    """The geometric mean of at least one positive value, with the t interval of its logarithm; sd is that of logs."""
    logs = estimate([math.log(value) for value in values])
    return Estimate(logs.n, math.exp(logs.mean), logs.sd, math.exp(logs.low), math.exp(logs.high))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> PairedDifference:
    """The paired t-test of values minus reference; at least one pair."""
    found = describe(np.subtract(values, reference), scale=max(map(abs, (*values, *reference))))
    return _paired_test(found) if found.sd > 0 else found


def _paired_test(found: PairedDifference, share: float = 1.0) -> PairedDifference:
    error, df = found.sd / math.sqrt(found.n), found.n - 1
    half = error * float(-stdtrit(df, LEVEL * share / 2))
    p = min(1.0, 2 * float(stdtr(df, -abs(found.mean) / error)) / share)
    return replace(found, low=found.mean - half, high=found.mean + half, p=p, plain_p=p, error=error, df=df)


def holm(p: Sequence[float]) -> list[float]:
    """The p of a family of tests, adjusted so that the chance of any false one is their level (Holm 1979, section 3).

    The smallest is multiplied by the number of tests, the next by one less, and none is below the one before it.
    """
    order = np.argsort(p)
    stepped = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(stepped))
    return list(map(float, adjusted))


def describe(differences: Columns, scale: float) -> PairedDifference:
    """The mean and sd of at least one difference, untested; sd is exactly zero if all are equal up to rounding.

    scale: largest absolute value of the operands, which bounds the rounding error.
    """
    n, mean = len(differences), float(differences.mean())
    if n == 1:
        return PairedDifference(1, mean)
    sd, rounding = float(differences.std(ddof=1)), ROUNDING * scale
    if sd <= rounding:
        return PairedDifference(n, mean if abs(mean) > rounding else 0.0, 0.0)
    return PairedDifference(n, mean, sd)


def judge(samples: Sequence[Columns], correlation: Columns, shares: Sequence[float] = ()) -> list[PairedDifference]:
    """Test a family of differences against zero, each by its own values over seeds and the noise that others show.

    samples: the values of each, not all equal. correlation: of the contrasts, (contrasts, contrasts), if all runs were
    equally noisy. The likelihood ratio of the mean and of zero, averaged over the standard deviations that the variance
    of the contrast and those of the others leave probable, is compared with its distribution over contrasts of such
    noise without an effect: over means and variances both, where Ignatiadis & Sen (2023, arXiv:2303.02887) condition on
    the variance. p and intervals are Bonferroni's. A single difference has the paired t-test. shares: of the 5% level,
    at which each is tested; p is divided by them, so that it is below 5% where the interval excludes zero.
    """
    tested = [describe(sample, scale=0.0) for sample in samples]
    shares = shares or [1.0] * len(tested)
    if len(tested) == 1:
        return [_paired_test(tested[0], shares[0])]
    counts, logs = np.array([one.n for one in tested]), np.log([one.sd for one in tested])
    grid = np.arange(logs.min() - 1.5, logs.max() + 3, STEP)
    above = logs[:, None] - grid
    likelihood = np.exp((counts[:, None] - 1) * (above + (1 - np.exp(2 * above)) / 2))
    priors = _predict(likelihood, len(samples) / (correlation**2).sum())
    plain = holm([_paired_test(one, share).p for one, share in zip(tested, shares, strict=True)])
    found = []
    for one, share, plain_p, prior, own in zip(tested, shares, plain, priors, priors * likelihood, strict=True):
        chances, mass, density, peak = _tables(one.n, len(grid))
        errors = np.exp(grid) / math.sqrt(one.n)
        joint = chances * prior
        ratios = np.log((joint @ density) / ((joint @ peak)[:, None] + TINY) + TINY).ravel()
        order = np.argsort(ratios)
        reached, ratios = np.cumsum((joint @ mass).ravel()[order]), ratios[order]

        def ratio(distance: float, errors: Columns = errors, own: Columns = own) -> float:
            """The log likelihood ratio at a distance from the mean."""
            weights = own / errors
            return math.log(weights @ np.exp(-((distance / errors) ** 2) / 2) / weights.sum() + TINY)

        critical = float(np.interp(LEVEL * share / len(samples), reached, ratios))
        half = float(brentq(lambda distance, above=critical: ratio(distance) - above, 0, 50 * errors[-1]))
        p = min(1.0, len(samples) * float(np.interp(ratio(one.mean), ratios, reached)) / share)
        precisions, weights = errors**-2, own / own.sum()
        precision = float(weights @ precisions)
        df = float(2 * precision**2 / (weights @ (precisions - precision) ** 2))  # of an inverse chi-square like it
        low, high = one.mean - half, one.mean + half
        found.append(replace(one, low=low, high=high, p=p, plain_p=plain_p, error=precision**-0.5, df=df))
    return found


def _predict(likelihood: Columns, independence: float) -> Columns:
    """The distribution of each contrast's standard deviation that the others predict, (contrasts, grid).

    They are of two kinds, quiet and noisy, of unknown scales, shares and spread, or all of one kind, each as probable;
    any other scale keeps a chance of OUTLIERS. likelihood: (contrasts, grid). independence: the part of a contrast's
    evidence that is its own, since contrasts share runs.
    """
    prior = _kinds(likelihood.shape[1])
    evidence = independence * np.log(likelihood @ prior.T)
    others = evidence.sum(axis=0) - evidence
    weights = np.exp(others - others.max(axis=1, keepdims=True))
    predicted: Columns = weights / weights.sum(axis=1, keepdims=True) @ prior
    return predicted


@cache
def _kinds(size: int) -> Columns:
    """Distributions over a grid of log standard deviations, (kinds, grid)."""
    kinds = []
    for spread in SPREADS:
        steps = STEP * (np.arange(size)[:, None] - np.arange(size)) / spread
        quiet = np.exp(-(steps**2) / 2)
        quiet /= quiet.sum(axis=1, keepdims=True)
        for ratio, share in ((0, 0.0), *product(NOISE_RATIOS, NOISY_SHARES)):
            noisy = quiet[np.minimum(np.arange(size) + ratio, size - 1)]
            kinds.append((1 - OUTLIERS) * ((1 - share) * quiet + share * noisy) + OUTLIERS / size)
    return np.concatenate(kinds)


@cache
def _tables(n: int, size: int) -> tuple[Columns, Columns, Columns, Columns]:
    """What n values give, for standard deviations on a grid of this size.

    The chance of each log standard deviation of a sample, (samples, grid); of each log distance of its mean from the
    truth, (grid, distances); the density there, and at the truth, (grid,).
    """
    grid = STEP * np.arange(size)
    edges = np.arange(-2.5, grid[-1] + 1.5, STEP)
    below = chdtr(n - 1, (n - 1) * np.exp(2 * (edges[:, None] - grid)))
    errors = np.exp(grid[:, None]) / math.sqrt(n)
    far = np.arange(-3.5, grid[-1] + 2.5, STEP / 2)
    beyond = 2 * ndtr(-np.exp(far) / errors)
    density = np.exp(-((np.exp((far[1:] + far[:-1]) / 2) / errors) ** 2) / 2) / errors
    return np.diff(below, axis=0), -np.diff(beyond, axis=1), density, 1 / errors[:, 0]


def seeds_needed(tested: PairedDifference, family: float) -> SeedRange:
    """The fewest and the most seeds that a difference would need for 80% power; None for more than 10,000.

    For the estimated effect, and for the smaller end of the 80% interval around it, since a few seeds do not determine
    it better; an interval that includes zero has no upper bound. family: how many are tested together, over the share
    of the level at which they are.
    """
    more = range(tested.n + 1, MOST_SEEDS + 1)

    def seeds_for(effect: float) -> int | None:
        def enough(n: int) -> bool:
            shift, df = effect / tested.error * math.sqrt(n / tested.n), tested.df * (n - 1) / (tested.n - 1)
            return power_of(shift, df, LEVEL / family) >= POWER

        index = bisect_left(more, True, key=enough)  # power grows with n; a root finder may not converge
        return more[index] if index < len(more) else None

    reach = tested.error * float(stdtrit(tested.df, 0.9))
    return seeds_for(abs(tested.mean)), seeds_for(max(0.0, abs(tested.mean) - reach))


def factorial_effects(
    options: Mapping[str, Sequence[object]],
    levels: Sequence[Mapping[str, object]],
    seeds: Sequence[int],
    values: Sequence[float],
    level_share: Callable[[int], float] = lambda seeds: 1.0,
) -> list[Effect]:
    """Main effects and pairwise interactions, estimated by least squares within each seed and averaged over seeds.

    options: those of each axis, the one that others are compared with first. levels, seeds, values: one entry per run;
    levels are its option on each axis. A seed whose runs cannot separate an effect from the others does not contribute
    to it. Effects that the design cannot separate are reported once, a main effect before an interaction, with the
    others as its aliases; an effect that never varies, or that no seed can estimate, is left out. Interactions of three
    or more axes are assumed to be zero. All effects are one family; they are judged in units of what equal
    noise of all runs would give each. level_share: see `Study`.
    """
    blocks = np.array([[float(seed == block) for block in sorted(set(seeds))] for seed in seeds])
    columns = _effect_columns(options, levels)
    kept, aliases = _estimable(blocks, columns)
    design = np.column_stack([*(columns[term] for term in kept), np.ones(len(seeds))])
    losses = np.asarray(values, dtype=float)
    changes, covariances = [], []  # of the terms, (seeds, terms), nan if a seed cannot estimate one; at variance 1
    for block in blocks.T > 0:
        inverse = np.linalg.pinv(design[block])
        is_estimable = np.isclose(np.diag(inverse @ design[block]), 1)  # inseparable columns share their weight
        weights = np.where(is_estimable[:, None], inverse, math.nan)[:-1]  # the last one is the intercept
        changes.append(weights @ losses[block])
        covariances.append(weights @ weights.T)
    within, covariance = np.array(changes), np.nansum(covariances, axis=0)
    scale = float(np.abs(losses).max())
    found = {
        term: describe(known, scale)
        for term, of_seeds in zip(kept, within.T, strict=True)
        if (known := of_seeds[~np.isnan(of_seeds)]).size
    }
    if tested := [term for term, effect in found.items() if effect.sd > 0 and level_share(effect.n)]:
        places = [kept.index(term) for term in tested]
        sums = covariance[np.ix_(places, places)]
        units = np.sqrt(np.diag(sums) / [found[term].n for term in tested])  # of each, if all runs were equally noisy
        of_terms = within[:, places].T / units[:, None]
        correlation = sums / np.sqrt(np.outer(np.diag(sums), np.diag(sums)))
        shares = [level_share(found[term].n) for term in tested]
        judged = judge([values[~np.isnan(values)] for values in of_terms], correlation, shares)
        found |= {t: found[t].with_test(test, unit) for t, test, unit in zip(tested, judged, units, strict=True)}
    return [Effect(term, effect, tuple(aliases[term])) for term, effect in found.items()]


def contrast_name(options: Mapping[str, Sequence[object]], axis: str, option: object) -> str:
    """Of the change from an axis's first option to this one, in Effect.axes."""
    return axis if all(len(known) <= 2 for known in options.values()) else f"{axis}={option}"


def _effect_columns(
    options: Mapping[str, Sequence[object]], levels: Sequence[Mapping[str, object]]
) -> dict[Term, Columns]:
    """The column of each term, (runs,), whose coefficient is the effect.

    Columns of an axis are zero on average over its options, so that an effect is an average over the other axes.
    """
    main = {
        (axis, contrast_name(options, axis, option)): np.array(
            [(run[axis] == option) - 1 / len(known) for run in levels]
        )
        for axis, known in options.items()
        for option in known[1:]
    }
    columns: dict[Term, Columns] = {(name,): column for (_, name), column in main.items()}
    pairs = ((one, other) for one, other in combinations(main, 2) if one[0] != other[0])
    return columns | {(one[1], other[1]): 2 * main[one] * main[other] for one, other in pairs}


def _estimable(blocks: Columns, columns: dict[Term, Columns]) -> tuple[list[Term], dict[Term, list[Term]]]:
    """The separable terms, in order of preference, and the terms that each is aliased with."""
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


def rank_intervals(names: Sequence[str], differ: Collection[tuple[str, str]]) -> dict[str, tuple[int, int]]:
    """The lowest and the highest rank that the data allows each arm; all hold together with the level of the tests.

    differ: (lower, higher) loss of each significant pair in a family of all pairs. Rank 1 has the lowest loss. Al
    Mohamad, Goeman & van Zwet 2022, Biometrics 78, section 3.
    """
    below, above = Counter(higher for _, higher in differ), Counter(lower for lower, _ in differ)
    return {name: (1 + below[name], len(names) - above[name]) for name in names}


def pareto_front(costs: Sequence[float], losses: Sequence[float]) -> list[bool]:
    """Whether each point is Pareto-optimal, lower being better; ties are kept."""
    points = list(zip(costs, losses, strict=True))
    return [
        not any(other[0] <= cost and other[1] <= loss and other != (cost, loss) for other in points)
        for cost, loss in points
    ]


def first_reach(xs: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """The x at which a curve first falls to target, by linear interpolation; None if it never does."""
    points = list(zip(xs, losses, strict=True))
    if points and points[0][1] <= target:
        return points[0][0]
    for (x, loss), (next_x, next_loss) in pairwise(points):
        if next_loss <= target:
            return x + (next_x - x) * (loss - target) / (loss - next_loss)
    return None
