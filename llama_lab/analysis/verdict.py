"""The verdict of a study in one sentence, and its findings in several."""

from collections.abc import Sequence

from llama_lab.util.formatting import conjoin, count, decimals, enumerate_some, number, p_value, seed_range

from .result import Comparison, Finding, Result, common_losses
from .scaling_gains import scaling_sentences
from .sentences import divergence
from .statistics import Effect, PairedDifference, term_name

MOST_NAMED = 6  # arms with their numbers in one sentence
MOST_LIMITS = 3  # excluded changes in one sentence
VERBS = {"lower": "lowered", "higher": "raised"}  # by verdict
NOTHING = "Nothing can be concluded from one seed."
UNCOMPARED = "Nothing can be compared: no arm shares a finished seed with what it is compared with."


def answer(result: Result) -> tuple[str, tuple[str, ...]]:
    """The verdict, and the sentences that explain it; the last ones are about the longest evaluated context, if any.

    By the effects of a factorial, the steps of a ladder, or else the differences to the baseline.
    """
    verdict, sentences = _of_comparisons(result)
    gains = scaling_sentences(result.scaling) if result.scaling else []
    return gains[0] if gains else verdict, (*gains, *sentences)


def _of_comparisons(result: Result) -> tuple[str, tuple[str, ...]]:
    study, arms, unit = result.study, result.arms, result.unit
    steps = [arm.to_previous for arm in arms if arm.to_previous]
    compared = steps or [arm.to_baseline for arm in arms if arm.to_baseline]
    hows = (divergence(arm.name, arm.records) for arm in arms)
    diverged = [f"{how}: it is not tested over the others." for how in hows if how]
    final = _first_to_last(result) if study.is_chain else _lowest(result)
    at_longest = _at_longest(result)
    if not compared:
        return UNCOMPARED, (*diverged, UNCOMPARED, *at_longest)
    if max(comparison.bits.n for comparison in compared) == 1:
        return NOTHING, (*diverged, NOTHING, *(final if study.is_chain else ()), *at_longest)
    findings: Sequence[Finding] = compared
    noun, against = "step" if study.is_chain else "comparison", ""
    if any(effect.change.is_tested for effect in result.effects):
        noun, findings = "effect", result.effects
    elif not steps:
        noun, against = "arm", f"Compared with {study.baseline}, "
    is_tested = result.tests != "none"
    return _verdict(findings, noun, against, unit), (
        *diverged,
        *_significant(findings, noun, against, unit),
        *_not_significant(findings, unit),
        *_within(study.margin, findings, unit),
        *_pairs(result),
        *_untested(findings),
        *(final if len(compared) > 1 else ()),
        *([f"Significance is at 5%, by {result.tests}; the intervals are those of these tests."] * is_tested),
        *at_longest,
    )


def _name(found: Finding) -> str:
    """The name of a step, an arm or an effect, with the effects that cannot be separated from it."""
    aliases = [term_name(axes) for axes in found.aliases] if isinstance(found, Effect) else []
    return f"{found.name} (aliased with {conjoin(aliases)})" if aliases else found.name


def _verdict(findings: Sequence[Finding], noun: str, against: str, unit: str) -> str:
    """How many findings lowered and raised the loss, and which changed it most."""
    tested = [f for f in findings if f.change.is_tested]
    clear = sorted((f for f in tested if f.change.significant), key=lambda f: -abs(f.change.mean))
    if not tested:
        return f"No {noun} could be tested."
    if len(findings) == 1:
        verb = f"{VERBS[clear[0].change.verdict]} the loss" if clear else "did not change the loss significantly"
        return f"{against}{_name(tested[0])} {verb}: {tested[0].change.text} {unit}."
    if not clear:
        return f"{against}{'no' if against else 'No'} {noun} changed the loss significantly."
    lower, higher = (sum(f.change.verdict == verdict for f in clear) for verdict in VERBS)
    totals = [f"{lower} lowered the loss"] * (lower > 0)
    totals += [f"{higher} raised {'it' if lower else 'the loss'}"] * (higher > 0)
    most = f"{_name(clear[0])} {'changed it most' if len(clear) > 1 else 'did'}"
    return f"Of {count(len(findings), noun)}, {conjoin(totals)}; {most}: {clear[0].change.text} {unit}."


def _change(found: PairedDifference, unit: str) -> str:
    return ", ".join(filter(None, [f"{found.text} {unit}", p_value(found.p)]))


def _significant(findings: Sequence[Finding], noun: str, against: str, unit: str) -> list[str]:
    """Which findings significantly lowered or raised the loss."""
    sentences = []
    for verdict, verb in VERBS.items():
        clear = [f for f in findings if f.change.verdict == verdict]
        if len(clear) > MOST_NAMED:
            clear.sort(key=lambda f: -abs(f.change.mean))
        chosen = [f"{_name(f)} ({_change(f.change, unit)})" for f in clear]
        if chosen and len(findings) == 1:
            sentences.append(f"{against}{_name(clear[0])} {verb} the loss: {_change(clear[0].change, unit)}.")
        elif chosen:
            named = conjoin(chosen) if len(chosen) <= MOST_NAMED else enumerate_some(chosen, MOST_NAMED)
            sentences.append(f"{against}{len(chosen)} of {count(len(findings), noun)} {verb} the loss: {named}.")
    return sentences


