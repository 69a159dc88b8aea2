"""The statistics of a study: arms that share seeds, tested together. docs/statistics.md has their error rates."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.optimize import brentq
from scipy.special import chdtr, stdtrit
from statsmodels.stats.power import TTestPower

from llama_lab.formatting import with_interval

LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 10_000
ROUNDING = 1e-13  # error of a difference, relative to its operands
PRIOR_DF = 2.0  # degrees of freedom that the typical variance counts for
NO_DF = 1e-9  # below it a group has no residuals
TINY = 1e-300
BIAS_DRAWS = 2_000
DRAWS = 2**14  # of the largest of several normals; a power of two keeps Sobol's sequence balanced
STEPS = 2**9  # quantiles that their distribution is stored in

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

    @property
    def text(self) -> str:
        """`3.71 [3.60, 3.82]`; the mean alone without an interval."""
        return with_interval(self.mean, self.low, self.high)


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of values with its standard error, and its test against zero within a family of contrasts.

    low, high: the simultaneous 95% interval. p: adjusted; below 5% exactly where the interval excludes zero.
    """

    mean: float
    error: float
    df: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class PairedDifference(Estimate):
    """The mean difference over pairs, with its 95% interval and the two-sided p that agrees with it.

    sd: standard deviation of the differences; nan for one pair. low, high, p: from the paired t-test, or from a family
    (see Contrast); nan if untested, which one pair and equal differences always are: runs with a spread of exactly zero
    are copies of each other, and no evidence.
    """

    p: float = math.nan

    @property
    def text(self) -> str:
        """Like an Estimate's, with signs."""
        return with_interval(self.mean, self.low, self.high, is_difference=True)

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

    def with_test(self, contrast: Contrast) -> "PairedDifference":
        """This difference with the interval and p of its contrast."""
        return replace(self, low=contrast.low, high=contrast.high, p=contrast.p)


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
    if sd == 0:  # SciPy's interval of no width is nan
        return Estimate(n, mean, 0.0, mean, mean)
    low, high = stats.t.interval(1 - LEVEL, n - 1, mean, sd / math.sqrt(n))
    return Estimate(n, mean, sd, float(low), float(high))


def geometric_mean(values: Sequence[float]) -> Estimate:
    """The geometric mean of at least one positive value, with the t interval of its logarithm; sd is that of logs."""
    logs = estimate([math.log(value) for value in values])
    return Estimate(logs.n, math.exp(logs.mean), logs.sd, math.exp(logs.low), math.exp(logs.high))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> PairedDifference:
    """The paired t-test of values minus reference; at least one pair."""
    found = describe(np.subtract(values, reference), scale=max(map(abs, (*values, *reference))))
    return found.with_test(paired_contrast(found)) if found.sd > 0 else found


def paired_contrast(found: PairedDifference) -> Contrast:
    """The paired t-test of a difference with positive sd."""
    error, df = found.sd / math.sqrt(found.n), found.n - 1
    half = error * float(stats.t.isf(LEVEL / 2, df))
    p = 2 * float(stats.t.sf(abs(found.mean) / error, df))
    return Contrast(found.mean, error, df, found.mean - half, found.mean + half, p)


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


@dataclass(frozen=True)
class Fit:
    """Values with their error variances; the values of a group share one.

    variances, groups, shrunk: per value; shrunk is the part of the variance that comes from the prior. df: degrees of
    freedom per group, the prior's included. total_df: residual degrees of freedom. noise: each group's own standard
    deviation over the typical one; nan for a group without residuals.
    """

    values: Columns
    variances: Columns
    groups: npt.NDArray[np.intp]
    df: Columns
    shrunk: Columns
    total_df: float
    noise: Columns


def fit_blocked(losses: Columns, strata: Sequence[Hashable] | None = None) -> Fit:
    """Fit loss = arm + seed + noise, with a noise variance per arm.

    losses: (arms, seeds), nan for a missing run. The values of the fit are the others, row by row. strata: of each arm,
    each with seeds of its own; default: all arms share them.
    """
    arms, seeds = np.nonzero(~np.isnan(losses))
    places = {stratum: i for i, stratum in enumerate(dict.fromkeys(strata or ()))}
    blocks = seeds + losses.shape[1] * np.array([places[one] for one in strata])[arms] if strata else seeds
    design = np.column_stack([arms[:, None] == np.unique(arms), blocks[:, None] == np.unique(blocks)]).astype(float)
    return moderate(losses[arms, seeds], arms, design)


