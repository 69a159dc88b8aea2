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
from itertools import compress, repeat

import numpy as np
import numpy.typing as npt

from .statistics import LEVEL, Estimate

SIZES, BUDGETS = 4, 3  # fewer say nothing about a law of five coefficients
COEFFICIENTS = 5
HUBER = 1e-3  # of log losses, as in Hoffmann et al.
DRAWS = 1_000  # refits behind an interval
STEPS, ENOUGH = 300, 1e-12  # iterations of a fit, and the relative decrease below which it ends
STARTS = [(e, alpha, beta) for e in (0.1, 0.5, 0.9) for alpha in (0.1, 0.3, 0.6, 1.0) for beta in (0.1, 0.3, 0.6, 1.0)]
LOWEST, HIGHEST = 0.01, 4.0  # of the exponents
WIDEST = math.log(1e4)  # of a gain
LOOSE = 10.0  # upper over lower end of an exponent's interval
HOLDS = 1.1  # a change of the gain with every tenfold of compute that is smaller is none

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


def lacking(points: Sequence[Point]) -> str:
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
        return interval(self._value(self.theta, name), self._value(self.draws, name))

    @property
    def loose(self) -> str:
        """The exponents whose intervals span more than LOOSE times: the losses do not determine them."""
        found = {name: self.estimate(name) for name in ("alpha", "beta")}
        return ", ".join(f"{name} {one.text}" for name, one in found.items() if one.high > LOOSE * one.low)

    def _value(self, theta: Floats, name: str) -> Floats:
        alpha, beta = theta[..., 3], theta[..., 4]
        exponents = {"alpha": alpha, "beta": beta, "gamma": alpha * beta / (alpha + beta)}
        if name in exponents:
            return exponents[name]
        place = "EAB".index(name)
        moved = (0.0, alpha * self.centre[0], beta * self.centre[1])[place]
        return np.asarray(np.exp(theta[..., place] + moved))

    def losses(self, params: Floats, tokens: Floats) -> tuple[Floats, Floats, Floats]:
        """The loss at each pair of parameters and tokens, and the ends of its 95% interval."""
        n, d = np.log(params) - self.centre[0], np.log(tokens) - self.centre[1]
        drawn = np.exp(_log_loss(self.draws, n, d)[0])
        low, high = np.quantile(drawn, (LEVEL / 2, 1 - LEVEL / 2), axis=0)
        return np.exp(_log_loss(self.theta[None], n, d)[0][0]), low, high


