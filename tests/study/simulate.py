"""How often a report is wrong: simulated studies whose truth is known, analysed in process, by the thousand.

    python -m tests.study.simulate --studies 2000 > rates.md

prints the table of docs/statistics.md. A study is a ladder of seven steps, or seven arms against a baseline; the
standard deviation of a run is 0.01 nats per token, and seeds share five times as much.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
from scipy import stats

from llama_lab.runs.record import Record, read_record
from llama_lab.study.report import analysis, comparisons
from llama_lab.study.report.result import Result
from llama_lab.study.study import Arm, Member, Study

from .synthetic import BASE_LOSS, BYTES_PER_TOKEN, write_run

ARMS = 8
RUN_SD = 0.01
SEED_SD = 5 * RUN_SD
PLANTED = 5  # run sd, at the step to arm 6
NOISY = 5  # times as noisy
RATES = (1e-3, 2e-3, 4e-3)
NAMES = tuple(f"arm{i}" for i in range(ARMS))
EQUAL = np.ones((ARMS, 1))

# (random, seeds) -> what each run adds to its arm
Noise = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Condition:
    """What a run adds to its arm.

    noise: (ARMS, seeds), or (rates, ARMS, seeds), in run sd. noisy: the arm that is. diverges: the noise above which a
    run does. is_promised: whether the power is a promise; it then takes all studies to measure, and else a quarter.
    """

    name: str
    noise: Noise
    noisy: int | None = None
    design: str = "ladder"
    diverges: float = math.inf
    is_promised: bool = False


def normal(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.standard_normal((ARMS, seeds))


def noisy_at(arm: int) -> np.ndarray:
    return np.where(np.arange(ARMS) == arm, NOISY, 1.0)[:, None]


def one_noisy(arm: int) -> Noise:
    return lambda random, seeds: noisy_at(arm) * normal(random, seeds)


def gradient(random: np.random.Generator, seeds: int) -> np.ndarray:
    return np.geomspace(3, 1 / 3, ARMS)[:, None] * normal(random, seeds)


def heavy(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.standard_t(3, (ARMS, seeds)) / math.sqrt(3)


def exponential(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.exponential(1, (ARMS, seeds))


def lognormal(random: np.random.Generator, seeds: int) -> np.ndarray:
    return random.lognormal(0, 1, (ARMS, seeds)) / math.sqrt((math.e - 1) * math.e)


def falling(random: np.random.Generator, seeds: int) -> np.ndarray:
    """What arms share within a seed falls by a fifth from arm to arm."""
    shared = [random.standard_normal(seeds)]
    for _ in range(ARMS - 1):
        shared.append(0.8 * shared[-1] + 0.6 * random.standard_normal(seeds))
    return 3 * np.array(shared) + 0.5 * normal(random, seeds)


def tuned(scale: np.ndarray) -> Noise:
    """Each judged run at the rate that is best on a tuning run of its own; the rates beside the best one cost 1 run sd.

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
    Condition("equal noise", normal, is_promised=True),
    Condition("an arm 5 times as noisy", one_noisy(3), noisy=3, is_promised=True),
    Condition("the first arm 5 times as noisy", one_noisy(0), noisy=0, is_promised=True),
    Condition("noise that falls 9-fold along the ladder", gradient),
    Condition("heavy tails (t with 3 df)", heavy),
    Condition("skew (exponential)", exponential),
    Condition("skew (lognormal)", lognormal),
    Condition("correlation that falls along the ladder", falling),
    Condition("rates tuned on seeds of their own", tuned(EQUAL)),
    Condition("rates tuned on seeds of their own, an arm 5 times as noisy", tuned(noisy_at(3)), noisy=3),
    Condition("rates chosen on the judged runs", swept(EQUAL)),
    Condition("rates chosen on the judged runs, an arm 5 times as noisy", swept(noisy_at(3)), noisy=3),
    Condition("the worst tenth of runs diverges", normal, diverges=1.2816),
    Condition("against a baseline, equal noise", normal, design="recipes"),
    Condition("against a baseline, another arm 5 times as noisy", one_noisy(3), noisy=3, design="recipes"),
    Condition("against a baseline 5 times as noisy", one_noisy(0), noisy=0, design="recipes"),
)


@dataclass(frozen=True)
class Verdicts:
    """What one report said; None where there is nothing to say.

    untouched, touching: whether it reported a step that is none, of those that do not touch the noisy arm, and of those
    that do. ends: whether it reported the last arm against the first. found: whether it reported the planted step.
    warned: whether it named an arm that varies more than others.
    """

    untouched: bool
    touching: bool | None
    ends: bool | None
    found: bool | None
    warned: bool


