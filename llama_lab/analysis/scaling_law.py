"""Scaling laws of a study's options, and how much compute each of them is worth. docs/statistics.md has their coverage.

The loss of a model of N parameters after D tokens is L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022,
section 3.3), fitted to the log of the losses, each the mean over the seeds of one size and budget, by Huber's loss from
a grid of starts. Besiroglu et al. (2024) show what happens where a fit ends before its minimum, or where an interval
is that of the optimiser: fits run to convergence, and intervals are of refits to data drawn from the fitted law.

A gain compares an option with the reference at one budget, in tokens per parameter: the compute with which the
reference would reach the option's loss, over the option's own. The paired difference of the two log losses says how
much lower the option is, the reference's law what that is worth in compute along sizes with the same tokens per
parameter. An option has a law of its own, so its gain may differ from size to size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import fdtrc  # scipy.stats has it, too, and takes twice as long to import

from .power import LEVEL
from .statistics import Estimate

SIZES, BUDGETS = 4, 3  # fewer say nothing about a law of five coefficients
COEFFICIENTS = 5
HUBER = 1e-3  # of log losses, as in Hoffmann et al.
DRAWS = 1_000  # refits behind an interval
STEPS, ENOUGH = 300, 1e-12  # iterations of a fit, and the relative decrease below which it ends
# Where fits of a law start: E as a share of the lowest loss, and the exponents.
STARTS = [(e, alpha, beta) for e in (0.1, 0.5, 0.9) for alpha in (0.1, 0.3, 0.6, 1.0) for beta in (0.1, 0.3, 0.6, 1.0)]
LOWEST, HIGHEST = 0.01, 4.0  # of the exponents
WIDEST = math.log(1e4)  # of a gain
LOOSE = 10.0  # upper over lower end of an exponent's interval
HOLDS = 1.1  # a change of the gain with every tenfold of compute that is smaller is none
NO_NOISE = 1e-9  # seeds whose log losses differ by less are copies of each other

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """The finished runs of one option at one size and budget, which differ in seed alone.

    budget: nominal, in tokens per parameter. flops: of the whole training. losses: by seed. flops_per_second: of
    training; nan if it was not measured.
    """

    size: str
    budget: float
    params: float
    tokens: float
    flops: float
    losses: Mapping[int, float]
    flops_per_second: float = math.nan

    @property
    def cell(self) -> tuple[str, float]:
        """What points of several options have in common."""
        return self.size, self.budget

    @property
    def log_loss(self) -> float:
        """The log of the mean loss over seeds."""
        return math.log(np.mean(list(self.losses.values())))


def reason_not_fittable(points: Sequence[Point]) -> str:
    """Why no law can be fitted to these points; empty if one can."""
    sizes, budgets = len({point.size for point in points}), len({point.budget for point in points})
    if sizes >= SIZES and budgets >= BUDGETS and len(points) >= SIZES * BUDGETS:
        return ""
    return f"{len(points)} points of {sizes} sizes and {budgets} budgets, where a law needs {SIZES} by {BUDGETS}"


@dataclass(frozen=True)
class Law:
    """L(N, D), and refits of it. theta: log E, A, B at the `centre` (of log N and log D), then the two exponents.

    draws: the same of each refit, (draws, 5).
    """

    theta: Floats
    draws: Floats
    centre: tuple[float, float]

    def estimate(self, name: str) -> Estimate:
        """E, A, B, alpha, beta, or gamma: with compute C that is spent best, the loss is E + c / C^gamma."""
        theta = np.vstack([self.theta, self.draws])
        alpha, beta = theta[:, 3], theta[:, 4]
        exponents = {"alpha": alpha, "beta": beta, "gamma": alpha * beta / (alpha + beta)}
        if name in exponents:
            return interval(exponents[name])
        place = "EAB".index(name)
        moved = (0.0, alpha * self.centre[0], beta * self.centre[1])[place]
        return interval(np.exp(theta[:, place] + moved))

    @property
    def loose(self) -> str:
        """The exponents whose intervals span more than LOOSE times: the losses do not determine them."""
        found = {name: self.estimate(name) for name in ("alpha", "beta")}
        return ", ".join(f"{name} {one.text}" for name, one in found.items() if one.high > LOOSE * one.low)

    def losses(self, params: Floats, tokens: Floats) -> tuple[Floats, Floats, Floats]:
        """The loss at each pair of parameters and tokens, and the ends of its 95% interval."""
        n, d = np.log(params) - self.centre[0], np.log(tokens) - self.centre[1]
        drawn = np.exp(_log_loss(self.draws, n, d)[0])
        low, high = np.quantile(drawn, (LEVEL / 2, 1 - LEVEL / 2), axis=0)
        return np.exp(_log_loss(self.theta[None], n, d)[0][0]), low, high


@dataclass(frozen=True)
class Gain:
    """The compute-equivalent gain over the reference at one point of an option.

    is_reached: whether its loss is one that the reference reached at that budget. alone: by the paired difference of
    this size and budget alone. line: by the laws of both. speed: the option's training FLOPs per second over the
    reference's, nan where unknown; a gain times this is what the option is worth in time on the study's hardware.
    """

    point: Point
    is_reached: bool
    alone: Estimate
    line: Estimate
    speed: float


@dataclass(frozen=True)
class Gains:
    """The gains of one option, wherever both have finished.

    growth: the factor by which the gain changes with every tenfold of compute, by a line through the log gains.
    lack_of_fit: the p of the test that the gain follows such a line; nan for single seeds, which cannot tell.
    """

    every: tuple[Gain, ...]
    growth: Estimate
    lack_of_fit: float

    @property
    def reached(self) -> list[Gain]:
        """Those where the reference reached the option's loss, by compute."""
        return sorted((gain for gain in self.every if gain.is_reached), key=lambda gain: gain.point.flops)

    @property
    def central(self) -> Gain | None:
        """The one in the middle of `reached`; None without any."""
        return self.reached[len(self.reached) // 2] if self.reached else None

    def at(self, cell: tuple[str, float]) -> Gain | None:
        """The one at a size and budget; None unless the reference reached the option's loss there."""
        return next((gain for gain in self.reached if gain.point.cell == cell), None)

    @property
    def trend(self) -> str:
        """`grows`, `shrinks`, `holds`, or empty where it cannot be told or the gains do not follow a line."""
        if self.lack_of_fit < LEVEL:
            return ""
        if self.growth.low > 1:
            return "grows"
        if self.growth.high < 1:
            return "shrinks"
        return "holds" if self.growth.low > 1 / HOLDS and self.growth.high < HOLDS else ""


@dataclass(frozen=True)
class Scaled:
    """An option of a scaling study. law: None where no law is fitted. gains: None of the reference, too.

    not_fittable: why no law can be fitted to its points, in words; empty if one can.
    """

    option: str
    points: tuple[Point, ...]
    law: Law | None = None
    gains: Gains | None = None
    not_fittable: str = ""


@dataclass(frozen=True)
class Scaling:
    """The options of a scaling study, the reference first.

    not_fittable: why none has a law, in words; empty if some do. loose: the exponents that leave the reference's law
    unidentified, so that no option has gains; empty if it is identified.
    """

    options: tuple[Scaled, ...]
    not_fittable: str = ""
    loose: str = ""


def scale(points: Mapping[str, Sequence[Point]]) -> Scaling:
    """The laws and gains of the options with enough points. points: by option, the reference first.

    There are none unless the reference and another option have enough, and no gains over an unidentified law.
    """
    lack = {option: reason_not_fittable(own) for option, own in points.items()}
    reference, *others = points
    fitted = [option for option in others if not lack[option]]
    laws: dict[str, Law] = {}
    gains: dict[str, Gains] = {}
    why = loose = ""
    if lack[reference] or not fitted:
        why = next(f"{option} has {lack[option]}" for option in points if lack[option])
    else:
        rng = np.random.default_rng(0)
        base = fit_law(points[reference], rng)
        if not (loose := base.loose):
            known = fit_gains(base, points[reference], [points[option] for option in fitted], rng)
            gains = dict(zip(fitted, known, strict=True))
        laws = {reference: base} | {option: fit_law(points[option], rng) for option in fitted}
    found = (
        Scaled(option, tuple(own), laws.get(option), gains.get(option), lack[option]) for option, own in points.items()
    )
    return Scaling(tuple(found), why, loose)


def interval(values: Floats, level: float = LEVEL) -> Estimate:
    """The first value with the percentile interval of the others, which are of refits."""
    draws = values[1:]
    low, high = np.quantile(draws, (level / 2, 1 - level / 2))
    return Estimate(len(draws), float(values[0]), float(draws.std()), float(low), float(high))


def logs(points: Sequence[Point], *names: str) -> list[Floats]:
    """The logarithms of these quantities of points."""
    return [np.log([getattr(point, name) for point in points]) for name in names]


def fit_law(points: Sequence[Point], rng: np.random.Generator, draws: int = DRAWS) -> Law:
    """The law of one option. points: enough for one, see `reason_not_fittable`."""
    params, tokens = logs(points, "params", "tokens")
    centre = float(params.mean()), float(tokens.mean())
    n, d = params - centre[0], tokens - centre[1]
    values = np.array([point.log_loss for point in points])
    losses, (shares, alphas, betas) = np.exp(values), np.array(STARTS).T
    rest = np.log((losses.mean() - shares * losses.min()) / 2)
    starts = np.stack([np.log(shares * losses.min()), rest, rest, alphas, betas], axis=1)
    fitted, costs = _minimise(starts, np.broadcast_to(values, (len(STARTS), len(values))), n, d)
    theta = fitted[np.argmin(costs)]
    predicted = _log_loss(theta[None], n, d)[0]
    spread = _spread(_log_losses(points, points), params)
    drawn = predicted + _noise(values - predicted[0], spread, rng, draws)
    return Law(theta, _minimise(np.tile(theta, (draws, 1)), drawn, n, d)[0], centre)


def fit_gains(
    base: Law, reference: Sequence[Point], others: Sequence[Sequence[Point]], rng: np.random.Generator
) -> list[Gains]:
    """The gains of the other options, each by a law of its own; their intervals hold for all of them together.

    base: the law of the reference. others: the points of each option; those without a point of the reference at the
    same size, budget and seed do not count.
    """
    return [_gains(base, reference, points, LEVEL / len(others), rng) for points in others]


def _gains(
    base: Law, reference: Sequence[Point], points: Sequence[Point], level: float, rng: np.random.Generator
) -> Gains:
    """The gains of one option.

    The option's law is fitted to that of the reference plus the paired differences, so that what both have in common,
    of seeds or of a law that does not fit, cancels.
    """
    at = {point.cell: point for point in reference}
    pairs = [(at[one.cell], one) for one in points if one.cell in at and at[one.cell].losses.keys() & one.losses.keys()]
    n, d, flops = logs([one for one, _ in pairs], "params", "tokens", "flops")
    n, d = n - base.centre[0], d - base.centre[1]
    slopes = np.array([_slopes(one, reference) for one, _ in pairs]).T
    (compute,) = logs([other for _, other in pairs], "flops")
    bases, others = zip(*pairs, strict=True)
    differences = _log_losses(others, bases) - _log_losses(bases, bases)
    changes = np.nanmean(differences, axis=0)

    laws = np.vstack([base.theta, base.draws])  # the first row of all that follows is fitted, the others are drawn
    start = _log_loss(laws, n, d)[0]
    theta, _ = _minimise(laws[:1], start[:1] + changes, n, d)
    fitted = _log_loss(theta, n, d)[0] - start[:1]
    drawn_noise = _noise((changes - fitted)[0], _spread(differences, n), rng, len(base.draws))
    noise = np.vstack([np.zeros_like(fitted), drawn_noise])
    refits, _ = _minimise(base.draws + theta - base.theta, (start + fitted + noise)[1:], n, d)
    ends = _log_loss(np.vstack([theta, refits]), n, d)[0]
    alone, line = (_invert(laws, n, d, slopes, by) - (compute - flops) for by in (changes + noise, ends - start))

    gains = []
    for (one, other), *drawn in zip(pairs, alone.T, line.T, strict=True):
        reached = [point.log_loss for point in reference if point.budget == other.budget]
        by_pair, by_laws = (interval(np.exp(log_gains), level) for log_gains in drawn)
        speed = other.flops_per_second / one.flops_per_second
        gains.append(Gain(other, min(reached) <= other.log_loss <= max(reached), by_pair, by_laws, speed))
    x = compute - compute.mean()
    log_gains = _invert(base.theta[None], n, d, slopes, differences) - (compute - flops)
    return Gains(tuple(gains), interval(10 ** (line @ x / (x @ x)), level), _lack_of_fit(log_gains, compute, n))


def _log_losses(points: Sequence[Point], like: Sequence[Point]) -> Floats:
    """The log losses of the seeds that some of `like` have, (seeds, points); nan where a point lacks one."""
    seeds = sorted({seed for point in like for seed in point.losses})
    return np.log([[point.losses.get(seed, math.nan) for point in points] for seed in seeds])


def _spread(by_seed: Floats, log_params: Floats) -> Floats:
    """The noise at each point, up to a common factor: the sd between seeds, as a power of the parameters.

    by_seed: (seeds, points). Ones unless every point has seeds that differ.
    """
    sds = np.nanstd(by_seed, axis=0)
    if sds.min() < NO_NOISE:
        return np.ones_like(sds)
    power = np.polyfit(log_params, np.log(sds), 1)[0]
    return np.asarray(np.exp(power * (log_params - log_params.mean())))


def _lack_of_fit(log_gains: Floats, log_compute: Floats, log_params: Floats) -> float:
    """The p of the F test for lack of fit of a line through the log gain of each size (Draper and Smith 1998, 2.1).

    It compares the residuals of sizes with those between seeds, both over the noise at that size. Budgets of one size
    are averaged: between laws of unequal exponents, the gain grows with size and not with tokens. log_gains: (seeds,
    points). nan without residuals between seeds.
    """
    spread = _spread(log_gains, log_params)
    means = np.nanmean(log_gains, axis=0)
    seeds = np.isfinite(log_gains).sum(axis=0)
    degrees = (seeds - 1).sum()
    between_seeds = np.nansum(((log_gains - means) / spread) ** 2)

    sizes = np.unique(log_params)
    if len(sizes) < 3 or between_seeds < NO_NOISE**2:
        return math.nan
    members = log_params == sizes[:, None]
    x, y, noise = (members @ values / members.sum(axis=1) for values in (log_compute, means, spread))
    _, (between_sizes,), *_ = np.polyfit(x, y, 1, w=np.sqrt(members @ seeds) / noise, full=True)
    return float(fdtrc(len(sizes) - 2, degrees, between_sizes / (len(sizes) - 2) * degrees / between_seeds))


def _noise(residuals: Floats, spread: Floats, rng: np.random.Generator, draws: int) -> Floats:
    """Errors for refits, (draws, points): residuals around a fitted law, drawn with replacement and with random signs.

    Unlike normal errors they keep a point far off the law one point. Each is scaled from the `spread` of its own point
    to that of the one it is drawn for. Their scale is itself drawn from its distribution, which makes intervals of
    linear functions those of Student's t: the residuals of a dozen points do not determine it better.
    """
    n = len(residuals)
    scale = np.sqrt(n / rng.chisquare(max(n - COEFFICIENTS, 1), (draws, 1)))
    signs = rng.choice((-1, 1), (draws, n))
    drawn = (residuals / spread)[rng.integers(n, size=(draws, n))]
    return np.asarray(scale * signs * drawn * spread)


def _minimise(theta: Floats, values: Floats, n: Floats, d: Floats) -> tuple[Floats, Floats]:
    """Minimise Huber's loss of the residuals from each start, by Levenberg and Marquardt; also returns the losses.

    theta: (fits, 5). values: (fits, points). n, d: of the points.
    """
    lowest, highest = np.full(COEFFICIENTS, -np.inf), np.full(COEFFICIENTS, np.inf)
    lowest[:3], lowest[3:], highest[3:] = float(values.max()) - 12, LOWEST, HIGHEST
    theta = np.clip(theta, lowest, highest)
    damping = np.full((len(theta), 1), 1e-3)
    predicted, jacobian = _log_loss(theta, n, d)
    residuals = values - predicted
    costs = _huber(residuals)
    active = np.ones(len(theta), dtype=bool)
    for _ in range(STEPS):
        weights = HUBER / np.maximum(np.abs(residuals[active]), HUBER)
        weighted = jacobian[active] * weights[..., None]
        normal = np.einsum("frp,frq->fpq", weighted, jacobian[active])
        gradient = np.einsum("frp,fr->fp", weighted, residuals[active])
        diagonal = np.einsum("fpp->fp", normal)
        diagonal += damping[active] * diagonal + 1e-15
        tried = np.clip(theta[active] + np.linalg.solve(normal, gradient[..., None])[..., 0], lowest, highest)
        predicted, slope = _log_loss(tried, n, d)
        rest = values[active] - predicted
        cost = _huber(rest)
        better = cost < costs[active]
        gained = costs[active] - cost
        where = np.flatnonzero(active)
        kept = where[better]
        theta[kept], residuals[kept], jacobian[kept] = tried[better], rest[better], slope[better]
        ended = np.where(better, gained < ENOUGH * costs[where], damping[where, 0] > 1e9)
        costs[kept] = cost[better]
        damping[where] *= np.where(better, 0.2, 5.0)[:, None]
        active[where[ended]] = False
        if not active.any():
            break
    return theta, costs


def _log_loss(theta: Floats, n: Floats, d: Floats) -> tuple[Floats, Floats]:
    """log L(N, D) and its derivatives by the five parameters. theta: (fits, parameters). n, d: (fits or none, rows)."""
    e, a, b, alpha, beta = (theta[:, i, None] for i in range(5))
    terms = np.stack(np.broadcast_arrays(e + 0 * n, a - alpha * n, b - beta * d))
    value = np.logaddexp.reduce(terms)
    shares = np.exp(terms - value)
    return value, np.stack([*shares, -shares[1] * n, -shares[2] * d], axis=-1)


def _invert(theta: Floats, n: Floats, d: Floats, slopes: Floats, changes: Floats) -> Floats:
    """The log gains that change the log loss by `changes` at the same tokens per parameter, by Newton's method.

    (fits, rows).
    """
    shift = np.zeros_like(changes)
    start = _log_loss(theta, n, d)[0]
    for _ in range(50):
        value, slope = _log_loss(theta, n + slopes[0] * shift, d + slopes[1] * shift)
        by_shift = -(theta[:, 3, None] * slope[..., 1] * slopes[0] + theta[:, 4, None] * slope[..., 2] * slopes[1])
        shift = np.clip(shift - (value - start - changes) / np.minimum(by_shift, -1e-9), -WIDEST, WIDEST)
    return shift


def _huber(residuals: Floats) -> Floats:
    size = np.abs(residuals)
    return np.asarray(np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum(axis=-1))


def _slopes(point: Point, reference: Sequence[Point]) -> tuple[float, float]:
    """How log parameters and log tokens grow with log FLOPs along the sizes of the point's budget, at the point."""
    line = sorted((one for one in reference if one.budget == point.budget), key=lambda one: one.flops)
    if len(line) < 2:
        return 0.5, 0.5
    flops, params, tokens = logs(line, "flops", "params", "tokens")
    place = next(i for i, one in enumerate(line) if one.cell == point.cell)
    return float(np.gradient(params, flops)[place]), float(np.gradient(tokens, flops)[place])
