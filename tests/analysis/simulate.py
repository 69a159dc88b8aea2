"""How often a report is wrong: simulated studies whose truth is known, judged in process, by the thousand.

    python -m tests.analysis.simulate

prints the table of docs/statistics.md. A study is a ladder of seven steps, the last arm against the first in its
family, or seven arms, or two, against a baseline. Losses are in standard deviations of a run; what seeds share cancels.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy import stats

from llama_lab.analysis.statistics import judge

ARMS = 8
STEP = 5  # sd, at arm 6: planted, or the margin
RATES = (1e-3, 2e-3, 4e-3)
EQUAL = np.ones((ARMS, 1))
LADDER = [*((arm, arm - 1) for arm in range(1, ARMS)), (ARMS - 1, 0)]
RECIPES = [(arm, 0) for arm in range(1, ARMS)]
THREE = RECIPES[4:6]

# (random, seeds) -> what each run adds to its arm
Noise = Callable[[np.random.Generator, int], np.ndarray]
Verdicts = tuple[bool, ...]  # of one study, in the order of COLUMNS
COLUMNS = ("false reports", "by paired t-tests", "equivalence", "5 sd found", "by paired t-tests")


@dataclass(frozen=True)
class Condition:
    """What a run adds to its arm.

    noise: (ARMS, seeds), or (rates, ARMS, seeds), in sd. pairs: that are tested. diverges: the noise above which a
    run does.
    """

    name: str
    noise: Noise
    pairs: Sequence[tuple[int, int]] = tuple(LADDER)
    diverges: float = math.inf


def normal(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.standard_normal((ARMS, seeds))


def noisy_at(*arms: int, times: float = 5) -> np.ndarray:
    return np.where(np.isin(np.arange(ARMS), arms), times, 1.0)[:, None]


def noisy(*arms: int, times: float = 5, noise: Noise = normal) -> Noise:
    return lambda random, seeds: noisy_at(*arms, times=times) * noise(random, seeds)


def unequal(random: np.random.Generator, seeds: int) -> np.ndarray:
    return np.exp(0.7 * random.standard_normal((ARMS, 1))) * normal(random, seeds)


def neighbours(correlation: float) -> Noise:
    """Of arms next to each other; others are independent."""
    share = (1 - math.sqrt(1 - 4 * correlation**2)) / (2 * correlation)

    def noise(random: np.random.Generator, seeds: int) -> np.ndarray:
        drawn = random.standard_normal((ARMS + 1, seeds))
        return (drawn[1:] + share * drawn[:-1]) / math.sqrt(1 + share**2)

    return noise


def midway(random: np.random.Generator, seeds: int) -> np.ndarray:
    """What seeds share is another thing from the fifth arm on."""
    return normal(random, seeds) + (np.arange(ARMS) >= 4)[:, None] * 5 * random.standard_normal(seeds)


def gradient(random: np.random.Generator, seeds: int) -> np.ndarray:
    return np.geomspace(3, 1 / 3, ARMS)[:, None] * normal(random, seeds)


def heavy(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.standard_t(3, (ARMS, seeds)) / math.sqrt(3)


def exponential(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.exponential(1, (ARMS, seeds)) - 1


def lognormal(random: np.random.Generator, seeds: int) -> np.ndarray:
    return (random.lognormal(0, 1, (ARMS, seeds)) - math.sqrt(math.e)) / math.sqrt((math.e - 1) * math.e)


def falling(random: np.random.Generator, seeds: int) -> np.ndarray:
    """What arms share within a seed falls by a fifth from arm to arm."""
    shared = [random.standard_normal(seeds)]
    for _ in range(ARMS - 1):
        shared.append(0.8 * shared[-1] + 0.6 * random.standard_normal(seeds))
    return 3 * np.array(shared) + 0.5 * normal(random, seeds)


def bimodal(random: np.random.Generator, seeds: int) -> np.ndarray:
    """Two in five seeds of an arm end 8 sd above its others; its mean is that of the other arms."""
    noise = normal(random, seeds)
    noise[3] += 8 * ((random.random(seeds) < 0.4) - 0.4)
    return noise


def tuned(scale: np.ndarray) -> Noise:
    """Each judged run at the rate that is best on a tuning run of its own; the rates beside the best one cost 1 sd.

    scale: of each arm's noise.
    """
    cost = np.abs(np.log2(np.array(RATES) / RATES[1]))

    def noise(random: np.random.Generator, seeds: int) -> np.ndarray:
        tuning = cost[:, None, None] + scale * random.standard_normal((len(RATES), ARMS, seeds))
        return cost[tuning.argmin(axis=0)] + scale * normal(random, seeds)

    return noise


def swept(scale: np.ndarray) -> Noise:
    """Every rate at every judged seed, for the analysis to choose among."""
    return lambda random, seeds: scale * random.standard_normal((len(RATES), ARMS, seeds))


CONDITIONS = (
    Condition("equal noise", normal),
    Condition("an arm 5 times as noisy", noisy(3)),
    Condition("the first arm 5 times as noisy", noisy(0)),
    Condition("an arm 10 times as noisy", noisy(3, times=10)),
    Condition("half of the arms 10 times as noisy", noisy(0, 1, 2, 3, times=10)),
    Condition("every other arm 10 times as noisy", noisy(0, 2, 4, 6, times=10)),
    Condition("sd of e^N(0, 0.7) per arm", unequal),
    Condition("noise that falls 9-fold along the ladder", gradient),
    Condition("heavy tails (t with 3 df)", heavy),
    Condition("skew (exponential)", exponential),
    Condition("skew (lognormal)", lognormal),
    Condition("skew (lognormal), an arm 10 times as noisy", noisy(3, times=10, noise=lognormal)),
    Condition("neighbours that correlate by 0.4", neighbours(0.4)),
    Condition("neighbours that correlate by -0.4", neighbours(-0.4)),
    Condition("correlation that falls along the ladder", falling),
    Condition("seed effects that change midway", midway),
    Condition("rates tuned on seeds of their own", tuned(EQUAL)),
    Condition("rates tuned on seeds of their own, an arm 5 times as noisy", tuned(noisy_at(3))),
    Condition("rates chosen on the judged runs", swept(EQUAL)),
    Condition("rates chosen on the judged runs, an arm 5 times as noisy", swept(noisy_at(3))),
    Condition("the worst tenth of runs diverges", normal, diverges=1.2816),
    Condition("against a baseline, equal noise", normal, RECIPES),
    Condition("against a baseline, another arm 5 times as noisy", noisy(3), RECIPES),
    Condition("against a baseline 5 times as noisy", noisy(0), RECIPES),
    Condition("against a baseline, another arm 10 times as noisy", noisy(3, times=10), RECIPES),
    Condition("against a baseline, half of the arms 10 times as noisy", noisy(1, 2, 3, 4, times=10), RECIPES),
    Condition("against a baseline, sd of e^N(0, 0.7) per arm", unequal, RECIPES),
    Condition("three arms, equal noise", normal, THREE),
    Condition("three arms, another arm 5 times as noisy", noisy(5), THREE),
    Condition("three arms, the baseline 5 times as noisy", noisy(0), THREE),
    Condition("three arms, another arm 10 times as noisy", noisy(5, times=10), THREE),
    Condition("two in five seeds of an arm 8 sd higher", bimodal),
)


def simulate(index: int, seeds: int, draw: int) -> Verdicts:
    """One study of a condition, drawn and judged; all differences are zero, but for what its columns suppose."""
    condition = CONDITIONS[index]
    noise = condition.noise(np.random.default_rng([index, seeds, draw]), seeds)
    if noise.ndim == 3:  # as a report chooses among judged runs
        noise = noise[noise.mean(axis=2).argmin(axis=0), np.arange(ARMS)]
    whole = (noise <= condition.diverges).all(axis=1)
    pairs = [(arm, against) for arm, against in condition.pairs if whole[arm] and whole[against]]
    planted = next((i for i, pair in enumerate(pairs) if pair[0] == 6), None)
    if not pairs:
        return False, False, False, False, False
    signs = np.array([[(i == arm) - (i == against) for i in range(ARMS)] for arm, against in pairs])
    samples = signs @ noise
    found = judge(list(samples), signs @ signs.T / 2)
    means, highs = (np.array([getattr(contrast, name) for contrast in found]) for name in ("mean", "high"))
    half = highs - means
    paired = stats.t.isf(0.025 / len(pairs), seeds - 1) * samples.std(axis=1, ddof=1) / math.sqrt(seeds)
    return (
        bool((abs(means) > half).any()),
        bool((abs(means) > paired).any()),
        bool(((highs < 0) & (means - half > -2 * STEP)).any()),
        *(planted is not None and bool(abs(means[planted] + STEP) > width[planted]) for width in (half, paired)),
    )


def rate(verdicts: Sequence[bool]) -> str:
    """A percentage, with its 95% interval of Clopper and Pearson."""
    interval = stats.binomtest(sum(map(bool, verdicts)), len(verdicts)).proportion_ci()
    return f"{100 * np.mean(verdicts):.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how often a report is wrong, in percent.")
    parser.add_argument("--studies", type=int, default=4_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--conditions", type=int, nargs="+", default=range(len(CONDITIONS)), help="by number, from 0")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    print(f"| condition | seeds | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}")
    with ProcessPoolExecutor(args.workers) as pool:
        for seeds in args.seeds:
            for index in args.conditions:
                verdicts = pool.map(partial(simulate, index, seeds), range(args.studies), chunksize=100)
                rates = (rate(column) for column in zip(*verdicts, strict=True))
                print(f"| {' | '.join([CONDITIONS[index].name, str(seeds), *rates])} |", flush=True)


if __name__ == "__main__":
    main()
