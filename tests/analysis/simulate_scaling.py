"""How often the intervals of a scaling study hold the truth: laws and gains that are known, fitted by the hundred.

    python -m tests.analysis.simulate_scaling --studies 1000

prints the table of docs/statistics.md. A study has two options at four sizes and three budgets, with three seeds.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import brentq

from llama_lab.analysis.power import LEVEL
from llama_lab.analysis.scaling_law import Point, fit_gains, fit_law

LAW = {"E": 1.7, "A": 400.0, "B": 410.0, "alpha": 0.34, "beta": 0.28}
SIZES, BUDGETS = (1e6, 4e6, 16e6, 64e6), (5.0, 10.0, 20.0)
COEFFICIENTS = ("E", "alpha", "beta", "gamma")
COVERED = (*COEFFICIENTS, "gain", "gain in each cell", "growth", "gain at a point")
COLUMNS = (*COVERED, "not straight", "false trend untested", "false trend")
TRUE = 1e-6  # the smallest change of the log10 gain with every tenfold of compute that is one
CROSSING = 8e6  # parameters at which laws of unequal alpha are equal


@dataclass(frozen=True)
class Condition:
    """A study. noise: of a run, in log loss. shared: what all options have in common at one seed, size and budget.

    misfit: of a size and budget, in all options and seeds. gain: at 1e15 FLOPs. growth: with each tenfold of compute.
    alpha: the option's exponent of the parameters; its law crosses the reference's. outlier: by how much the log losses
    of the option are higher at one size and budget. spread: standard deviation of the log noise over points. falling:
    noise at each size over that of the next. breaks: parameters from which the reference's law has the exponent
    late_alpha, and ten times as many tokens from which it has late_beta; so has the option's, to which the same compute
    is worth `gain` times as much.
    """

    name: str
    noise: float = 0.002
    shared: float = 0.0
    misfit: float = 0.0
    gain: float = 1.5
    growth: float = 1.0
    seeds: int = 3
    alpha: float = LAW["alpha"]
    outlier: float = 0.0
    spread: float = 0.0
    falling: float = 1.0
    breaks: float = math.inf
    late_alpha: float = LAW["alpha"]
    late_beta: float = LAW["beta"]


CONDITIONS = (
    Condition("equal noise"),
    Condition("one seed", seeds=1),
    Condition("noise of 0.5%", noise=0.005),
    Condition("seeds share 1%", shared=0.01),
    Condition("a law that is off by 0.5%", misfit=0.005),
    Condition("crossing laws", gain=1.0, alpha=0.38),
    Condition("crossing laws, noise of e^N(0, 0.7)", gain=1.0, alpha=0.38, spread=0.7),
    Condition("a point 2% off", outlier=0.02),
    Condition("noise of e^N(0, 0.7)", spread=0.7),
    Condition("noise that falls 8-fold with size", falling=2.0),
    Condition("alpha falls by 0.1 at 4M parameters", breaks=4e6, late_alpha=0.24),
    Condition("alpha rises by 0.1 at 4M parameters", breaks=4e6, late_alpha=0.44),
    Condition("alpha falls by 0.1 at 16M parameters", breaks=16e6, late_alpha=0.24),
    Condition("alpha rises by 0.1 at 16M parameters", breaks=16e6, late_alpha=0.44),
    Condition("beta falls by 0.1 at 40M tokens", breaks=4e6, late_beta=0.18),
    Condition("beta rises by 0.1 at 40M tokens", breaks=4e6, late_beta=0.38),
    Condition("beta falls by 0.1 at 160M tokens", breaks=16e6, late_beta=0.18),
    Condition("beta rises by 0.1 at 160M tokens", breaks=16e6, late_beta=0.38),
)


def law(condition: Condition, params: float, tokens: float, alpha: float = LAW["alpha"]) -> float:
    """The loss without noise, whose exponents change at the condition's break."""
    scale = LAW["A"] * CROSSING ** (alpha - LAW["alpha"])
    by_params = scale / params**alpha
    by_tokens = LAW["B"] / tokens ** LAW["beta"]
    beyond = max(params / condition.breaks, 1.0), max(tokens / (10 * condition.breaks), 1.0)
    by_params *= beyond[0] ** (LAW["alpha"] - condition.late_alpha)
    by_tokens *= beyond[1] ** (LAW["beta"] - condition.late_beta)
    return LAW["E"] + by_params + by_tokens


