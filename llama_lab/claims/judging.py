"""Verdicts on statements, computed from paired differences over seeds."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from scipy import stats

from llama_lab.analysis.power import LEVEL
from llama_lab.analysis.result import Comparison

from .claim import Figure, Statement
from .facts import FACTS

# What contradicts the source comes first.
Word = Literal["opposite", "does not hold", "direction holds, size does not", "holds", "not decided", "not run"]
WORDS = get_args(Word)
DECIDED = WORDS[:4]


@dataclass(frozen=True)
class Verdict:
    """A verdict with the sentence that supports it."""

    word: Word
    why: str


def judge(statement: Statement, found: Comparison | None, detectable: float = math.nan) -> Verdict:
    """The verdict on a statement.

    found: its two arms, whose interval is that of the family of all that are tested together; None: not run.
    detectable: the difference that such a study finds with 80% power.
    """
    if found is None or not found.change.is_tested or found.nats is None:
        return Verdict("not run", found.untested if found else "")
    change, margin = found.nats, statement.margin
    seen = f"{change.text} nats per token, {change.n} seeds"
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
        if statement.size is None or change.low <= statement.size <= change.high:
            return Verdict("holds", seen)
        return Verdict("direction holds, size does not", f"{seen}; {statement.size:+g} is claimed")
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
    value = FACTS[figure.fact]()
    word: Word = "holds" if abs(value - figure.says) <= figure.within else "does not hold"
    return Verdict(word, f"{value:.6g}; {figure.says:g} is said")
