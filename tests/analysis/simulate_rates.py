"""How often a ladder of arms that are equal at their own best learning rates reports a step.

    python -m tests.analysis.simulate_rates --studies 4000

prints the table of docs/statistics.md. The optimum of each arm lies anywhere within 1.5 steps of the grid's middle; its
loss rises with the distance from there, in grid steps, as the condition says. Runs have noise, tuning runs too. Where
one arm has a cliff beside its optimum, its optimum lies within one step of the middle, so that some rate of the grid is
on its right side. The last row has all arms at their optima: what the others have above it comes from the rates.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from llama_lab.analysis.rate_choice import (
    Losses,
    best_rate,
    chosen_rate,
    is_beside_cliff,
    rate_beyond,
    rates_between,
    with_collapsed,
)
from llama_lab.analysis.statistics import judge
from llama_lab.study.design.tuning import MOST_EXTENSIONS
from tests.analysis.simulate import ARMS, LADDER, rate

GRID = (1e-3, 3e-3, 9e-3)
STEP = math.log(3)
FARTHEST = 1.5  # grid steps from the middle of the grid to an optimum
SIGNS = np.array([[(i == arm) - (i == against) for i in range(ARMS)] for arm, against in LADDER])
COLLAPSED, ENTROPY = 130.0, 150.0  # above the optimum's loss, in sd, as in the ladder's vanilla arm
PUBLISHED = 2_000_000  # the seed of the published rows; others were used to choose the method


@dataclass(frozen=True)
class Condition:
    """excess: of the loss over the optimum's, in sd, by the distance from it in grid steps.

    cliff: the factor of its optimum beyond which the fourth arm collapses. tuning_seeds: as `study.tuning_seeds`;
    None: one for each judged seed. knows_cliffs: whether collapsed runs count as diverged.
    """

    name: str
    excess: Callable[[float], float]
    is_refined: bool = True
    cliff: float | None = None
    tuning_seeds: int | None = None
    knows_cliffs: bool = True


def parabola(curvature: float, distance: float) -> float:
    return curvature * distance**2


def steeper_above(curvature: float, distance: float) -> float:
    """As curved at the optimum; its curvature doubles with every grid step."""
    growth = math.log(2)
    return curvature * 2 / growth**2 * (math.exp(growth * distance) - growth * distance - 1)


def diverging(curvature: float, distance: float) -> float:
    """Runs diverge from 0.7 grid steps above the optimum."""
    return curvature * distance**2 if distance < 0.7 else math.inf


CONDITIONS = (
    Condition("best of the grid, 5 sd per factor of 3", partial(parabola, 5), is_refined=False),
    Condition("best of the grid, 20 sd", partial(parabola, 20), is_refined=False),
    Condition("as studies tune, 5 sd", partial(parabola, 5)),
    Condition("as studies tune, 20 sd", partial(parabola, 20)),
    Condition("20 sd, steeper above the optimum", partial(steeper_above, 20)),
    Condition("20 sd, runs diverge from a factor of 2.2 above the optimum", partial(diverging, 20)),
    Condition("20 sd, an arm collapses 1.12 times above its optimum", partial(parabola, 20), cliff=1.12),
    Condition("the same, 1.12 times below", partial(parabola, 20), cliff=1 / 1.12),
    Condition("the same, above, two tuning seeds in turn", partial(parabola, 20), cliff=1.12, tuning_seeds=2),
    Condition("the same, above, and collapsed runs count", partial(parabola, 20), cliff=1.12, knows_cliffs=False),
    Condition("all arms at their optima", partial(parabola, 0)),
)


def has_collapsed(condition: Condition, ratio: float) -> bool:
    """Whether a run at such a ratio of its rate to the optimum is beyond the cliff."""
    return condition.cliff is not None and (ratio > condition.cliff if condition.cliff > 1 else ratio < condition.cliff)


def tune(condition: Condition, excess: Callable[[float], float], noise: Callable[[], float]) -> tuple[float, int]:
    """The excess loss at the rate that one tuning seed chooses, in sd, and the number of its runs.

    excess: in sd, by the rate.
    """

    def seen(losses: Losses) -> Losses:
        return with_collapsed(losses, ENTROPY if condition.knows_cliffs else None)

    losses = {rate: excess(rate) + noise() for rate in GRID}
    while len(losses) < len(GRID) + MOST_EXTENSIONS and (beyond := rate_beyond(seen(losses))):
        losses[beyond] = excess(beyond) + noise()
    if not condition.is_refined:
        return excess(best_rate(losses)), len(losses)
    losses |= {rate: excess(rate) + noise() for rate in rates_between(seen(losses))}
    if is_beside_cliff(seen(losses)):
        losses |= {rate: excess(rate) + noise() for rate in rates_between(seen(losses))}
    return excess(chosen_rate(seen(losses))), len(losses)


def is_reported(losses: np.ndarray) -> bool:
    """Whether a report calls any difference of a ladder significant. losses: (arms, seeds)."""
    found = judge(list(SIGNS @ losses), SIGNS @ SIGNS.T / 2)
    return any(not contrast.low <= 0 <= contrast.high for contrast in found)


def ladder(condition: Condition, random: np.random.Generator, seeds: int) -> tuple[np.ndarray, float]:
    """The excess losses of the judged runs of a ladder, (arms, seeds) in sd, and the tuning runs for each."""
    farthest = FARTHEST if condition.cliff is None else 1
    optima = GRID[1] * 3 ** random.uniform(-farthest, farthest, ARMS)
    tuning_seeds = condition.tuning_seeds or seeds
    tuned = np.empty((ARMS, tuning_seeds, 2))
    for arm, optimum in enumerate(optima):

        def excess(rate: float, arm: int = arm, optimum: float = optimum) -> float:
            if arm == 3 and has_collapsed(condition, rate / optimum):
                return COLLAPSED
            return condition.excess(math.log(rate / optimum) / STEP)

        tuned[arm] = [tune(condition, excess, random.standard_normal) for _ in range(tuning_seeds)]
    in_turn = np.arange(seeds) % tuning_seeds
    return tuned[:, in_turn, 0], float(tuned[..., 1].sum() / ARMS / seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how often equal arms at tuned rates differ, in percent.")
    parser.add_argument("--studies", type=int, default=4_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--draw", type=int, default=PUBLISHED)
    args = parser.parse_args()
    print("| condition | seeds | tuning runs per judged run | loss above the optimum, sd | false reports |")
    print("|---|---|---|---|---|")
    for seeds in args.seeds:
        for index, condition in enumerate(CONDITIONS):
            random = np.random.default_rng([args.draw, seeds, index])
            drawn = [ladder(condition, random, seeds) for _ in range(args.studies)]
            excess = np.array([losses for losses, _ in drawn])
            false = [is_reported(losses) for losses in excess + random.standard_normal(excess.shape)]
            runs = np.mean([runs for _, runs in drawn])
            cells = (condition.name, seeds, f"{runs:.1f}", f"{excess.mean():.2f}", rate(false))
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