def option_loss(condition: Condition, params: float, tokens: float) -> float:
    """The option's loss without noise, by its gain or by a law that crosses the reference's."""
    scale = math.sqrt(condition.gain * condition.growth ** math.log10(6 * params * tokens / 1e15))
    return law(condition, scale * params, scale * tokens, condition.alpha)


def true_gain(condition: Condition, params: float, tokens: float) -> float:
    """The reference's compute for the option's loss, at as many tokens per parameter, over the option's."""
    loss = option_loss(condition, params, tokens)
    return brentq(lambda scale: law(condition, scale * params, scale * tokens) - loss, 1e-3, 1e3) ** 2


def draw(condition: Condition, random: np.random.Generator) -> tuple[list[Point], list[Point]]:
    """The points of the reference, and of an option with the gain of the condition."""
    found: tuple[list[Point], list[Point]] = ([], [])
    cells = [(params, budget) for params in SIZES for budget in BUDGETS]
    odd = random.integers(len(cells)) if condition.outlier else None
    for i, (params, budget) in enumerate(cells):
        tokens = budget * params
        misfit = condition.misfit * random.standard_normal()
        shared = misfit + condition.shared * random.standard_normal(condition.seeds)
        spread = condition.noise * condition.falling ** -SIZES.index(params)
        for points, loss in zip(
            found, (law(condition, params, tokens), option_loss(condition, params, tokens)), strict=True
        ):
            noise = spread * random.standard_normal(condition.seeds)
            if condition.spread:
                noise *= math.exp(condition.spread * random.standard_normal())
            off = condition.outlier if i == odd and points is found[1] else 0.0
            losses = loss * np.exp(shared + noise + off)
            points.append(
                Point(f"{params:g}", budget, params, tokens, 6 * params * tokens, dict(enumerate(losses.tolist())))
            )
    return found


def held(condition: Condition, seed: int, draws: int) -> dict[str, float]:
    """Whether each interval of one study holds the truth, of the points the fraction that do, and of its trend.

    Untested: without the test that the gains follow a line.
    """
    random = np.random.default_rng(seed)
    reference, option = draw(condition, random)
    fitted = fit_law(reference, random, draws)
    (gains,) = fit_gains(fitted, reference, [option], random)
    gamma = LAW["alpha"] * LAW["beta"] / (LAW["alpha"] + LAW["beta"])
    truths = {name: LAW.get(name, gamma) for name in COEFFICIENTS}
    found = {name: fitted.estimate(name) for name in truths}
    middle = gains.central
    assert middle is not None
    truth = {gain.point.cell: true_gain(condition, gain.point.params, gain.point.tokens) for gain in gains.every}
    log_compute = np.log10([gain.point.flops for gain in gains.every])
    found |= {"gain": middle.line, "growth": gains.growth}
    growth = float(np.polyfit(log_compute, np.log10([*truth.values()]), 1)[0])
    truths |= {"gain": truth[middle.point.cell], "growth": 10**growth}
    hits = {name: float(one.low <= truths[name] <= one.high) for name, one in found.items()}
    for name, part in (("gain in each cell", "line"), ("gain at a point", "alone")):
        inside = [(getattr(gain, part), truth[gain.point.cell]) for gain in gains.reached]
        hits[name] = float(np.mean([one.low <= true <= one.high for one, true in inside]))
    hits["not straight"] = float(gains.lack_of_fit < LEVEL)
    for name, trend in (("false trend untested", replace(gains, lack_of_fit=1.0).trend), ("false trend", gains.trend)):
        hits[name] = float((trend == "grows" and growth < TRUE) or (trend == "shrinks" and growth > -TRUE))
    return hits


def coverage(condition: Condition, studies: int, draws: int = 500, workers: int = 2) -> dict[str, float]:
    """The fraction of studies whose intervals hold the truth, and that state a trend, by column."""
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(workers) as pool:
        for hits in pool.map(partial(held, condition, draws=draws), range(studies), chunksize=5):
            total.update(hits)
    return {name: total[name] / studies for name in COLUMNS}


def rows(conditions: Sequence[Condition], studies: int, workers: int) -> Iterator[str]:
    """A table; no interval of a law's coefficients has a truth where its exponents change."""
    yield f"| condition | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for condition in conditions:
        shares = {name: f"{100 * share:.1f}" for name, share in coverage(condition, studies, workers=workers).items()}
        if math.isfinite(condition.breaks):
            shares |= dict.fromkeys(COEFFICIENTS, "\u2013")
        yield f"| {condition.name} | {' | '.join(shares.values())} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for row in rows(CONDITIONS, options.studies, options.workers):
        print(row, flush=True)