def simulate(index: int, seeds: int, planted: bool, draw: int) -> Verdicts:
    """One study of a condition, drawn and analysed."""
    condition = CONDITIONS[index]
    random = np.random.default_rng([draw, seeds, planted])
    noise = condition.noise(random, seeds)
    losses = BASE_LOSS + SEED_SD * random.standard_normal(seeds) + RUN_SD * noise
    if planted:
        after = slice(6, None) if condition.design == "ladder" else slice(6, 7)
        losses[..., after, :] += PLANTED * RUN_SD
    result = analysed(losses, noise > condition.diverges, condition.design)
    compared = [arm.to_previous or arm.to_baseline for arm in result.arms[1:]]
    noisy = "" if condition.noisy is None else NAMES[condition.noisy]
    null = [c for c in compared if c and not (planted and c.arm == NAMES[6])]
    ends = result.arms[-1].to_baseline if condition.design == "ladder" else None
    return Verdicts(
        untouched=any(c.change.significant for c in null if noisy not in (c.arm, c.against)),
        touching=any(c.change.significant for c in null if noisy in (c.arm, c.against)) if noisy else None,
        ends=ends.change.significant if ends and not planted else None,
        found=any(c.change.significant for c in compared if c and c.arm == NAMES[6]) if planted else None,
        warned=any(" as much over seeds as the typical arm" in warning for warning in result.warnings),
    )


def analysed(losses: np.ndarray, diverged: np.ndarray, design: str) -> Result:
    """The result of a study with these losses, (arms, seeds) or (rates, arms, seeds), without a file for each run."""
    rates: Sequence[float | None] = RATES if losses.ndim == 3 else (None,)
    losses, diverged = (array.reshape(len(rates), *losses.shape[-2:]) for array in (losses, diverged))
    records: dict[Path, Record] = {}
    arms = []
    for a, name in enumerate(NAMES):
        members = []
        for r, rate in enumerate(rates):
            for s in range(losses.shape[-1]):
                member = Member(f"{name}-{r}/seed={s}", s, rate)
                members.append(member)
                records[Path(member.folder)] = record(name, s, float(losses[r, a, s]), bool(diverged[r, a, s]))
        previous = NAMES[a - 1] if design == "ladder" and a else None
        arms.append(Arm(name, {"arm": name}, tuple(members), previous, 0.0))
    study = Study("simulated", design, NAMES[0], tuple(arms), "params")
    instead = {
        "is_run": lambda path: True,
        "read_record": records.__getitem__,
        "confounds": lambda *args: (),  # no verdict depends on these, and they take longer
        "_difference": lambda *args: {},
        "difference_curves": lambda *args: (),
    }
    unasked = {"seeds_needed": lambda *args: (None, None)}
    with patch.multiple(analysis, **instead), patch.multiple(comparisons, **unasked):
        return analysis.analyse(study, Path())


_template: list[Record] = []


def record(arm: str, seed: int, loss: float, diverged: bool) -> Record:
    """A run as it would be read."""
    if not _template:
        folder = Path(tempfile.mkdtemp()) / "run"
        write_run(folder, "arm", 1, BASE_LOSS)
        _template.append(read_record(folder))
    (found,) = _template
    config = found.config | {"seed": seed, "model.seed": seed, "data.seed": seed}
    if diverged:
        return replace(found, arm=arm, seed=seed, status="diverged", config=config, summary={}, metrics=[])
    summary = found.summary | {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / BYTES_PER_TOKEN}
    return replace(found, arm=arm, seed=seed, config=config, summary=summary, metrics=[])


def rate(verdicts: Sequence[bool | None]) -> str:
    """A percentage, with its 95% interval of Clopper and Pearson."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return ""
    interval = stats.binomtest(sum(known), len(known)).proportion_ci()
    return f"{100 * np.mean(known):.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def row(condition: Condition, seeds: int, studies: int, pool: ProcessPoolExecutor) -> str:
    """A line of the table."""

    def run(planted: bool, studies: int) -> list[Verdicts]:
        return list(
            pool.map(partial(simulate, CONDITIONS.index(condition), seeds, planted), range(studies), chunksize=50)
        )

    null, planted = run(False, studies), run(True, studies if condition.is_promised else studies // 4)
    false = (rate([getattr(verdicts, key) for verdicts in null]) for key in ("untouched", "touching", "ends", "warned"))
    return f"| {' | '.join([condition.name, str(seeds), *false, rate([verdicts.found for verdicts in planted])])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how often a report is wrong, in percent.")
    parser.add_argument("--studies", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--conditions", type=int, nargs="+", default=range(len(CONDITIONS)), help="by number, from 0")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    print("| condition | seeds | false reports | at the noisy arm | first against last | warned | 5 run sd found |")
    print("|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(args.workers) as pool:
        for seeds, index in product(args.seeds, args.conditions):
            print(row(CONDITIONS[index], seeds, args.studies, pool), flush=True)


if __name__ == "__main__":
    main()
