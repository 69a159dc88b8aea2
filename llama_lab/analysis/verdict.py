"""The verdict of a study in one sentence, and its findings in several."""

from collections.abc import Sequence

from llama_lab.runs.study import Study
from llama_lab.util.formatting import conjoin, count, decimals, number, p_value, seed_range, with_interval

from .comparisons import NO_LEVEL_LEFT
from .power import LEVEL
from .result import BITS, Comparison, Finding, Result, common_losses
from .scaling_gains import scaling_sentences
from .sentences import divergence
from .statistics import Effect, term_name

MOST_NAMED = 3  # arms in the verdict
MOST_LIMITS = 3  # excluded changes in one sentence
VERBS = {"lower": "lowered", "higher": "raised"}  # by verdict
NOTHING = "Nothing can be concluded from one seed."


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
        uncompared = f"Nothing can be compared: {_obstacle(result)}."
        return uncompared, (*diverged, uncompared, *at_longest)
    if max(comparison.change.n for comparison in compared) == 1:
        return NOTHING, (*diverged, NOTHING, *(final if study.is_chain else ()), *at_longest)
    findings: Sequence[Finding] = compared
    if any(effect.change.is_tested for effect in result.effects):
        findings = result.effects
        verdict = _verdict(findings, "effect", unit)
    elif steps:
        verdict = _verdict(findings, "step" if study.is_chain else "comparison", unit)
    else:
        verdict = _winner(result, compared)
    is_tested = result.tests != "none"
    return verdict, (
        *diverged,
        *_not_significant(findings, unit),
        *_within(study.margin, findings, unit),
        *_of_these_documents(compared),
        *_untested(findings),
        *(final if len(compared) > 1 else ()),
        *([f"Significance is at 5%, by {result.tests}; the intervals are those of these tests."] * is_tested),
        *_spent_level(study, findings),
        *at_longest,
    )


def _obstacle(result: Result) -> str:
    """Why no two arms can be compared."""
    if len(result.arms) == 1:
        return "there is one arm"
    if result.metric == BITS and any(arm.loss and not arm.bits for arm in result.arms):
        return "their losses are of different texts or tokenizers, and not all have bits per byte"
    return "no arm shares a finished seed with what it is compared with"


def _name(found: Finding) -> str:
    """The name of a step, an arm or an effect, with the effects that cannot be separated from it."""
    aliases = [term_name(axes) for axes in found.aliases] if isinstance(found, Effect) else []
    return f"{found.name} (aliased with {conjoin(aliases)})" if aliases else found.name


def _verdict(findings: Sequence[Finding], noun: str, unit: str) -> str:
    """How many steps or effects lowered and raised the loss, and which changed it most."""
    tested = [f for f in findings if f.change.is_tested]
    clear = sorted((f for f in tested if f.change.significant), key=_size, reverse=True)
    if not tested:
        return f"No {noun} could be tested."
    if len(findings) == 1:
        verb = f"{VERBS[clear[0].change.verdict]} the loss" if clear else "did not change the loss significantly"
        return f"{_name(tested[0])} {verb}: {tested[0].change.text} {unit}."
    if not clear:
        return f"No {noun} changed the loss significantly."
    lower, higher = (sum(f.change.verdict == verdict for f in clear) for verdict in VERBS)
    totals = [f"{lower} lowered the loss"] * (lower > 0)
    totals += [f"{higher} raised {'it' if lower else 'the loss'}"] * (higher > 0)
    most = f"{_name(clear[0])} {'changed it most' if len(clear) > 1 else 'did'}"
    return f"Of {count(len(findings), noun)}, {conjoin(totals)}; {most}: {clear[0].change.text} {unit}."


