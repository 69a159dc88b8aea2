"""A report's warnings: what a study did not control, or its verdicts do not account for, with the runs and values."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter

from llama_lab.runs.record import finished, started
from llama_lab.runs.study import MOST_RESIDUAL
from llama_lab.util.formatting import TIMES, conjoin, count, enumerate_some, learning_rate, number, percent

from . import audit
from .comparisons import in_two_groups, noise
from .environments import unequal_environments, unequal_machines, unequal_texts
from .inference import TIMED
from .rate_choice import USEFUL
from .result import SECOND_HALF, Result, unit_of
from .sentences import (
    MOST_NAMES,
    by_fault,
    by_value,
    disagreement,
    disagreements,
    listing,
    named,
    run_name,
    sentence,
    values_in,
)
from .settings import RATE, SEEDS, TOKENS
from .unequal_settings import predicted_share, unequal_settings

OPTIMIZER = "optim"
MOST_UNMATCHED = 0.01  # difference in parameters without matching, as a fraction
MOST_UNQUIET = 1.5  # slowest over fastest round of one measurement
MOST_NOISE = 3.0  # standard deviation of an arm over the typical one; see docs/statistics.md

# The conditions of a measurement of inference, by name, and as fields of an Evaluation.
MEASURED_WITH = {"device": "device", "precision": "precision", "CPU threads": "threads", "torch": "torch"}


def warnings(result: Result) -> tuple[str, ...]:
    """What was not controlled, or the verdicts do not account for: a sentence for each kind, the gravest first."""
    return tuple(sentence for rule in RULES for sentence in rule(result))


def _missing(result: Result) -> Iterator[str]:
    """Unfinished runs, but for tuning runs that diverged, which is a result; and the seeds that arms lack."""
    expected = [r for member, r in result.members if member.tunes is None or r.status != "diverged"]
    for status in sorted({record.status for record in expected} - {"done"}):
        runs = [record for record in expected if record.status == status]
        yield f"{count(len(runs), 'run')} did not finish ({status}): {named(runs)}."
    seeds_of = {arm.name: {record.seed for record in finished(arm.records)} for arm in result.arms}
    every = set().union(*seeds_of.values())
    yield from listing("No finished run", [name for name, seeds in seeds_of.items() if not seeds], "not compared")
    lacking = {name: ", ".join(map(str, sorted(every - seeds))) for name, seeds in seeds_of.items() if seeds}
    cases = [f"{name} lacks {seeds}" for name, seeds in lacking.items() if seeds]
    yield from listing("Seeds differ", cases, "these arms are compared over the others")
    single = [arm.name for arm in result.arms if arm.loss is not None and arm.loss.n == 1]
    yield from listing("Only one seed", single, "the variation over seeds is unknown")


def _unequal_tokens(result: Result) -> Iterator[str]:
    """Different budgets, or, with equal budgets, different numbers of tokens in finished runs, but for planned ones."""
    planned = {arm.name: str((arm.settings or {}).get(TOKENS)) for arm in result.study.arms}
    for runs in by_value(result.started, [planned[record.arm] for record in result.started]).values():
        done = finished(runs)
        budgets = disagreement(runs, [f"{record.config[TOKENS]:,.0f}" for record in runs])
        trained = disagreement(done, [f"{record.summary['tokens']:,.0f}" for record in done])
        if values := budgets or trained:
            yield sentence(f"Training tokens differ: {values}", "more training alone lowers the loss")


def _unequal_targets(result: Result) -> Iterator[str]:
    """What the losses of several families are of, and how many of the tokens that arms read they predict."""
    done = finished(result.records) if result.metric == SECOND_HALF else []
    read = [record.summary["tokens"] for record in done]
    counts = [f"{predicted_share(one.config) * n:,.0f} of {n:,.0f}" for one, n in zip(done, read, strict=True)]
    if values := disagreement(done, counts):
        equal = "equal" if len({*read}) == 1 else "not equal"
        yield f"Losses are of second halves; arms are {equal} in tokens read, and not in targets predicted: {values}."


def _same_seeds(result: Result) -> Iterator[str]:
    """Arms whose runs have different seeds in name only, or in part."""
    shared: dict[str, list[str]] = {}
    for arm in result.arms:
        runs = {record.seed: record for record in started(arm.records)}.values()
        values = {key: [run.config[key] for run in runs if run.config.get(key) is not None] for key in SEEDS}
        if same := " and ".join(key for key, found in values.items() if len({*found}) < len(found)):
            shared.setdefault(same, []).append(arm.name)
    for same, names in shared.items():
        what = f"Runs of different seeds have the same {same} in {enumerate_some(names, MOST_NAMES)}"
        yield sentence(what, "they are not independent, and intervals are too short")


def _one_source(result: Result) -> Iterator[str]:
    """Seeds of which all start from one trained model."""
    runs = [run for arm in result.arms for run in started(arm.records)]
    sources = {run.environment.init_hash for run in runs}
    if len(sources) == 1 and sources != {""} and len({run.seed for run in runs}) > 1:
        yield "All runs start from the same trained weights: intervals leave out how much those vary from seed to seed."


def _unmatched(result: Result) -> Iterator[str]:
    study, arms = result.study, result.arms
    off = [f"{arm.name} {percent(arm.arm.residual)}" for arm in arms if abs(arm.arm.residual or 0) > MOST_RESIDUAL]
    yield from listing(f"Matching left arms off in {study.match or 'size'}", off)
    unlike = []
    sizes = {arm.name: arm.costs["params_non_embedding"] for arm in arms if "params_non_embedding" in arm.costs}
    for arm in arms if study.match in ("none", "") else ():
        reference = arm.arm.reference or study.baseline
        size, wanted = sizes.get(arm.name, math.nan), sizes.get(reference) or math.nan
        excess = size / wanted - 1  # comparisons with nan are false
        if abs(excess) > MOST_UNMATCHED:
            unlike.append(f"{arm.name} {percent(abs(excess))} {'more' if excess > 0 else 'fewer'} than {reference}")
    yield from listing("Parameters without embeddings differ", unlike)


def _unequally_tuned(result: Result) -> Iterator[str]:
    """Learning rates that were not searched, were searched unequally, or are not those that tuning chose."""
    study, rates, records = result.study, result.learning_rates, result.started
    used = {arm.name: [r.config.get(RATE, math.nan) for r in records if r.arm == arm.name] for arm in study.arms}
    tuned = any(arm.tuning for arm in study.arms)  # on other seeds, a larger grid gives no advantage
    if rates and not tuned and RATE not in study.axes:
        grids = [", ".join(map(learning_rate, sorted({*used[record.arm]}))) for record in records]
        if values := disagreement(records, grids):
            yield f"Learning rates searched differ: {values}; the best of more rates is lower by chance alone."
    chosen = {(of_arm.arm, seed): rate for of_arm in rates for seed, rate in of_arm.chosen.items()}
    tuners = {arm.name: arm.tuner for arm in study.arms}
    judged = started(record for arm in result.arms for record in arm.records)
    pairs = [(r, r.config.get(RATE), chosen.get((tuners[r.arm], r.seed))) for r in judged]
    yield from listing(
        "Runs are judged at another learning rate than their tuning runs choose",
        [
            f"{run_name(run)} at {learning_rate(own)} instead of {learning_rate(best)}"
            for run, own, best in pairs
            if best is not None and own != best
        ],
    )
    searching = "study.learning_rates searches them"
    if not rates and OPTIMIZER in study.axes:
        last = {arm.axes[OPTIMIZER]: used[arm.name][-1] for arm in study.arms if used[arm.name]}
        cases = [f"{name} {learning_rate(rate)}" for name, rate in last.items()]
        what = "Each optimizer had one learning rate, which was not searched"
        yield from listing(what, cases, f"a difference may be that of the rates; {searching}")
    elif not rates and len(result.arms) > 1 and len(same := {*chain(*used.values())}) == 1:
        rate = learning_rate(*same)
        yield f"One learning rate for all arms, {rate}: an arm with another optimum is at a disadvantage; {searching}."


def _doubtful_rates(result: Result) -> Iterator[str]:
    """Learning rates that were chosen on the judged runs, or at an end of their grid."""
    rates = result.learning_rates
    on_judged = [of_arm.arm for of_arm in rates if not (of_arm.chosen or math.isnan(of_arm.best))]
    what = "Learning rates were chosen on the runs that are compared"
    yield from listing(what, on_judged, "p-values do not account for the choice")
    cases = []
    for of_arm in (of_arm for of_arm in rates if of_arm.at_edge):
        low, high = (learning_rate(rate) for rate in (min(of_arm.rates), max(of_arm.rates)))
        ends = " and ".join(map(learning_rate, sorted({*of_arm.at_edge})))
        cases.append(f"{of_arm.arm} at {ends} of {low} to {high}")
    further = "; study.extend_rates=true goes on to its limit" if any(of_arm.chosen for of_arm in rates) else ""
    yield from listing("Best at an end of the grid of learning rates", cases, f"a better rate may lie beyond{further}")


def _doubtful_speeds(result: Result) -> Iterator[str]:
    """Speeds of a study that were measured on other hardware, under other load, or not at all."""
    if not (speed := result.speed):
        return
    hardware = "{} x {}, {}, {} CPU threads".format  # `2 x NVIDIA H100, bf16-mixed, 8 CPU threads`
    here = hardware(speed.devices, speed.device, speed.precision, speed.threads)
    ours = [record.environment for record in result.started]
    places = [hardware(at.devices, at.device, at.precision, at.cpu_threads) for at in ours]
    if others := by_fault(result.started, ["" if place == here else place for place in places]):
        elsewhere = values_in(others, result.started)
        yield f"Speeds were measured on {here}, but runs trained on other hardware: {elsewhere}."
    unquiet = [n for n, arm in speed.arms.items() if any(map(_is_unquiet, (arm.train, arm.decode, arm.prefill)))]
    what = f"The machine was not quiet while speeds were measured, with rounds more than {MOST_UNQUIET}{TIMES} apart"
    yield from listing(what, unquiet)
    logged = [a.name for a in result.arms if a.name not in speed.arms and "perf/tokens_per_second" in a.costs]
    yield from listing("Speeds are as runs logged them, not measured with the others", logged)


def _is_unquiet(rounds: Sequence[float]) -> bool:
    return bool(rounds) and max(rounds) > MOST_UNQUIET * min(rounds)


def _doubtful_inference(result: Result) -> Iterator[str]:
    """Inference that was measured under unequal conditions or other load, or whose cache has another size."""
    evaluated = [record for arm in result.arms for record in arm.records]
    records = [record for record in evaluated if record.evaluation.speed]
    measured = [record.evaluation for record in records]
    facts = {name: [str(getattr(one, key) or "unknown") for one in measured] for name, key in MEASURED_WITH.items()}
    facts["largest context"] = [f"{max(speed.context for speed in one.speed):,}" for one in measured]
    for fact, values in disagreements(records, facts).items():
        yield f"Measurements of inference differ in {fact}: {values}; their speeds cannot be compared."
    at_lengths = [record for record in evaluated if record.evaluation.lengths]
    for key in ("device", "precision"):
        if values := disagreement(at_lengths, [getattr(one.evaluation, key) for one in at_lengths]):
            yield f"Losses at several contexts were evaluated with unequal {key}: {values}; they differ by rounding."
    speeds = [(record.arm, speed) for record in records for speed in record.evaluation.speed]
    unquiet = [arm for arm, speed in speeds if any(_is_unquiet(getattr(speed, part)) for part in TIMED)]
    what = f"The machine was not quiet while inference was measured, with rounds more than {MOST_UNQUIET}{TIMES} apart"
    yield from listing(what, unquiet)
    caches = [(record.arm, cache) for record in evaluated for cache in record.evaluation.cache]
    unequal = {arm: cache for arm, cache in caches if cache.measured_bytes != cache.formula_bytes}
    cases = [
        f"{arm} {number(cache.measured_bytes)} instead of {number(cache.formula_bytes)} at {cache.context:,} tokens"
        for arm, cache in unequal.items()
    ]
    yield from listing("KV caches have other bytes than by their formula", cases)


def _doubtful_tests(result: Result) -> Iterator[str]:
    """What p-values do not account for: two seeds, repeated looks, noisy arms."""
    spread = noise(result)
    of_arms = (found for arm in result.arms for found in (arm.to_previous, arm.to_baseline))
    tested = [f for f in (*of_arms, *result.pairs, *result.effects) if f and f.change.is_tested]
    if tested and max(finding.change.n for finding in tested) == 2:
        others = "an arm's noise is estimated mostly from the other arms, and " if spread else ""  # of two arms: not
        yield f"Two seeds: {others}one outlier can decide a verdict."
    if result.study.looks:
        yield (
            f"Seeds were added after {count(result.study.looks, 'report')}: p and intervals no longer hold as printed. "
            f"Testing at 3, 4, 5 and 6 seeds until something is significant finds something in 6 to 12% of studies "
            f"without an effect."
        )
    yield from listing(
        "Arms vary more over seeds than the typical one",
        [f"{name} {number(ratio, 1)}{TIMES}" for name, ratio in spread.items() if ratio > MOST_NOISE],
        "where noise is skewed, comparisons with them are often falsely significant (docs/statistics.md)",
    )
    yield from listing(
        "Seeds fall into two groups",
        [f"{name} {conjoin([number(loss, 3) for loss in losses])}" for name, losses in in_two_groups(result).items()],
        "a mean describes neither, and comparisons are often falsely significant; look at the curves, and add seeds",
    )


def _little_learned(result: Result) -> Iterator[str]:
    """Arms that learned little else than token frequencies, or saw more text in as many tokens."""
    arms, cases = result.arms, []
    for arm in arms:
        entropies = [entropy for r in arm.records if r.done and (entropy := r.environment.unigram_entropy)]
        if arm.loss and entropies and arm.loss.mean > USEFUL * min(entropies):
            cases.append(f"{arm.name} ends at {number(arm.loss.mean, 3)}, these give {number(min(entropies), 3)}")
    who = "No arm has" if len(cases) == len(arms) else "Arms have not"
    what = f"{who} learned more than token frequencies, in {unit_of(arms, 'val/loss')}"
    yield from listing(what, cases, "differences mean little")
    lengths = {arm.name: [size for r in arm.records if (size := r.environment.bytes_per_token)][:1] for arm in arms}
    known = {name: sizes[0] for name, sizes in lengths.items() if sizes}
    if result.metric == "val/bits_per_byte" and len(set(known.values())) > 1:
        sizes = ", ".join(f"{length:.2f} bytes in {name}" for name, length in known.items())
        yield f"A token is {sizes}: with equal tokens an arm with longer ones has seen more text."


# The gravest first: what no verdict survives, what may turn one, and what concerns speeds alone.
RULES = (
    _little_learned,
    _missing,
    unequal_texts,
    _unequal_tokens,
    _unequal_targets,
    unequal_settings,
    audit.mislabelled,
    audit.copies,
    audit.unlike_their_curves,
    audit.impossible,
    audit.of_another_size,
    _unequally_tuned,
    _unmatched,
    _doubtful_rates,
    audit.unlike_positions,
    _same_seeds,
    _one_source,
    _doubtful_tests,
    unequal_environments,
    _doubtful_inference,
    unequal_machines,
    audit.unequal_speeds,
    _doubtful_speeds,
)


def notes(result: Result) -> tuple[str, ...]:
    """The study's own notes, and what a better learning rate could change."""
    found = list(result.study.notes)
    if known := [of_arm for of_arm in result.learning_rates if not math.isnan(of_arm.left)]:
        most = max(known, key=attrgetter("left"))
        found.append(
            f"Rates are chosen from noisy runs: by the curvature of the losses around them, the judged runs of "
            f"{most.arm} end {most.left:.2g} {unit_of(result.arms, 'val/loss')} above the loss at its best rate, the "
            f"most of all arms."
        )
    return tuple(found)
