"""How often studies that are tested again after each added seed are wrong, and how many seeds they take.

    python -m tests.analysis.simulate_added_seeds

prints the table of docs/statistics.md. A study has reports at 3 to 8 seeds. Conditions and sd are those of
`tests.analysis.simulate`.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from llama_lab.analysis.power import LEVEL
from llama_lab.analysis.statistics import PairedDifference, judge
from llama_lab.runs.study import Study
from tests.analysis.simulate import ARMS, CONDITIONS, Condition, rate

FIRST, MOST = 3, 8  # seeds
PLANTED = (3, 5)  # sd, at arm 6
MARGIN = 3  # sd, of `study.add_seeds`
SIMULATED = (
    "equal noise",
    "an arm 5 times as noisy",
    "sd of e^N(0, 0.7) per arm",
    "against a baseline, equal noise",
    "against a baseline, another arm 5 times as noisy",
    "three arms, equal noise",
    "three arms, another arm 5 times as noisy",
)
COLUMNS = (
    "5% at each report",
    "`study.max_seeds=8`",
    "`study.add_seeds`",
    "its seeds per arm",
    "3 sd found by 8 seeds",
    "seeds",
    "5 sd found by 8 seeds",
    "seeds",
)


@dataclass(frozen=True)
class Simulated:
    """What the reports of one study find where no arm differs, and at how many seeds they find a difference.

    false_at_5, false, false_adding: whether any report is false, each at 5%, with `study.max_seeds`, and with
    `study.add_seeds` too. seeds_per_arm: that `study.add_seeds` trains. found_at: seeds of the first report that finds
    a difference of each size of PLANTED, with `study.max_seeds`; MOST + 1 if none does.
    """

    false_at_5: bool
    false: bool
    false_adding: bool
    seeds_per_arm: float
    found_at: tuple[int, ...]


def share_at(seeds: int, report: int) -> float:
    """The share of the level that this number of seeds has in the report at `report` seeds."""
    study = Study("", "", "", (), max_seeds=MOST, reported_seeds=tuple(range(FIRST, report)))
    return study.level_share(seeds)


def judged(
    condition: Condition, noise: np.ndarray, seeds: Sequence[int], shares: Sequence[float]
) -> list[PairedDifference]:
    """The tests of all pairs. seeds, shares: of each pair."""
    signs = np.array([[(i == arm) - (i == against) for i in range(ARMS)] for arm, against in condition.pairs])
    samples = [(sign @ noise)[:n] for sign, n in zip(signs, seeds, strict=True)]
    return judge(samples, signs @ signs.T / 2, shares)


def any_significant(found: Sequence[PairedDifference]) -> bool:
    return any(one.significant for one in found)


def add_seeds(
    condition: Condition, noise: np.ndarray, of_equal_seeds: Mapping[int, list[PairedDifference]]
) -> tuple[bool, float]:
    """Whether a report of `study.add_seeds` is false, and the seeds that it trains of each arm.

    of_equal_seeds: the tests of reports in which all arms have equally many seeds.
    """
    arms = {arm for pair in condition.pairs for arm in pair}
    trained = dict.fromkeys(arms, FIRST)
    is_false = False
    for report in range(FIRST, MOST + 1):
        seeds = [min(trained[arm], trained[against]) for arm, against in condition.pairs]
        if report not in seeds:
            break
        found = of_equal_seeds[report]
        if min(seeds) < report:
            found = judged(condition, noise, seeds, [share_at(n, report) for n in seeds])
        is_false |= any_significant(found)
        for pair, n, one in zip(condition.pairs, seeds, found, strict=True):
            if n == report < MOST and one.is_undecided(MARGIN):
                trained.update(dict.fromkeys(pair, report + 1))
    return is_false, float(np.mean([*trained.values()]))


def simulate(index: int, draw: int) -> Simulated:
    """One study of a condition, drawn and judged at every number of seeds."""
    condition = CONDITIONS[index]
    noise = condition.noise(np.random.default_rng([index, MOST, draw]), MOST)
    planted = next(i for i, pair in enumerate(condition.pairs) if pair[0] == 6)
    false_at_5 = is_false = False
    found_at = dict.fromkeys(PLANTED, MOST + 1)
    reports: dict[int, list[PairedDifference]] = {}
    for n in range(FIRST, MOST + 1):
        share, pairs = share_at(n, n), len(condition.pairs)
        found = reports[n] = judged(condition, noise, [n] * pairs, [share] * pairs)
        false_at_5 |= any(one.p * share < LEVEL for one in found)
        is_false |= any_significant(found)
        half = (found[planted].high - found[planted].low) / 2
        for size in PLANTED:
            if abs(found[planted].mean + size) > half:
                found_at[size] = min(found_at[size], n)
    false_adding, seeds_per_arm = add_seeds(condition, noise, reports)
    return Simulated(false_at_5, is_false, false_adding, seeds_per_arm, tuple(found_at.values()))


def cells(studies: Sequence[Simulated]) -> list[str]:
    """The columns of a row."""
    found = [
        rate([one.false_at_5 for one in studies]),
        rate([one.false for one in studies]),
        rate([one.false_adding for one in studies]),
        f"{np.mean([one.seeds_per_arm for one in studies]):.1f}",
    ]
    for of_size in np.array([one.found_at for one in studies]).T:
        found.append(rate(of_size <= MOST))
        found.append(f"{np.minimum(of_size, MOST).mean():.1f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how often reports after each added seed are wrong, in percent.")
    parser.add_argument("--studies", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    print(f"| condition | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}")
    names = [condition.name for condition in CONDITIONS]
    with ProcessPoolExecutor(args.workers) as pool:
        for name in SIMULATED:
            simulated = partial(simulate, names.index(name))
            studies = list(pool.map(simulated, range(args.studies), chunksize=50))
            print(f"| {' | '.join([name, *cells(studies)])} |", flush=True)


if __name__ == "__main__":
    main()
