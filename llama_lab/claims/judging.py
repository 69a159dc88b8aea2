"""Verdicts on statements, computed from paired differences over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from llama_lab.analysis.power import in_errors
from llama_lab.analysis.result import ArmResult, Comparison, Result
from llama_lab.analysis.sentences import divergence
from llama_lab.analysis.statistics import paired_difference
from llama_lab.runs.study import BATCH
from llama_lab.util.formatting import conjoin, percent

from .archive import ENDED
from .claim import Figure, Statement
from .facts import FACTS

# What contradicts the source comes first.
Word = Literal[
    "opposite",
    "does not hold",
    "opposite, once",
    "does not hold, once",
    "direction holds, size does not",
    "holds",
    "holds at one rate",
    "not decided",
    "not run",
]
WORDS = get_args(Word)
# A study that contradicts the source is repeated with other seeds and other text before it counts.
ONCE: dict[Word, Word] = {"opposite": "opposite, once", "does not hold": "does not hold, once"}
REPEATED: dict[Word, Word] = {once: word for word, once in ONCE.items()}
UNITS = {
    "loss": "{unit}, {n} seeds",
    "average": "{unit} of an average of the weights, {n} seeds",
    "longest": "{unit} from the trained length to the longest windows evaluated, {n} seeds",
    "train": "in the logarithm of training speed, {n} rounds",
    "decode": "in the logarithm of decoding speed, {n} rounds",
    "decode_batch": f"in the logarithm of the speed of decoding {BATCH} sequences, {{n}} rounds",
}
LOSSES = ("loss", "average", "longest")
LEARNED = 0.5  # of a probe's answers are right at least in one of two arms, or neither has learned it


@dataclass(frozen=True)
class Verdict:
    """A verdict with the sentence that supports it."""

    word: Word
    why: str


def verdict(said: Statement, result: Result) -> Verdict:
    """The verdict on a statement by one study.

    Losses of different arms that have one learning rate say only whether the statement holds at that rate.
    """
    found = by_interval(said, result)
    is_tuned = any(of_arm.chosen for of_arm in result.learning_rates)
    if said.quantity not in ("loss", "longest") or is_tuned or found.word in ("not decided", "not run"):
        return replace(found, word=ONCE.get(found.word, found.word))
    if found.word == "holds":
        return replace(found, word="holds at one rate")
    return Verdict("not decided", f"{found.why}; at one rate, at which it is {found.word}")


def confirmed(verdicts: Sequence[Verdict], results: Sequence[Result]) -> list[Verdict]:
    """The verdicts of several studies on one statement, those repeated where another has the same.

    The other study needs other seeds and other text.
    """
    texts = [{run.environment.data_hash for run in result.started} for result in results]

    def is_repeated(one: int) -> bool:
        return any(
            verdicts[one].word == verdicts[other].word
            and not {*results[one].seeds} & {*results[other].seeds}
            and not texts[one] & texts[other]
            for other in range(len(verdicts))
        )

    return [
        replace(found, word=REPEATED[found.word]) if found.word in REPEATED and is_repeated(one) else found
        for one, found in enumerate(verdicts)
    ]


def by_interval(said: Statement, result: Result) -> Verdict:
    """The verdict on a statement by a study, whatever its learning rates and repetitions."""
    found = comparison(said, result)
    arms = [arm for arm in result.arms if arm.name in (said.arm, said.against)]
    if said.quantity in LOSSES:
        doubts = [how for arm in arms if (how := divergence(arm.name, arm.records))]
        if doubt := conjoin(doubts) or not_learned(arms):
            return Verdict("not decided", doubt)
    if found is None or found.change.n < 2:
        return judge(said, found)
    runs = [run for arm in arms for run in arm.records]
    if missing := sum(run.status not in ENDED for run in runs):  # a look before the end decides nothing
        return Verdict("not decided", f"{missing} of {len(runs)} runs are missing")
    family = len(result.arms), found.change.n, len(result.study.family) + len(result.study.ends)
    half, shift = in_errors(*(family if said.quantity == "loss" else (2, found.change.n, 1)))
    low, high = found.change.ends
    return judge(said, found, (high - low) / 2 * shift / half, result.unit)


def not_learned(arms: Sequence[ArmResult]) -> str:
    """Why losses of a probe say nothing on arms that have not learned it; empty if one has, or it is no probe."""
    right = {arm.name: arm.accuracy.mean for arm in arms if arm.entropy_floor is not None and arm.accuracy}
    answers = conjoin([f"{name} answers {percent(share)}" for name, share in right.items()])
    return f"{answers}: neither has learned it" if right and max(right.values()) < LEARNED else ""


def comparison(said: Statement, result: Result) -> Comparison | None:
    """A statement's two arms: of losses the study's test, else a paired t-test; None if they were not run."""
    if said.quantity == "loss":
        tested = (*result.pairs, *(one for arm in result.arms for one in (arm.to_previous, arm.to_baseline) if one))
        pairs = (*tested, *map(turned, tested))
        return next((one for one in pairs if (one.arm, one.against) == (said.arm, said.against)), None)
    arms = {arm.name: arm for arm in result.arms}
    if not {said.arm, said.against} <= arms.keys():
        return None
    ours = values(said.quantity, arms[said.arm], result)
    theirs = values("last" if said.quantity == "average" else said.quantity, arms[said.against], result)
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
    if metric := {"average": "val/ema_loss", "last": "val/loss"}.get(quantity):
        return {run.seed: run.summary[metric] for run in arm.records if metric in run.summary}
    if quantity == "longest":
        found = {run.seed: [one.loss for one in run.evaluation.lengths] for run in arm.records}
        ends = {seed: (losses[0], losses[-1]) for seed, losses in found.items() if losses}
        return {seed: last - first for seed, (first, last) in ends.items() if first is not None and last is not None}
    measured = result.speed.arms.get(arm.name) if result.speed else None
    return {i: math.log(speed) for i, speed in enumerate(getattr(measured, quantity, []))}


def judge(
    statement: Statement, found: Comparison | None, detectable: float = math.nan, unit: str = "nats per token"
) -> Verdict:
    """The verdict on a statement.

    found: its two arms, whose interval is that of the family of all that are tested together; None: not run.
    detectable: the difference that such a study finds with 80% power; nothing is decided on a smaller one. Equality is
    an interval of 95% within the margin: two one-sided tests at 2.5% (Schuirmann 1987). A direction is an interval
    beyond the margin.
    """
    if found is None or found.change.n < 2:
        return Verdict("not run", "")
    if found.untested or not found.change.is_tested or found.nats is None:
        return Verdict("not decided", found.untested or f"no test of {found.change.n} equal differences")
    change, margin, size = found.nats, statement.margin, statement.size
    seen = f"{change.text} {UNITS[statement.quantity].format(unit=unit, n=change.n)}"
    if size is not None and abs(size) < detectable:
        return undecided(f"{seen}; {size:+g} is claimed", detectable)
    inside = -margin < change.low and change.high < margin
    if statement.expects == "equal":
        if inside:
            return Verdict("holds", f"{seen}; within {margin:g}")
        if min(abs(change.low), abs(change.high)) > margin and change.significant:
            return Verdict("does not hold", f"{seen}; beyond {margin:g}")
        return undecided(seen, detectable)
    is_excluded = size is not None and not change.low <= size <= change.high
    if change.significant and min(abs(change.low), abs(change.high)) > margin:
        if change.verdict != statement.expects:
            return Verdict("opposite", seen)
        word: Word = "direction holds, size does not" if is_excluded else "holds"
        return Verdict(word, f"{seen}; {size:+g} is claimed" if is_excluded else seen)
    if inside:
        return Verdict("does not hold", f"{seen}; within {margin:g}")
    return Verdict("does not hold", f"{seen}; {size:+g} is claimed") if is_excluded else undecided(seen, detectable)


def undecided(seen: str, detectable: float) -> Verdict:
    """The verdict that there is none, with what could have been seen."""
    could = f" (could detect {detectable:.2g})" if math.isfinite(detectable) else ""
    return Verdict("not decided", f"{seen}{could}")


def recompute(figure: Figure) -> Verdict:
    """The verdict on a figure, which is computed anew."""
    value = FACTS[figure.fact](*figure.of)
    word: Word = "holds" if abs(value - figure.says) <= figure.within else "does not hold"
    return Verdict(word, f"{value:.6g}; {figure.says:g} is said")