def moderate(values: Columns, groups: npt.NDArray[np.intp], design: Columns) -> Fit:
    """The variance of each group's residuals, shrunk towards the typical one by a prior of PRIOR_DF degrees of freedom.

    design: (values, columns). The squared residuals of least squares over their expectation at variance 1 (Horn, Horn &
    Duncan 1975, JASA 70) estimate the variance of a group; the moderation is limma's (Smyth 2004, SAGMB 3, section 3),
    with fixed prior degrees of freedom, which so few groups cannot estimate, and with the median as its centre, which
    one noisy group does not move. A second fit gives less weight to noisier groups, so that their noise is not taken
    for a difference between seeds.
    """
    members = (np.arange(groups.max() + 1)[:, None] == groups).astype(float)
    weights = np.ones(len(values))
    bias = None
    for _ in range(2):
        roots = np.sqrt(weights)
        to_residuals = np.eye(len(values)) - design @ np.linalg.pinv(roots[:, None] * design) * roots
        df = members @ np.diag(to_residuals)
        known = df > NO_DF
        bias = _bias_of_median(to_residuals, members[known], df[known]) if bias is None else bias
        squares = members @ (to_residuals @ values) ** 2
        typical = float(np.median(squares[known] / df[known])) / bias if known.any() else math.nan
        variances = (PRIOR_DF * typical + squares) / (PRIOR_DF + df)
        weights = (typical / np.maximum(variances, typical))[groups] if typical > 0 else weights
    shrunk = PRIOR_DF * typical / (PRIOR_DF + df)
    noise = np.full(len(df), math.nan)
    noise[known] = np.sqrt(squares[known] / df[known] / typical) if typical > 0 else math.nan
    return Fit(values, variances[groups], groups, PRIOR_DF + df, shrunk[groups], float(df[known].sum()), noise)


def _bias_of_median(to_residuals: Columns, members: Columns, df: Columns) -> float:
    """The expected median of the groups' variances over their expected mean, if all are equal."""
    noise = np.random.default_rng(0).standard_normal((BIAS_DRAWS, len(to_residuals)))
    variances = (noise @ to_residuals.T) ** 2 @ members.T / df
    return float(np.median(variances, axis=1).mean() / variances.mean()) if len(df) else math.nan


def judge(fit: Fit, weights: Columns, correlation: Columns | None = None) -> list[Contrast]:
    """Test a family of contrasts against zero by single-step max-t.

    weights: (contrasts, values). correlation: of the contrasts; default: that of sums of independent values. The
    degrees of freedom are Satterthwaite's, with the uncertainty of the prior that of all residuals together, and at
    most those of the residuals.
    """
    covariance = weights * fit.variances @ weights.T
    members = (fit.groups[:, None] == np.unique(fit.groups)).astype(float)
    of_groups = weights**2 * fit.variances @ members
    of_prior = weights**2 @ fit.shrunk
    spread = of_groups**2 @ (1 / fit.df[np.unique(fit.groups)]) + of_prior**2 / fit.total_df
    df = np.minimum(np.diag(covariance) ** 2 / spread, fit.total_df)
    if correlation is not None:
        errors = np.sqrt(np.diag(covariance))
        covariance = correlation * np.outer(errors, errors)
    return max_t(weights @ fit.values, covariance, df)


def max_t(means: Columns, covariance: Columns, df: Columns) -> list[Contrast]:
    """Simultaneous intervals and adjusted p of contrasts with this covariance (Hothorn, Bretz & Westfall 2008).

    Uses the distribution of the largest absolute value of a multivariate t; if degrees of freedom differ, each contrast
    uses the distribution with its own (Hasler & Hothorn 2008, Biometrical Journal 50).
    """
    errors = np.sqrt(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(errors, errors))  # all pairs have no Cholesky factor
    largest = np.abs(_normals(len(errors)) @ (vectors * np.sqrt(np.maximum(values, 0))).T).max(axis=1)
    maxima = np.sort(largest).reshape(STEPS, -1).mean(axis=1)  # ascending quantiles of the largest absolute value
    found = []
    for mean, error, own_df in zip(means, errors, df, strict=True):

        def exceeded(t: float, own_df: float = own_df) -> float:
            """The probability that the largest |t| exceeds t."""
            return float(chdtr(own_df, own_df * (maxima / max(t, TINY)) ** 2).mean())

        alone, bonferroni = (-stdtrit(own_df, level / 2) for level in (LEVEL, LEVEL / len(means)))
        half = error * brentq(lambda t: exceeded(t) - LEVEL, 0.99 * alone, 1.01 * bonferroni)
        p = exceeded(abs(mean) / error)
        found.append(Contrast(*map(float, (mean, error, own_df, mean - half, mean + half, p))))
    return found


@cache
def _normals(n: int) -> Columns:
    """Quasi-random draws of n independent normals, (DRAWS, n), the same in every process."""
    engine = stats.qmc.Sobol(n, rng=0)
    return np.asarray(stats.qmc.MultivariateNormalQMC(np.zeros(n), engine=engine).random(DRAWS))


