"""What a study found, in a few sentences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .record import Study
from .result import ArmResult, Comparison, Lengths, Metric
from .statistics import MOST_SEEDS, Effect, PairedDifference
from .words import UNITS, count, p_value, with_interval

NOTHING = "Nothing can be concluded from one seed."


@dataclass(frozen=True)
class Finding:
    """A step, an arm or an effect; what it did to the loss, in words, and whether that is separable from noise.

    sd: of what it did, over seeds.
    """

    name: str
    mean: float
    change: str
    separable: bool
    against: str = ""
    sd: float = math.nan
    seeds: int = 0
    seeds_needed: int | None = None


def answer(
    study: Study,
    arms: Sequence[ArmResult],
    effects: Sequence[Effect],
    lengths: Sequence[Lengths],
    metric: Metric,
    correction: str,
) -> tuple[str, ...]:
    """The sentences, the last of them about the longest context that was measured, if any was."""
    # Nats per token of different tokenizers cannot be ranked.
    at_longest = _at_longest(lengths) if metric == "val/loss" else []
    return (*_compared(study, arms, effects, metric, correction), *at_longest)


def _compared(
    study: Study, arms: Sequence[ArmResult], effects: Sequence[Effect], metric: Metric, correction: str
) -> tuple[str, ...]:
    """A factorial is answered by its effects, a ladder by its steps, all else by arm and baseline."""
    steps = [arm.to_previous for arm in arms if arm.to_previous]
    others = [arm.to_baseline for arm in arms if arm.to_baseline]
    compared = steps or others
    if not compared:
        return ("Nothing can be compared: no arm shares a finished seed with what it is compared with.",)
    if max(comparison.bits.n for comparison in compared) == 1:
        return (NOTHING, *(_whole_way(study, arms) if _is_chain(arms) else ()))
    if any(not math.isnan(effect.p) for effect in effects):
        findings = [_of_effect(effect, metric) for effect in effects]
        sentences = _separable(findings, "effect", "") + _inseparable_effects(findings)
    else:
        noun, against = ("step", "") if steps else ("arm", f"Compared with {study.baseline}, ")
        findings = [_of_comparison(comparison) for comparison in compared]
        sentences = _separable(findings, noun, against) + _inseparable(findings)
    final = _whole_way(study, arms) if _is_chain(arms) else _lowest(arms, metric)
    return (
        *sentences,
        *(final if len(compared) > 1 else ()),
        f"The correction of p is {correction}; intervals are not corrected.",
    )


def _of_comparison(comparison: Comparison) -> Finding:
    return Finding(
        comparison.arm,
        comparison.difference.mean,
        _change(comparison),
        comparison.separable,
        comparison.against,
        comparison.difference.sd,
        comparison.bits.n,
        comparison.seeds_needed,
    )


def _of_effect(effect: Effect, metric: Metric) -> Finding:
    interval = with_interval(effect.mean, effect.low, effect.high, is_difference=True)
    change = f"{interval} {UNITS[metric]}, corrected {p_value(effect.corrected_p)}"
    name = " or ".join(" x ".join(axes) for axes in (effect.axes, *effect.aliases))  # a fraction cannot tell which
    return Finding(name, effect.mean, change, effect.corrected_p < 0.05)


def _change(comparison: Comparison) -> str:
    """Both units, with intervals, and the corrected p."""
    known = [("nats per token", comparison.nats), ("bits per byte", comparison.bits)]
    parts = [f"{with_interval(d.mean, d.low, d.high, is_difference=True)} {unit}" for unit, d in known if d]
    p = p_value(comparison.corrected_p)
    return ", ".join([*parts, f"corrected {p}"] if p else parts)


def _separable(findings: Sequence[Finding], noun: str, against: str) -> list[str]:
    """What helped and what hurt."""
    sentences = []
    for verb, sign in (("lowered", -1), ("raised", 1)):
        chosen = [f"{f.name} ({f.change})" for f in findings if f.separable and f.mean * sign > 0]
        if chosen and len(findings) == 1:
            sentences.append(f"{against}{findings[0].name} {verb} the loss: {findings[0].change}.")
        elif chosen:
            subject = f"{len(chosen)} of {count(len(findings), noun)}"
            sentences.append(f"{against}{subject} {verb} the loss: {_and(chosen)}.")
    return sentences


def _inseparable(findings: Sequence[Finding]) -> list[str]:
    """What may be noise, and how many seeds would tell."""
    sentences = [_without_spread(f) for f in findings if f.sd == 0]
    if unclear := [f for f in findings if not f.separable and f.seeds > 1 and f.sd != 0]:
        seeds = sorted({f.seeds for f in unclear})
        have = count(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        needed = _and([f"about {f.seeds_needed:,}" if f.seeds_needed else f"over {MOST_SEEDS:,}" for f in unclear])
        sentences.append(
            f"{_and([f.name for f in unclear])} {_are(unclear)} not separable from noise with {have}; {needed} "
            f"seeds would be needed{', in this order' if len(unclear) > 1 else ''}."
        )
    if single := [f.name for f in findings if f.seeds == 1]:
        sentences.append(f"Nothing can be concluded about {_and(single)}, from one seed.")
    return sentences


def _without_spread(finding: Finding) -> str:
    """A finding that is the same in every seed, which no noise is."""
    pair = f"{finding.name} and {finding.against}"
    if finding.mean == 0:
        return f"{pair} are identical: their losses are equal in each of {count(finding.seeds, 'seed')}."
    return f"{pair} differ by exactly as much in each of {count(finding.seeds, 'seed')}, which is no evidence."


def _inseparable_effects(findings: Sequence[Finding]) -> list[str]:
    unclear = [f.name for f in findings if not f.separable]
    return [f"{_and(unclear)} {_are(unclear)} not separable from noise."] if unclear else []


def _is_chain(arms: Sequence[ArmResult]) -> bool:
    """Whether each arm is a step from the one before it."""
    return all(arm.arm.previous == before.name for before, arm in pairwise(arms))


def _whole_way(study: Study, arms: Sequence[ArmResult]) -> list[str]:
    """From the baseline to the last arm."""
    last = arms[-1].to_baseline
    if last is None:
        return []
    is_clear = last.separable or last.difference.sd == 0
    verdict = ", which may be noise" if last.bits.n == 1 else "" if is_clear else ", not separable from noise"
    return [f"The whole way from {study.baseline} to {last.arm} changed the loss by {_change(last)}{verdict}."]


def _lowest(arms: Sequence[ArmResult], metric: Metric) -> list[str]:
    """The arm with the lowest mean."""
    known = [(e.mean, arm.name) for arm in arms if (e := arm.judged(metric))]
    loss, name = min(known)
    return [f"The lowest mean loss is that of {name}: {loss:.4f} {UNITS[metric]}."]


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


def _are(items: Sequence[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
