"""How often the intervals of a scaling study hold the truth: laws and gains that are known, fitted by the hundred.

    python -m tests.study.simulate_scaling --studies 1000

prints the table of docs/statistics.md. A study has two options at four sizes and three budgets, with three seeds.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from llama_lab.study.scaling_law import Point, fit_gains, fit_law

LAW = {"E": 1.7, "A": 400.0, "B": 410.0, "alpha": 0.34, "beta": 0.28}
SIZES, BUDGETS = (1e6, 4e6, 16e6, 64e6), (5.0, 10.0, 20.0)
COLUMNS = ("E", "alpha", "beta", "gamma", "gain", "growth", "gain at a point")


@dataclass(frozen=True)
class Condition:
    """A study. noise: of a run, in log loss. shared: what all options have in common at one seed, size and budget.

    misfit: of a size and budget, in all options and seeds. gain: at 1e15 FLOPs. growth: with each tenfold of compute.
    """

    name: str
    noise: float = 0.002
    shared: float = 0.0
    misfit: float = 0.0
    gain: float = 1.5
    growth: float = 1.0
    seeds: int = 3


CONDITIONS = (
    Condition("equal noise"),
    Condition("one seed", seeds=1),
    Condition("noise of 0.5%", noise=0.005),
    Condition("seeds share 1%", shared=0.01),
    Condition("a law that is off by 0.5%", misfit=0.005),
)


def law(params: float, tokens: float) -> float:
    return LAW["E"] + LAW["A"] / params ** LAW["alpha"] + LAW["B"] / tokens ** LAW["beta"]


def true_gain(condition: Condition, flops: float) -> float:
    return condition.gain * condition.growth ** math.log10(flops / 1e15)


def draw(condition: Condition, random: np.random.Generator) -> tuple[list[Point], list[Point]]:
    """The points of the reference, and of an option with the gain of the condition."""
    found: tuple[list[Point], list[Point]] = ([], [])
    for params in SIZES:
        for budget in BUDGETS:
            tokens = budget * params
            flops = 6 * params * tokens
            misfit = condition.misfit * random.standard_normal()
            shared = misfit + condition.shared * random.standard_normal(condition.seeds)
            for points, gain in zip(found, (1.0, true_gain(condition, flops)), strict=True):
                scale = math.sqrt(gain)
                noise = random.standard_normal(condition.seeds)
                losses = law(scale * params, scale * tokens) * np.exp(shared + condition.noise * noise)
                points.append(Point(f"{params:g}", budget, params, tokens, flops, dict(enumerate(losses.tolist()))))
    return found


def held(condition: Condition, seed: int, draws: int = 500) -> dict[str, float]:
    """Whether each interval of one study holds the truth; of the points the fraction that do."""
    random = np.random.default_rng(seed)
    reference, option = draw(condition, random)
    fitted, (gains,) = fit_law(reference, random, draws), fit_gains(reference, [option], random, draws)
    gamma = LAW["alpha"] * LAW["beta"] / (LAW["alpha"] + LAW["beta"])
    truths = {name: LAW.get(name, gamma) for name in COLUMNS[:4]}
    found = {name: fitted.estimate(name) for name in truths}
    middle = gains.central
    assert middle is not None
    found |= {"gain": gains.line[middle], "growth": gains.growth}
    truths |= {"gain": true_gain(condition, gains.flops[middle]), "growth": condition.growth}
    hits = {name: float(one.low <= truths[name] <= one.high) for name, one in found.items()}
    points = [
        one.low <= true_gain(condition, flops) <= one.high for one, flops in zip(gains.points, gains.flops, strict=True)
    ]
    return hits | {"gain at a point": float(np.mean(points))}


def coverage(condition: Condition, studies: int, workers: int = 2) -> dict[str, float]:
    """The fraction of studies whose intervals hold the truth."""
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(workers) as pool:
        for hits in pool.map(partial(held, condition), range(studies), chunksize=5):
            total.update(hits)
    return {name: total[name] / studies for name in COLUMNS}


def rows(conditions: Sequence[Condition], studies: int) -> Iterator[str]:
    yield f"| condition | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for condition in conditions:
        shares = coverage(condition, studies)
        yield f"| {condition.name} | {' | '.join(f'{100 * shares[name]:.1f}' for name in COLUMNS)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=1000)
    for row in rows(CONDITIONS, parser.parse_args().studies):
        print(row, flush=True)
