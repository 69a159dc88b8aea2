"""The verdict of a study in one sentence, and its findings in several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llama_lab.formatting import (
    UNITS,
    conjoin,
    count,
    decimals,
    enumerate_some,
    number,
    p_value,
    seed_range,
    with_interval,
)
from llama_lab.study.naming import divergence
from llama_lab.study.statistics import Effect, PairedDifference, term_name
from llama_lab.study.study import Study

from .result import ArmResult, Comparison, Lengths, Metric, common_losses

MOST_NAMED = 6  # arms with their numbers in one sentence
MOST_LIMITS = 3  # excluded changes in one sentence
NOTHING = "Nothing can be concluded from one seed."
UNCOMPARED = "Nothing can be compared: no arm shares a finished seed with what it is compared with."


@dataclass(frozen=True)
class Finding:
    """The change of the loss by a step, an arm or an effect, as numbers and as text."""

    name: str
    difference: PairedDifference
    change: str
    comparison: Comparison | None = None  # of arms; None for an effect

    @property
    def is_tested(self) -> bool:
        """Whether the difference has a p."""
        return not math.isnan(self.difference.p)


def answer(
    study: Study,
    arms: Sequence[ArmResult],
    effects: Sequence[Effect],
    lengths: Sequence[Lengths],
    metric: Metric,
    tests: str,
) -> tuple[str, tuple[str, ...]]:
    """The verdict, and the sentences that explain it; the last ones are about the longest evaluated context, if any.

    By the effects of a factorial, the steps of a ladder, or else the differences to the baseline.
    """
    steps = [arm.to_previous for arm in arms if arm.to_previous]
    others = [arm.to_baseline for arm in arms if arm.to_baseline]
    compared = steps or others
    diverged = [
        f"{how}: it is not tested over the others." for arm in arms if (how := divergence(arm.name, arm.records))
    ]
    final = _first_to_last(study, arms, metric) if study.is_chain else _lowest(arms, metric)
    # Nats per token of different tokenizers cannot be ranked.
    at_longest = _at_longest(lengths) if metric == "val/loss" else []
    if not compared:
        return UNCOMPARED, (*diverged, UNCOMPARED, *at_longest)
    if max(comparison.bits.n for comparison in compared) == 1:
        return NOTHING, (*diverged, NOTHING, *(final if study.is_chain else ()), *at_longest)
    noun, against = ("step", "") if steps else ("arm", f"Compared with {study.baseline}, ")
    findings = [Finding(c.arm, c.difference, _change(c.difference, metric), c) for c in compared]
    if any(not math.isnan(effect.change.p) for effect in effects):
        noun, against, findings = "effect", "", []
        for effect in effects:
            aliases = conjoin([term_name(axes) for axes in effect.aliases])
            name = f"{effect.name} (aliased with {aliases})" if aliases else effect.name
            findings.append(Finding(name, effect.change, _change(effect.change, metric)))
    return _verdict(findings, noun, against, metric), (
        *diverged,
        *_significant(findings, noun, against),
        *_not_significant(findings, metric),
        *_within(study, findings, metric),
        *_untested(findings),
        *(final if len(compared) > 1 else ()),
        *([f"Significance is at 5%, by {tests}; the intervals are those of these tests."] if tests != "none" else []),
        *at_longest,
    )


def _verdict(findings: Sequence[Finding], noun: str, against: str, metric: Metric) -> str:
    """How many findings lowered and raised the loss, and which changed it most."""
    tested = [f for f in findings if f.is_tested]
    clear = sorted((f for f in tested if f.difference.significant), key=lambda f: -abs(f.difference.mean))
    if not tested:
        return f"No {noun} could be tested."
    if len(findings) == 1:
        change = {"lower": "lowered the loss", "higher": "raised the loss"}
        verb = change.get(tested[0].difference.verdict, "did not change the loss significantly")
        return f"{against}{tested[0].name} {verb}: {_interval(tested[0].difference, metric)}."
    if not clear:
        return f"{against}{'no' if against else 'No'} {noun} changed the loss significantly."
    verbs = {"lower": "lowered the loss", "higher": "raised it"}
    counts = {verdict: sum(f.difference.verdict == verdict for f in clear) for verdict in verbs}
    if not counts["lower"]:
        verbs["higher"] = "raised the loss"
    totals = conjoin([f"{n} {verbs[verdict]}" for verdict, n in counts.items() if n])
    most = f"{clear[0].name} {'changed it most' if len(clear) > 1 else 'did'}"
    return f"Of {count(len(findings), noun)}, {totals}; {most}: {_interval(clear[0].difference, metric)}."


def _interval(found: PairedDifference, metric: Metric) -> str:
    return f"{with_interval(found.mean, found.low, found.high, is_difference=True)} {UNITS[metric]}"


def _change(found: PairedDifference, metric: Metric) -> str:
    return ", ".join(filter(None, [_interval(found, metric), p_value(found.p)]))


def _significant(findings: Sequence[Finding], noun: str, against: str) -> list[str]:
    """Which findings significantly lowered or raised the loss."""
    sentences = []
    for verb, sign in (("lowered", -1), ("raised", 1)):
        clear = [f for f in findings if f.difference.significant and f.difference.mean * sign > 0]
        if len(clear) > MOST_NAMED:
            clear.sort(key=lambda f: -abs(f.difference.mean))
        chosen = [f"{f.name} ({f.change})" for f in clear]
        if chosen and len(findings) == 1:
            sentences.append(f"{against}{findings[0].name} {verb} the loss: {findings[0].change}.")
        elif chosen:
            named = conjoin(chosen) if len(chosen) <= MOST_NAMED else enumerate_some(chosen, MOST_NAMED)
            subject = f"{len(chosen)} of {count(len(findings), noun)}"
            sentences.append(f"{against}{subject} {verb} the loss: {named}.")
    return sentences


def _not_significant(findings: Sequence[Finding], metric: Metric) -> list[str]:
    """Which findings are not significant, the changes that are excluded, and the seeds that would be needed."""
    unclear = [f for f in findings if f.is_tested and not f.difference.significant]
    if not unclear:
        return []
    in_order = ", in this order" if 1 < len(unclear) <= MOST_LIMITS else ""
    have = sorted({f.difference.n for f in unclear})
    seeds = count(have[0], "seed") if len(have) == 1 else f"{have[0]} to {have[-1]} seeds"
    limits = [(max(-d.low, d.high), decimals(d.low, d.high)) for d in (f.difference for f in unclear)]
    if len(unclear) > MOST_LIMITS:  # the table has all of them
        limits = [max(limits)]
    names = conjoin([f.name for f in unclear])
    sentences = [
        f"{names} {'is' if len(unclear) == 1 else 'are'} not significant with {seeds}; a change of more than "
        f"{conjoin([number(limit, digits) for limit, digits in limits])} {UNITS[metric]} is excluded{in_order}."
    ]
    if len(unclear) <= MOST_LIMITS and (
        needed := [seed_range(f.comparison.seeds_needed) for f in unclear if f.comparison and f.comparison.seeds_needed]
    ):
        changes = "such a change" if len(unclear) == 1 else "such changes"
        sentences.append(f"Finding {changes} would need {conjoin(needed)}{in_order}.")
    return sentences


def _within(study: Study, findings: Sequence[Finding], metric: Metric) -> list[str]:
    """Which changes are below the margin, by two one-sided tests: an interval within the margin passes both."""
    if study.margin is None:
        return []
    margin = f"study.margin={study.margin:g} {UNITS[metric]}"
    within = [f.name for f in findings if f.is_tested and max(-f.difference.low, f.difference.high) < study.margin]
    if not within:
        return [f"No change is shown to be within {margin}."]
    return [f"{conjoin(within)} {'changes' if len(within) == 1 else 'change'} the loss by less than {margin}."]


def _untested(findings: Sequence[Finding]) -> list[str]:
    """Which findings were not tested, and why."""
    compared = [f.comparison for f in findings if f.comparison and not f.is_tested]
    sentences = [f"{c.arm} is not tested against {c.against}: {c.untested}." for c in compared if c.untested]
    for c in (c for c in compared if not c.untested and c.difference.sd == 0):  # which independent runs never have
        pair, seeds = f"{c.arm} and {c.against}", count(len(c.seeds), "seed")
        sentences.append(
            f"{pair} are identical: their losses are equal in each of {seeds}."
            if c.difference.mean == 0
            else f"{pair} differ by exactly as much in each of {seeds}, which is no evidence."
        )
    if single := [c.arm for c in compared if not c.untested and c.difference.n == 1]:
        sentences.append(f"Nothing can be concluded about {conjoin(single)}, from one seed.")
    return sentences


def _first_to_last(study: Study, arms: Sequence[ArmResult], metric: Metric) -> list[str]:
    last = arms[-1].to_baseline
    if last is None:
        return []
    verdict = ", not significant"
    if last.untested:
        verdict = f", which is not tested: {last.untested}"
    elif last.bits.n == 1:
        verdict = ", which may be noise"
    elif last.significant or last.difference.sd == 0:
        verdict = ""
    change = _change(last.difference, metric)
    return [f"From the first arm, {study.baseline}, to the last, {last.arm}, the loss changed by {change}{verdict}."]


def _lowest(arms: Sequence[ArmResult], metric: Metric) -> list[str]:
    """The arm with the lowest mean over the seeds that all have finished."""
    losses = common_losses(arms, metric)
    if losses.empty:
        return ["Arms are not ranked: no seed was finished by all of them."]
    every = {record.seed for arm in arms for record in arm.records}
    over = f", over the {count(len(losses), 'seed')} that all have finished" if len(losses) < len(every) else ""
    name = losses.mean().idxmin()
    loss = next(loss for arm in arms if arm.name == name and (loss := arm.judged(metric)))
    mean = number(losses[name].mean(), decimals(loss.low, loss.high))
    return [f"The lowest mean loss is that of {name}{over}: {mean} {UNITS[metric]}."]


def _at_longest(lengths: Sequence[Lengths]) -> list[str]:
    """Which arms' losses change least and most from the trained length to the longest evaluated context."""
    longer = [
        (n, arm.arm, change)
        for arm in lengths
        for n, change in zip(arm.lengths, arm.changes, strict=True)
        if n > arm.trained
    ]
    longest = max((n for n, _, change in longer if change), default=None)
    at_longest = {arm: change for n, arm, change in longer if n == longest}
    known = sorted(
        (c.mean, f"{name} ({_interval(c, 'val/loss')}, {count(c.n, 'seed')})") for name, c in at_longest.items() if c
    )
    if longest is None:
        return []
    (_, least), (_, most) = known[0], known[-1]
    rises = f"of {least} rises least and that of {most} most" if len(known) > 1 else f"of {least} changes"
    sentences = [f"At {longest:,} tokens, compared with the trained length, the loss {rises}."]
    if none := [name for name, change in at_longest.items() if change is None]:
        sentences.append(f"{conjoin(none)} could not be evaluated at that length.")
    return sentences
