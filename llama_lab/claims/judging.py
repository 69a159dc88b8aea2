"""Verdicts on statements, computed from paired differences over seeds."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from scipy import stats

from llama_lab.analysis.power import LEVEL, smallest_difference
from llama_lab.analysis.result import ArmResult, Comparison, Result
from llama_lab.analysis.statistics import paired_difference
from llama_lab.runs.study import BATCH

from .claim import Figure, Statement
from .facts import FACTS

# What contradicts the source comes first.
Word = Literal["opposite", "does not hold", "direction holds, size does not", "holds", "not decided", "not run"]
WORDS = get_args(Word)
DECIDED = WORDS[:4]
UNITS = {
    "loss": "nats per token, {} seeds",
    "average": "nats per token of averages of the weights, {} seeds",
    "longest": "nats per token in the last of the windows evaluated, {} seeds",
    "train": "in the logarithm of training speed, {} rounds",
    "decode": "in the logarithm of decoding speed, {} rounds",
    "decode_batch": f"in the logarithm of the speed of decoding {BATCH} sequences, {{}} rounds",
}


@dataclass(frozen=True)
class Verdict:
    """A verdict with the sentence that supports it."""

    word: Word
    why: str


def verdict(said: Statement, result: Result) -> Verdict:
    """The verdict on a statement by a study."""
    found = comparison(said, result)
    if found is None or found.change.n < 2:
        return judge(said, found)
    is_loss, sd = said.quantity == "loss", found.change.sd / 2**0.5
    arms, tests = (len(result.arms), len(result.study.family) + len(result.study.ends)) if is_loss else (2, 1)
    return judge(said, found, sd * smallest_difference(arms, found.change.n, tests))


def comparison(said: Statement, result: Result) -> Comparison | None:
    """A statement's two arms: of losses the study's test, else a paired t-test; None if they were not run."""
    if said.quantity == "loss":
        tested = (*result.pairs, *(one for arm in result.arms for one in (arm.to_previous, arm.to_baseline) if one))
        pairs = (*tested, *map(turned, tested))
        return next((one for one in pairs if (one.arm, one.against) == (said.arm, said.against)), None)
    of_arm = {arm.name: values(said.quantity, arm, result) for arm in result.arms}
    ours, theirs = of_arm.get(said.arm, {}), of_arm.get(said.against, {})
    if not (both := [key for key in ours if key in theirs]):
        return None
    change = paired_difference([ours[key] for key in both], [theirs[key] for key in both])
    return Comparison(said.arm, said.against, tuple(both), change, None)


def turned(found: Comparison) -> Comparison:
    """The same of the other arm."""
    nats = found.nats and replace(found.nats, mean=-found.nats.mean, low=-found.nats.high, high=-found.nats.low)
    return replace(found, arm=found.against, against=found.arm, nats=nats)


def values(quantity: str, arm: ArmResult, result: Result) -> dict[int, float]:
    """A quantity of an arm but the loss, by seed or round."""
    if quantity == "average":
        return {run.seed: run.summary["val/ema_loss"] for run in arm.records if "val/ema_loss" in run.summary}
    if quantity == "longest":
        last = {run.seed: one.loss for run in arm.records for one in run.evaluation.lengths}
        return {seed: loss for seed, loss in last.items() if loss is not None}
    measured = result.speed.arms.get(arm.name) if result.speed else None
    return {i: math.log(speed) for i, speed in enumerate(getattr(measured, quantity, []))}


def judge(statement: Statement, found: Comparison | None, detectable: float = math.nan) -> Verdict:
    """The verdict on a statement.

    found: its two arms, whose interval is that of the family of all that are tested together; None: not run.
    detectable: the difference that such a study finds with 80% power; nothing is decided on a smaller one.
    """
    if found is None or found.change.n < 2:
        return Verdict("not run", "")
    if found.untested or not found.change.is_tested or found.nats is None:
        return Verdict("not decided", found.untested)
    change, margin, size = found.nats, statement.margin, statement.size
    seen = f"{change.text} {UNITS[statement.quantity].format(change.n)}"
    if size is not None and abs(size) < detectable:
        return undecided(f"{seen}; {size:+g} is claimed", detectable)
    inside = is_within(change.mean, change.error, change.df, margin)
    if statement.expects == "equal":
        if inside:
            return Verdict("holds", f"{seen}; within {margin:g}")
        if min(abs(change.low), abs(change.high)) > margin and change.significant:
            return Verdict("does not hold", f"{seen}; beyond {margin:g}")
        return undecided(seen, detectable)
    if change.significant:
        if change.verdict != statement.expects:
            return Verdict("opposite", seen)
        if size is None or change.low <= size <= change.high:
            return Verdict("holds", seen)
        return Verdict("direction holds, size does not", f"{seen}; {size:+g} is claimed")
    return Verdict("does not hold", f"{seen}; within {margin:g}") if inside else undecided(seen, detectable)


def is_within(mean: float, error: float, df: float, margin: float) -> bool:
    """Whether two one-sided tests at 5% find the mean within the margin (Schuirmann 1987)."""
    return abs(mean) + error * float(stats.t.isf(LEVEL, df)) < margin


def undecided(seen: str, detectable: float) -> Verdict:
    """The verdict that there is none, with what could have been seen."""
    could = f" (could detect {detectable:.2g})" if math.isfinite(detectable) else ""
    return Verdict("not decided", f"{seen}{could}")


def recompute(figure: Figure) -> Verdict:
    """The verdict on a figure, which is computed anew."""
    value = FACTS[figure.fact](*figure.of)
    word: Word = "holds" if abs(value - figure.says) <= figure.within else "does not hold"
    return Verdict(word, f"{value:.6g}; {figure.says:g} is said")