def seeds_needed(contrast: Contrast, n: int, family: int) -> SeedRange:
    """The fewest and the most seeds that a contrast would need for 80% power; None for more than 10,000.

    For effects at the two ends of the 80% interval around the estimate, since a few seeds do not determine it better;
    an interval that includes zero has no upper bound. n: current number of seeds. family: number of contrasts.
    """
    sd = contrast.error * math.sqrt(n)
    reach = contrast.error * float(stats.t.ppf(0.9, contrast.df))
    most, least = abs(contrast.mean) + reach, max(0.0, abs(contrast.mean) - reach)
    df_per_seed, level = contrast.df / (n - 1), LEVEL / family
    needed = (_seeds_for(effect / sd, df_per_seed, level) for effect in (most, least))
    fewest, enough = (None if seeds is None else max(seeds, n + 1) for seeds in needed)
    return fewest, enough


def smallest_difference(arms: int, seeds: int, comparisons: int) -> float:
    """The difference that a study of equally noisy arms detects with 80% power, in standard deviations of a run.

    For one of so many comparisons, at Bonferroni's level, which is slightly conservative. Needs two arms and seeds.
    """
    total = (arms - 1) * (seeds - 1)
    own = PRIOR_DF + total / arms
    df = min(4 / (2 / own + (2 * PRIOR_DF / own) ** 2 / total), total)
    needed = stats.t.isf(LEVEL / 2 / comparisons, df)
    reach = brentq(lambda shift: stats.nct.sf(needed, df, shift) - POWER, needed / 2, 4 * needed)
    return float(reach * math.sqrt(2 / seeds))


def _seeds_for(effect: float, df_per_seed: float, level: float) -> int | None:
    """The seeds with which a two-sided t-test detects an effect, in standard deviations, with 80% power."""
    few, test = range(2, MOST_SEEDS + 1), TTestPower()

    def enough(n: int) -> bool:
        # One tail at half the level: with two, SciPy returns nan if the other tail is tiny.
        power = float(test.power(effect, n, level / 2, df=df_per_seed * (n - 1), alternative="larger"))
        return power >= POWER or (math.isnan(power) and effect > 1)  # nan only for a power close to 1

    index = bisect_left(few, True, key=enough)  # power grows with n; a root finder may not converge
    return few[index] if index < len(few) else None


def factorial_effects(
    options: Mapping[str, Sequence[object]],
    levels: Sequence[Mapping[str, object]],
    seeds: Sequence[int],
    values: Sequence[float],
) -> list[Effect]:
    """Main effects and pairwise interactions, estimated by least squares within each seed and averaged over seeds.

    options: those of each axis, the one that others are compared with first. levels, seeds, values: one entry per run;
    levels are its option on each axis. A seed whose runs cannot separate an effect from the others does not contribute
    to it. Effects that the design cannot separate are reported once, a main effect before an interaction, with the
    others as its aliases; an effect that never varies, or that no seed can estimate, is left out. Interactions of three
    or more axes are assumed to be zero. All effects are one family; the variance of each over seeds is shrunk towards
    the typical one, as an arm's is, in units of what equal noise of all runs would give it.
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
    if tested := [term for term, effect in found.items() if effect.sd > 0]:
        places = [kept.index(term) for term in tested]
        of_terms = within[:, places].T
        terms, of_seed = np.nonzero(~np.isnan(of_terms))
        sums = covariance[np.ix_(places, places)]
        units = np.sqrt(np.diag(sums) / np.bincount(terms))  # of each effect, if all runs were equally noisy
        correlation = sums / np.sqrt(np.outer(np.diag(sums), np.diag(sums)))
        design = (terms[:, None] == np.arange(len(tested))).astype(float)
        fit = moderate(of_terms[terms, of_seed] / units[terms], terms, design)
        contrasts = judge(fit, (design / design.sum(axis=0)).T, correlation)
        for term, unit, contrast in zip(tested, units, contrasts, strict=True):
            low, high = unit * contrast.low, unit * contrast.high
            found[term] = replace(found[term], low=low, high=high, p=contrast.p)
    return [Effect(term, effect, tuple(aliases[term])) for term, effect in found.items()]


def _effect_columns(
    options: Mapping[str, Sequence[object]], levels: Sequence[Mapping[str, object]]
) -> dict[Term, Columns]:
    """The column of each term, (runs,), whose coefficient is the effect.

    Columns of an axis are zero on average over its options, so that an effect is an average over the other axes.
    """
    is_two_level = all(len(known) <= 2 for known in options.values())
    main = {
        (axis, axis if is_two_level else f"{axis}={option}"): np.array(
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