@dataclass(frozen=True)
class Gains:
    """The compute-equivalent gains of one option over the reference.

    cells: where both have finished. inside: whether the option's loss there is one that the reference reached at that
    budget. points: the gain by the paired difference of that cell alone. line: by the laws of both. growth: the factor
    by which the gain changes with every tenfold of compute, by a straight line through the log gains of all cells.
    """

    cells: tuple[tuple[str, float], ...]
    flops: tuple[float, ...]
    inside: tuple[bool, ...]
    points: tuple[Estimate, ...]
    line: tuple[Estimate, ...]
    growth: Estimate

    def place(self, cell: tuple[str, float]) -> int | None:
        """The place of a size and budget in these; None unless the reference reached the option's loss there."""
        return next((i for i, own in enumerate(self.cells) if own == cell and self.inside[i]), None)

    @property
    def central(self) -> int | None:
        """The place of the cell in the middle of those inside, by compute; None without any."""
        places = sorted(compress(range(len(self.cells)), self.inside), key=lambda place: self.flops[place])
        return places[len(places) // 2] if places else None

    @property
    def trend(self) -> str:
        """`grows`, `shrinks`, `holds`, or empty where it cannot be told."""
        if self.growth.low > 1:
            return "grows"
        if self.growth.high < 1:
            return "shrinks"
        return "holds" if self.growth.low > 1 / HOLDS and self.growth.high < HOLDS else ""


@dataclass(frozen=True)
class Scaled:
    """An option of a scaling study. law: None where no law is fitted. gains: None of the reference, too.

    lacking: why no law can be fitted to its points, in words; empty if one can.
    """

    option: str
    points: tuple[Point, ...]
    law: Law | None = None
    gains: Gains | None = None
    lacking: str = ""


@dataclass(frozen=True)
class Scaling:
    """The options of a scaling study, the reference first.

    lacking: why none has a law, in words; empty if some do. loose: the exponents that leave the reference's law
    unidentified, so that no option has gains; empty if it is identified.
    """

    options: tuple[Scaled, ...]
    lacking: str = ""
    loose: str = ""


def scale(points: Mapping[str, Sequence[Point]]) -> Scaling:
    """The laws and gains of the options with enough points. points: by option, the reference first.

    There are none unless the reference and another option have enough, and no gains over an unidentified law.
    """
    lack = {option: lacking(own) for option, own in points.items()}
    reference, *others = points
    fitted = [option for option in others if not lack[option]]
    if lack[reference] or not fitted:
        found = tuple(Scaled(option, tuple(own), lacking=lack[option]) for option, own in points.items())
        return Scaling(found, next(f"{option} has {why}" for option, why in lack.items() if why))
    rng = np.random.default_rng(0)
    gains = dict(zip(fitted, fit_gains(points[reference], [points[option] for option in fitted], rng), strict=True))
    laws = {option: None if lack[option] else fit_law(own, rng) for option, own in points.items()}
    base = laws[reference]
    loose = base.loose if base else ""
    return Scaling(
        tuple(
            Scaled(option, tuple(own), laws[option], None if loose else gains.get(option), lack[option])
            for option, own in points.items()
        ),
        loose=loose,
    )


def interval(value: Floats | float, draws: Floats, level: float = LEVEL) -> Estimate:
    """A value with the percentile interval of its refits."""
    low, high = np.quantile(draws, (level / 2, 1 - level / 2))
    return Estimate(len(draws), float(value), float(draws.std()), float(low), float(high))


def fit_law(points: Sequence[Point], rng: np.random.Generator, draws: int = DRAWS) -> Law:
    """The law of one option. points: enough for one, see `lacking`."""
    params, tokens = (np.log([getattr(point, key) for point in points]) for key in ("params", "tokens"))
    centre = float(params.mean()), float(tokens.mean())
    n, d = params - centre[0], tokens - centre[1]
    values = np.array([point.log_loss for point in points])
    fitted, costs = _minimise(_starts(values), np.broadcast_to(values, (len(STARTS), len(values))), n, d)
    theta = fitted[np.argmin(costs)]
    predicted = _log_loss(theta[None], n, d)[0]
    drawn = predicted + _noise(values - predicted[0], rng, draws)
    return Law(theta, _minimise(np.tile(theta, (draws, 1)), drawn, n, d)[0], centre)


def fit_gains(
    reference: Sequence[Point], others: Sequence[Sequence[Point]], rng: np.random.Generator, draws: int = DRAWS
) -> list[Gains]:
    """The gains of the other options, each by a law of its own; their intervals hold for all of them together.

    reference: enough points for a law, see `lacking`. others: the points of each option; those without a point of the
    reference at the same size, budget and seed do not count.
    """
    base = fit_law(reference, rng, draws)
    return [_gains(base, reference, points, LEVEL / len(others), rng) for points in others]


def _gains(
    base: Law, reference: Sequence[Point], points: Sequence[Point], level: float, rng: np.random.Generator
) -> Gains:
    """The gains of one option; `base` is the law of the reference.

    The option's law is fitted to that of the reference plus the paired differences, so that what both have in common,
    of seeds or of a law that does not fit, cancels.
    """
    at = {point.cell: point for point in reference}
    pairs = [(at[point.cell], point) for point in points if point.cell in at]
    pairs = [(one, other) for one, other in pairs if one.losses.keys() & other.losses.keys()]
    n, d, flops = (np.log([getattr(one, key) for one, _ in pairs]) for key in ("params", "tokens", "flops"))
    n, d = n - base.centre[0], d - base.centre[1]
    slopes = np.array([_slopes(one, reference) for one, _ in pairs]).T
    compute = np.log([other.flops for _, other in pairs])
    excess = compute - flops
    changes = np.array([_change(*pair) for pair in pairs])

    ours, theirs = base.theta[None], base.draws
    expected = _log_loss(ours, n, d)[0]
    theta, _ = _minimise(ours, expected + changes, n, d)
    fitted = _log_loss(theta, n, d)[0] - expected
    noise = _noise((changes - fitted)[0], rng, len(theirs))
    start = _log_loss(theirs, n, d)[0]
    refits, _ = _minimise(theirs + theta - ours, start + fitted + noise, n, d)

    def gains(theta: Floats, changes: Floats) -> Floats:
        """The log gains where the log loss changes by so much, (fits, cells)."""
        return np.asarray(_invert(theta, n, d, slopes, changes) - excess)

    at_points, drawn_points = gains(ours, changes[None])[0], gains(theirs, changes + noise)
    line, drawn = gains(ours, fitted)[0], gains(theirs, _log_loss(refits, n, d)[0] - start)
    inside = np.array([_is_reached(other, reference) for _, other in pairs])
    x = compute - compute.mean()
    growth, drawn_growth = (log_gains @ x / (x @ x) for log_gains in (line, drawn))
    return Gains(
        cells=tuple(one.cell for one, _ in pairs),
        flops=tuple(np.exp(compute)),
        inside=tuple(inside.tolist()),
        points=tuple(map(interval, np.exp(at_points), np.exp(drawn_points.T), repeat(level))),
        line=tuple(map(interval, np.exp(line), np.exp(drawn.T), repeat(level))),
        growth=interval(10**growth, 10**drawn_growth, level),
    )


def _change(reference: Point, point: Point) -> float:
    """The paired difference of two log losses, over their common seeds."""
    seeds = sorted(point.losses.keys() & reference.losses.keys())
    own, base = (np.mean([one.losses[seed] for seed in seeds]) for one in (point, reference))
    return math.log(own / base)


def _noise(residuals: Floats, rng: np.random.Generator, draws: int) -> Floats:
    """Errors for refits, (draws, points): residuals around a fitted law, drawn with replacement and with random signs.

    Unlike normal errors they keep a point far off the law one point. Their scale is itself drawn from its distribution,
    which makes intervals of linear functions those of Student's t: the residuals of a dozen points do not determine it
    better.
    """
    n = len(residuals)
    scale = np.sqrt(n / rng.chisquare(max(n - COEFFICIENTS, 1), (draws, 1)))
    return np.asarray(scale * rng.choice((-1, 1), (draws, n)) * residuals[rng.integers(n, size=(draws, n))])


def _starts(log_losses: Floats) -> Floats:
    """Where the fits of a law start."""
    losses = np.exp(log_losses)
    shares, alphas, betas = np.array(STARTS).T
    rest = np.log((losses.mean() - shares * losses.min()) / 2)
    return np.stack([np.log(shares * losses.min()), rest, rest, alphas, betas], axis=1)


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
    flops, params, tokens = (np.log([getattr(one, key) for one in line]) for key in ("flops", "params", "tokens"))
    place = next(i for i, one in enumerate(line) if one.cell == point.cell)
    return float(np.gradient(params, flops)[place]), float(np.gradient(tokens, flops)[place])


def _is_reached(point: Point, reference: Sequence[Point]) -> bool:
    """Whether the point's loss is between the lowest and the highest that the reference has at the point's budget."""
    reached = [one.log_loss for one in reference if one.budget == point.budget]
    return min(reached) <= point.log_loss <= max(reached)