def _not_significant(findings: Sequence[Finding], unit: str) -> list[str]:
    """Which findings are not significant, the changes that are excluded, and the seeds that would be needed."""
    unclear = [f for f in findings if f.change.is_tested and not f.change.significant]
    if not unclear:
        return []
    in_order = ", in this order" if 1 < len(unclear) <= MOST_LIMITS else ""
    have = sorted({f.change.n for f in unclear})
    seeds = count(have[0], "seed") if len(have) == 1 else f"{have[0]} to {have[-1]} seeds"
    limits = [(max(-d.low, d.high), decimals(d.low, d.high)) for d in (f.change for f in unclear)]
    if len(unclear) > MOST_LIMITS:  # the table has all of them
        limits = [max(limits)]
    names = conjoin([_name(f) for f in unclear])
    sentences = [
        f"{names} {'is' if len(unclear) == 1 else 'are'} not significant with {seeds}; a change of more than "
        f"{conjoin([number(limit, digits) for limit, digits in limits])} {unit} is excluded{in_order}."
    ]
    needed = [seed_range(f.seeds_needed) for f in unclear if isinstance(f, Comparison) and f.seeds_needed]
    if needed and len(unclear) <= MOST_LIMITS:
        changes = "such a change" if len(unclear) == 1 else "such changes"
        sentences.append(f"Finding {changes} would need {conjoin(needed)}{in_order}.")
    return sentences


def _within(margin: float | None, findings: Sequence[Finding], unit: str) -> list[str]:
    """Which changes are below the margin, by two one-sided tests: an interval within the margin passes both."""
    if margin is None:
        return []
    shown = f"study.margin={margin:g} {unit}"
    within = [_name(f) for f in findings if f.change.is_tested and max(-f.change.low, f.change.high) < margin]
    if not within:
        return [f"No change is shown to be within {shown}."]
    return [f"{conjoin(within)} {'changes' if len(within) == 1 else 'change'} the loss by less than {shown}."]


def _pairs(result: Result) -> list[str]:
    """How many pairs of arms differ, and which arms may be the lowest."""
    pairs = result.pairs
    tested = {name for c in pairs if c.change.is_tested for name in (c.arm, c.against)}
    if not tested:
        return []
    clear = sum(c.change.significant for c in pairs)
    first = [name for name, (best, _) in result.ranks.items() if best == 1 and name in tested]
    differ = f"{clear or 'none'} {'differs' if clear == 1 else 'differ'} significantly"
    return [f"Of {count(len(pairs), 'pair')} of arms, {differ}; no arm is significantly below {conjoin(first)}."]


def _untested(findings: Sequence[Finding]) -> list[str]:
    """Which findings were not tested, and why."""
    compared = [f for f in findings if isinstance(f, Comparison) and not f.change.is_tested]
    sentences = [f"{c.arm} is not tested against {c.against}: {c.untested}." for c in compared if c.untested]
    for c in (c for c in compared if not c.untested and c.change.sd == 0):  # which independent runs never have
        pair, seeds = f"{c.arm} and {c.against}", count(len(c.seeds), "seed")
        sentences.append(
            f"{pair} are identical: their losses are equal in each of {seeds}."
            if c.change.mean == 0
            else f"{pair} differ by exactly as much in each of {seeds}, which is no evidence."
        )
    if single := [c.arm for c in compared if not c.untested and c.change.n == 1]:
        sentences.append(f"Nothing can be concluded about {conjoin(single)}, from one seed.")
    return sentences


def _first_to_last(result: Result) -> list[str]:
    last = result.arms[-1].to_baseline
    if last is None:
        return []
    verdict = "" if last.change.significant or last.change.sd == 0 else ", not significant"
    if last.untested:
        verdict = f", which is not tested: {last.untested}"
    elif last.bits.n == 1:
        verdict = ", which may be noise"
    change, first = _change(last.change, result.unit), result.study.baseline
    return [f"From the first arm, {first}, to the last, {last.arm}, the loss changed by {change}{verdict}."]


def _lowest(result: Result) -> list[str]:
    """The arm with the lowest mean over the seeds that all have finished; not of several sizes."""
    if result.scaling:
        return []
    arms, metric = result.arms, result.metric
    losses = common_losses(arms, metric)
    if losses.empty:
        return ["Arms are not ranked: no seed was finished by all of them."]
    every = {record.seed for arm in arms for record in arm.records}
    over = f", over the {count(len(losses), 'seed')} that all have finished" if len(losses) < len(every) else ""
    name = losses.mean().idxmin()
    loss = next(loss for arm in arms if arm.name == name and (loss := arm.judged(metric)))
    mean = number(losses[name].mean(), decimals(loss.low, loss.high))
    return [f"The lowest mean loss is that of {name}{over}: {mean} {result.unit}."]


def _at_longest(result: Result) -> list[str]:
    """Which arms' losses change least and most from the trained length to the longest evaluated context.

    Not of different tokenizers, whose nats per token cannot be ranked.
    """
    arms = result.lengths if result.metric == "val/loss" else ()
    at = [(n, arm.arm, change) for arm in arms for n, change in arm.changes.items() if n > arm.trained]
    longest = max((n for n, _, change in at if change), default=None)
    if longest is None:
        return []
    found = [(name, change) for n, name, change in at if n == longest]
    known = sorted((c.mean, f"{name} ({c.text} {result.unit}, {count(c.n, 'seed')})") for name, c in found if c)
    (lowest, first), (highest, last) = known[0], known[-1]
    words = ("falls most", "least" if highest < 0 else "rises most") if lowest < 0 else ("rises least", "most")
    rises = f"of {first} {words[0]} and that of {last} {words[1]}" if len(known) > 1 else f"of {first} changes"
    sentences = [f"At {longest:,} tokens, compared with the trained length, the loss {rises}."]
    if none := [name for name, change in found if change is None]:
        sentences.append(f"{conjoin(none)} could not be evaluated at that length.")
    return sentences