def _winner(result: Result, compared: Sequence[Comparison]) -> str:
    """Which arm is best and by how much, by the tests of all pairs, or else of each arm against the baseline."""
    baseline, others = result.study.baseline, len(result.arms) - 1
    tested = [c for c in result.pairs or compared if c.change.is_tested]
    if not tested:
        return "No arm could be tested."
    lower, higher = ([c for c in compared if c.change.verdict == verdict] for verdict in VERBS)
    lower.sort(key=_size, reverse=True)
    best = lower[0].arm if lower else baseline
    common = common_losses(result.arms, result.metric)
    if is_ranked := bool(result.ranks) and not common.empty:
        means = common.mean()
        best = min((name for name, (first, _) in result.ranks.items() if first == 1), key=means.__getitem__)
    clear = [c for c in tested if best in (c.arm, c.against) and c.change.significant]
    beaten = [c.arm if c.against == best else c.against for c in clear]
    if not beaten:
        return f"No clear winner: no arm differs significantly from {best}."
    sizes = f"by {_sizes(clear)} {result.unit}"
    if len(beaten) == others:
        return f"{best} is best; {'all others are' if others > 1 else _are(beaten)} significantly worse, {sizes}."
    if is_ranked:
        equal = [name for name in result.ranks if name not in (best, *beaten)]
        best += f" is best, but not significantly better than {_named(equal)}" if equal else " is best"
        return f"{best}; {_are(beaten)} significantly worse, {sizes}."
    if best == baseline:
        return f"No arm is significantly better than {best}; {_are(beaten)} significantly worse, {sizes}."
    also = [f"{_are([c.arm for c in lower[1:]])} better, too"] if lower[1:] else []
    also += [f"{_are([c.arm for c in higher])} worse"] if higher else []
    return f"{'; '.join([f'{best} is significantly better than {baseline}, {sizes}', *also])}."


def _size(found: Finding) -> float:
    return abs(found.change.mean)


def _sizes(found: Sequence[Finding]) -> str:
    """`0.16 [0.12, 0.20]` of one significant change, and the smallest and the largest of several."""
    ends = [sorted((abs(one.change.low), abs(one.change.high))) for one in found]
    digits = max(decimals(low, high) for low, high in ends)
    sizes = sorted(map(_size, found))
    if len(found) == 1:
        return with_interval(sizes[0], ends[0][0], ends[0][1])
    return f"{number(sizes[0], digits)} to {number(sizes[-1], digits)}"


def _are(names: Sequence[str]) -> str:
    """`llama is`, `gpt2 and bloom are`, `7 arms are`."""
    return f"{_named(names)} {'is' if len(names) == 1 else 'are'}"


def _named(names: Sequence[str]) -> str:
    return conjoin(names) if len(names) <= MOST_NAMED else count(len(names), "arm")


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


def _spent_level(study: Study, findings: Sequence[Finding]) -> list[str]:
    """The level of the tests if it is not 5%, or why there are none."""
    seeds = sorted({f.change.n for f in findings})
    if study.level_share(seeds[-1]) == 0:
        return [
            f"There is no p at {seeds[-1]} seeds, since a report at {min(study.reported_seeds or ())} spent the whole "
            f"level of 5%: to test again as seeds are added, declare study.max_seeds before a study's first report."
        ]
    tested = sorted({f.change.n for f in findings if f.change.is_tested})
    if study.max_seeds is None or not tested:
        return []
    levels = conjoin([f"{LEVEL * study.level_share(n):.3g} for {n}" for n in tested])
    return [
        f"Tested at {levels} of at most {study.max_seeds} seeds (study.max_seeds), with p scaled to 5%: the intervals "
        f"of all reports of this study hold together."
    ]


def _of_these_documents(compared: Sequence[Comparison]) -> list[str]:
    """Which significant changes might not show on other text."""
    names = conjoin([c.name for c in compared if c.is_of_these_documents])
    return [f"Of these documents only: {names}; over other held-out text the change may be zero."] if names else []


def _untested(findings: Sequence[Finding]) -> list[str]:
    """Which findings were not tested, and why."""
    compared = [f for f in findings if isinstance(f, Comparison) and not f.change.is_tested]
    reasons = {f"{c.arm} is not tested against {c.against}": c.untested for c in compared}
    no_sentence = ("", NO_LEVEL_LEFT)
    sentences = [f"{what}: {why}." for what, why in reasons.items() if why not in no_sentence and "diverged" not in why]
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
    elif last.change.n == 1:
        verdict = ", which may be noise"
    change = ", ".join(filter(None, [f"{last.change.text} {result.unit}", p_value(last.change.p)]))
    first = f"the first arm, {last.against}," if last.against == result.arms[0].name else last.against
    return [f"From {first} to the last, {last.arm}, the loss changed by {change}{verdict}."]


def _lowest(result: Result) -> list[str]:
    """The arm with the lowest mean over the seeds that all have finished; not of several sizes or targets."""
    if result.scaling or len(result.targets) > 1:
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
