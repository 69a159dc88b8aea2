"""What a study found, in a few sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Study
from .result import ArmResult, Comparison, Lengths, Metric, ranked
from .statistics import Effect, PairedDifference
from .words import UNITS, count, number, p_value, seed_range, with_interval

NOTHING = "Nothing can be concluded from one seed."


@dataclass(frozen=True)
class Finding:
    """A step, an arm or an effect; what it did to the loss, as numbers and in words."""

    name: str
    difference: PairedDifference
    change: str
    comparison: Comparison | None = None  # of arms; None for an effect

    @property
    def is_tested(self) -> bool:
        """Whether there is a p."""
        return not math.isnan(self.difference.p)


def answer(
    study: Study,
    arms: Sequence[ArmResult],
    effects: Sequence[Effect],
    lengths: Sequence[Lengths],
    metric: Metric,
    tests: str,
) -> tuple[str, ...]:
    """The sentences, the last of them about the longest context that was measured, if any was."""
    # Nats per token of different tokenizers cannot be ranked.
    at_longest = _at_longest(lengths) if metric == "val/loss" else []
    return (*_compared(study, arms, effects, metric, tests), *at_longest)


def _compared(
    study: Study, arms: Sequence[ArmResult], effects: Sequence[Effect], metric: Metric, tests: str
) -> tuple[str, ...]:
    """A factorial is answered by its effects, a ladder by its steps, all else by arm and baseline."""
    steps = [arm.to_previous for arm in arms if arm.to_previous]
    others = [arm.to_baseline for arm in arms if arm.to_baseline]
    compared = steps or others
    diverged = _diverged(arms)
    if not compared:
        return (*diverged, "Nothing can be compared: no arm shares a finished seed with what it is compared with.")
    if max(comparison.bits.n for comparison in compared) == 1:
        return (*diverged, NOTHING, *(_first_to_last(study, arms) if study.is_chain else ()))
    is_factorial = any(not math.isnan(effect.change.p) for effect in effects)
    noun, against = ("step", "") if steps else ("arm", f"Compared with {study.baseline}, ")
    if is_factorial:
        findings, noun, against = [_of_effect(effect, metric) for effect in effects], "effect", ""
    else:
        findings = [Finding(c.arm, c.difference, _change(c), c) for c in compared]
    final = _first_to_last(study, arms) if study.is_chain else _lowest(arms, metric)
    return (
        *diverged,
        *_significant(findings, noun, against),
        *_not_significant(findings, metric),
        *_within(study, findings, metric),
        *_untested(findings),
        *(final if len(compared) > 1 else ()),
        *([f"Significant is at 5% by {tests}; intervals are simultaneous ones of these."] if tests != "none" else []),
    )


def _diverged(arms: Sequence[ArmResult]) -> list[str]:
    """How often each arm diverged, which says more of it than the mean of what is left."""
    runs = {arm.name: [trial.status == "diverged" for trial in arm.trials] for arm in arms}
    return [
        f"{name} diverged in {sum(ends)} of {count(len(ends), 'seed')}: it is not tested over those that are left."
        for name, ends in runs.items()
        if any(ends)
    ]


def _of_effect(effect: Effect, metric: Metric) -> Finding:
    found = effect.change
    interval = with_interval(found.mean, found.low, found.high, is_difference=True)
    change = f"{interval} {UNITS[metric]}, {p_value(found.p)}"
    name = " or ".join(" x ".join(axes) for axes in (effect.axes, *effect.aliases))  # a fraction cannot tell which
    return Finding(name, found, change)


def _change(comparison: Comparison) -> str:
    """Both units, with intervals, and p."""
    known = [("nats per token", comparison.nats), ("bits per byte", comparison.bits)]
    parts = [f"{with_interval(d.mean, d.low, d.high, is_difference=True)} {unit}" for unit, d in known if d]
    p = p_value(comparison.difference.p)
    return ", ".join([*parts, p] if p else parts)


def _significant(findings: Sequence[Finding], noun: str, against: str) -> list[str]:
    """What helped and what hurt."""
    sentences = []
    for verb, sign in (("lowered", -1), ("raised", 1)):
        chosen = [
            f"{f.name} ({f.change})" for f in findings if f.difference.significant and f.difference.mean * sign > 0
        ]
        if chosen and len(findings) == 1:
            sentences.append(f"{against}{findings[0].name} {verb} the loss: {findings[0].change}.")
        elif chosen:
            subject = f"{len(chosen)} of {count(len(findings), noun)}"
            sentences.append(f"{against}{subject} {verb} the loss: {_and(chosen)}.")
    return sentences


def _not_significant(findings: Sequence[Finding], metric: Metric) -> list[str]:
    """What may be noise, what it cannot be more than, and how many seeds would tell."""
    unclear = [f for f in findings if f.is_tested and not f.difference.significant]
    if not unclear:
        return []
    in_order = ", in this order" if len(unclear) > 1 else ""
    have = sorted({f.difference.n for f in unclear})
    seeds = count(have[0], "seed") if len(have) == 1 else f"{have[0]} to {have[-1]} seeds"
    limits = _and([number(max(-f.difference.low, f.difference.high), 4) for f in unclear])
    sentences = [
        f"{_and([f.name for f in unclear])} {_are(unclear)} not significant with {seeds}; {_its(unclear)} changing the "
        f"loss by more than {limits} {UNITS[metric]} is excluded{in_order}."
    ]
    if needed := [seed_range(f.comparison.seeds_needed) for f in unclear if f.comparison and f.comparison.seeds_needed]:
        sentences.append(
            f"Finding {_its(unclear, 'such a change', 'such changes')} would need {_and(needed)}{in_order}."
        )
    return sentences


def _within(study: Study, findings: Sequence[Finding], metric: Metric) -> list[str]:
    """Which changes are too small to matter: two one-sided tests, which the interval within the margin is."""
    if study.margin is None:
        return []
    margin = f"study.margin={study.margin:g} {UNITS[metric]}"
    within = [f.name for f in findings if f.is_tested and max(-f.difference.low, f.difference.high) < study.margin]
    if not within:
        return [f"No change is shown to be within {margin}."]
    return [f"{_and(within)} {'changes' if len(within) == 1 else 'change'} the loss by less than {margin}."]


def _untested(findings: Sequence[Finding]) -> list[str]:
    """What was not tested, and why."""
    untested = [f.comparison for f in findings if f.comparison and f.comparison.untested]
    sentences = [f"{c.arm} is not tested against {c.against}: {c.untested}." for c in untested]
    others = [f for f in findings if f.comparison and not f.is_tested and not f.comparison.untested]
    sentences += [_without_spread(f.comparison) for f in others if f.comparison and f.difference.sd == 0]
    if single := [f.name for f in others if f.difference.n == 1]:
        sentences.append(f"Nothing can be concluded about {_and(single)}, from one seed.")
    return sentences


def _without_spread(comparison: Comparison) -> str:
    """A comparison that is the same in every seed, which no noise is."""
    pair = f"{comparison.arm} and {comparison.against}"
    seeds = count(len(comparison.seeds), "seed")
    if comparison.difference.mean == 0:
        return f"{pair} are identical: their losses are equal in each of {seeds}."
    return f"{pair} differ by exactly as much in each of {seeds}, which is no evidence."


def _first_to_last(study: Study, arms: Sequence[ArmResult]) -> list[str]:
    """From the baseline to the last arm."""
    last = arms[-1].to_baseline
    if last is None:
        return []
    is_clear = last.significant or last.difference.sd == 0
    verdict = (
        f", which is not tested: {last.untested}"
        if last.untested
        else ", which may be noise"
        if last.bits.n == 1
        else ""
        if is_clear
        else ", not significant"
    )
    return [
        f"From the first arm, {study.baseline}, to the last, {last.arm}, the loss changed by {_change(last)}{verdict}."
    ]


def _lowest(arms: Sequence[ArmResult], metric: Metric) -> list[str]:
    """The arm with the lowest mean over the seeds that all have finished."""
    seeds, means = ranked(arms, metric)
    if not means:
        return ["Arms are not ranked: no seed was finished by all of them."]
    every = {trial.seed for arm in arms for trial in arm.trials}
    over = f", over the {count(len(seeds), 'seed')} that all have finished" if len(seeds) < len(every) else ""
    name = min(means, key=lambda name: means[name])
    return [f"The lowest mean loss is that of {name}{over}: {means[name]:.4f} {UNITS[metric]}."]


def _at_longest(lengths: Sequence[Lengths]) -> list[str]:
    """Whose loss holds and whose does not at the longest context, each against its own at the length of training."""
    longer = [
        (n, arm.arm, change)
        for arm in lengths
        for n, change in zip(arm.lengths, arm.changes, strict=True)
        if n > arm.trained
    ]
    longest = max((n for n, _, change in longer if change), default=None)
    at_longest = {arm: change for n, arm, change in longer if n == longest}
    known = sorted(((c.mean, f"{name} ({_rise(c)})") for name, c in at_longest.items() if c), key=lambda pair: pair[0])
    if longest is None:
        return []
    (_, least), (_, most) = known[0], known[-1]
    rises = f"of {least} rises least and that of {most} most" if len(known) > 1 else f"of {least} changes"
    sentences = [f"At {longest:,} tokens, against its own at the length of training, the loss {rises}."]
    if none := [name for name, change in at_longest.items() if change is None]:
        sentences.append(f"{_and(none)} could not be evaluated at that length.")
    return sentences


def _rise(change: PairedDifference) -> str:
    shown = with_interval(change.mean, change.low, change.high, is_difference=True)
    return f"{shown} {UNITS['val/loss']}, {count(change.n, 'seed')}"


def _its(items: Sequence[object], one: str = "its", several: str = "their") -> str:
    return one if len(items) == 1 else several


def _are(items: Sequence[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
