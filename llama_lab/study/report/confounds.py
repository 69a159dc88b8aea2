"""The controls of a study: what differs between runs that should differ in nothing but their arm.

Every finding is a sentence that names the runs and the values concerned.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llama_lab.config.trust import Trust
from llama_lab.formatting import TIMES, count, enumerate_some, learning_rate, number, percent
from llama_lab.runs.record import NOT_BEGUN, Record
from llama_lab.study.naming import MOST_NAMES, by_value, disagreement, named, sentence, values_in
from llama_lab.study.settings import RATE, SEEDS, unequal_settings
from llama_lab.study.speed import StudySpeed
from llama_lab.study.study import Study

from .audit import misrecorded
from .inference import TIMED, rounds
from .result import ArmResult, LearningRates
from .surroundings import unequal_surroundings

MOST_RESIDUAL = 0.005  # of matching
MOST_UNMATCHED = 0.01  # difference in parameters, where nothing was matched
MOST_UNQUIET = 1.5  # of the slowest over the fastest round of one measurement

# What speeds of inference are measured on and with, as a sentence calls it, and its key in eval.json.
MEASURED_WITH = {"device": "device", "precision": "precision", "CPU threads": "threads", "torch": "torch"}


def confounds(
    study: Study,
    arms: Sequence[ArmResult],
    records: Sequence[Record],
    rates: Sequence[LearningRates],
    speed: StudySpeed | None,
    trust: Trust,
) -> tuple[str, ...]:
    """A sentence for everything that was not controlled.

    records: all of the study, each with the name that the study gives its arm. rates: of the arms that sweep them.
    speed: of the arms side by side. trust: what the configs of runs may name to be rebuilt.
    """
    begun = [record for record in records if record.status != NOT_BEGUN]
    return (
        *_unfinished(study, records),
        *_missing_seeds(arms),
        *_single_seeds(arms),
        *unequal_surroundings(begun),
        *_unequal_tokens(begun),
        *unequal_settings(study, begun, is_swept=bool(rates)),
        *misrecorded(study, records, trust),
        *_same_seeds(arms),
        *_unmatched(study, arms),
        *_unequal_search(study, begun, is_swept=bool(rates)),
        *_mistuned(rates, arms),
        *_chosen_on_judged(rates),
        *_rates_on_edge(rates),
        *(_doubtful_speeds(speed, arms, begun) if speed else ()),
        *_unequal_measuring(arms),
        *_unquiet(arms),
        *_unlike_the_formula(arms),
    )


def _unfinished(study: Study, records: Sequence[Record]) -> Iterator[str]:
    """All but tuning runs that diverged: these have told what they were to tell of their learning rate."""
    members = (member for arm in study.arms for member in arm.members)
    told = [t for m, t in zip(members, records, strict=True) if m.tunes is None or t.status != "diverged"]
    for status in sorted({record.status for record in told} - {"done"}):
        runs = [record for record in told if record.status == status]
        yield f"{count(len(runs), 'run')} did not finish ({status}): {named(runs, ())}."


def _missing_seeds(arms: Sequence[ArmResult]) -> Iterator[str]:
    finished = {arm.name: {record.seed for record in arm.records if record.done} for arm in arms}
    every = set().union(*finished.values())
    for name, seeds in finished.items():
        if not seeds:
            yield f"{name} has no finished run, and is not compared."
        elif lacking := sorted(every - seeds):
            noun = "seed" if len(lacking) == 1 else "seeds"
            yield f"{name} lacks {noun} {', '.join(map(str, lacking))}: it is compared over the others."


def _single_seeds(arms: Sequence[ArmResult]) -> Iterator[str]:
    if single := [arm.name for arm in arms if arm.loss is not None and arm.loss.n == 1]:
        yield f"Only one seed: {enumerate_some(single, MOST_NAMES)}. How much seeds differ is not known."


def _unequal_tokens(records: Sequence[Record]) -> Iterator[str]:
    """The budgets, and, where these are equal, what finished runs were really trained on."""
    finished = [record for record in records if record.done]
    budgets = disagreement(records, [f"{record.config['train.tokens']:,.0f}" for record in records])
    trained = disagreement(finished, [f"{record.summary['tokens']:,.0f}" for record in finished])
    if values := budgets or trained:
        yield sentence(f"Training tokens differ: {values}", "more training alone lowers the loss")


def _same_seeds(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Seeds of an arm that are seeds by their name alone."""
    for arm in arms:
        by_seeds: dict[tuple[Any, ...], list[Record]] = {}
        for record in arm.records:
            if record.status != NOT_BEGUN:
                by_seeds.setdefault(tuple(record.config.get(key) for key in SEEDS), []).append(record)
        for (data, model), runs in by_seeds.items():
            if len({run.seed for run in runs}) > 1:
                same = f"data.seed={data} and model.seed={model}"
                yield f"{named(runs, ())} have the same {same}: they are no independent seeds."


def _unmatched(study: Study, arms: Sequence[ArmResult]) -> Iterator[str]:
    for arm in arms:
        if abs(arm.arm.residual or 0) > MOST_RESIDUAL:
            yield f"Matching left {arm.name} {percent(arm.arm.residual)} off in {study.match or 'size'}."
    if study.match in ("none", ""):
        reference = next(arm.costs.get("params_non_embedding") for arm in arms if arm.name == study.baseline)
        for arm in arms:
            excess = (
                arm.costs["params_non_embedding"] / reference - 1
                if reference and "params_non_embedding" in arm.costs
                else 0.0
            )
            if abs(excess) > MOST_UNMATCHED:
                more = "more" if excess > 0 else "fewer"
                size = f"{percent(abs(excess))} {more} parameters without embeddings"
                yield f"{arm.name} has {size} than {study.baseline}."


def _unequal_search(study: Study, records: Sequence[Record], is_swept: bool) -> Iterator[str]:
    """Arms that had different learning rates to be best at."""
    tuned = any(arm.tuning for arm in study.arms)  # more rates find no lower loss on a seed that has not chosen them
    if not is_swept or tuned or RATE in {axis for arm in study.arms for axis in arm.axes}:
        return
    found = {arm.name: {t.config[RATE] for t in records if t.arm == arm.name} for arm in study.arms}
    grids = [", ".join(map(learning_rate, sorted(found[record.arm]))) for record in records]
    if values := disagreement(records, grids):
        yield f"Learning rates searched differ: {values}; the best of more rates is lower by chance alone."


def _rates_on_edge(rates: Sequence[LearningRates]) -> Iterator[str]:
    for arm in rates:
        if arm.on_edge:
            low, high = (learning_rate(rate) for rate in (min(arm.rates), max(arm.rates)))
            chosen = sorted(set(arm.chosen.values()) or {arm.best})
            best = enumerate_some([learning_rate(rate) for rate in chosen], MOST_NAMES)
            further = "; study.extend_rates=true goes on" if arm.chosen else ""
            yield (
                f"{arm.arm} is best at {best}, an end of the grid from {low} to {high}: a better rate may lie "
                f"beyond{further}."
            )


def _mistuned(rates: Sequence[LearningRates], arms: Sequence[ArmResult]) -> Iterator[str]:
    """Runs that are judged at another rate than their tuning runs choose."""
    chosen = {(of_arm.arm, seed): rate for of_arm in rates for seed, rate in of_arm.chosen.items()}
    for record in (record for arm in arms for record in arm.records if record.status != NOT_BEGUN):
        own, best = record.config.get(RATE), chosen.get((record.arm, record.seed))
        if best is not None and own != best:
            yield (
                f"{named([record], ())} is judged at the learning rate {learning_rate(own)}, where its tuning runs "
                f"choose {learning_rate(best)}."
            )


def _chosen_on_judged(rates: Sequence[LearningRates]) -> Iterator[str]:
    """Arms whose rates were chosen on the runs that are compared."""
    if found := [arm.arm for arm in rates if not arm.chosen]:
        yield (
            f"The learning rate of {enumerate_some(found, MOST_NAMES)} was chosen on the runs that are compared, "
            f"which p does not allow for."
        )


def one_rate(study: Study, records: Sequence[Record], is_swept: bool) -> Iterator[str]:
    """A note on arms that had no learning rate of their own, as most have not."""
    rates = {record.config.get(RATE) for record in records if record.status != NOT_BEGUN}
    if not is_swept and len(rates) == 1 and len(study.arms) > 1:
        rate = learning_rate(*rates)
        yield f"One learning rate for all arms, {rate}: an arm with another optimum is at a disadvantage."


def _doubtful_speeds(speed: StudySpeed, arms: Sequence[ArmResult], records: Sequence[Record]) -> Iterator[str]:
    """What is wrong with speeds that were measured side by side."""
    here = (speed.device, speed.devices, speed.precision, speed.threads)
    runs = [(t, tuple(t.facts.get(key) for key in ("device", "devices", "precision", "cpu_threads"))) for t in records]
    elsewhere = [(record, hardware) for record, hardware in runs if hardware != here]
    if elsewhere:
        places = values_in(by_value([t for t, _ in elsewhere], [_hardware(*h) for _, h in elsewhere]), records)
        yield f"Speeds were measured on {_hardware(*here)}, but runs trained on other hardware: {places}."
    unquiet = [name for name, arm in speed.arms.items() if any(map(_is_spread, (arm.train, arm.decode)))]
    if unquiet:
        rounds_of = enumerate_some(unquiet, MOST_NAMES)
        spread = f"rounds differ more than {MOST_UNQUIET}{TIMES} in {rounds_of}"
        yield f"The machine was not quiet while speeds were measured: {spread}."
    if logged := [arm.name for arm in arms if arm.name not in speed.arms and "perf/tokens_per_second" in arm.costs]:
        names = enumerate_some(logged, MOST_NAMES)
        yield f"The speed of {names} is as its runs logged it, not measured with the others."


def _is_spread(rounds: Sequence[float]) -> bool:
    return max(rounds) > MOST_UNQUIET * min(rounds)


def _hardware(device: object, devices: object, precision: object, threads: object) -> str:
    """`2 x NVIDIA H100, bf16-mixed, 8 CPU threads`."""
    return f"{devices} x {device}, {precision}, {threads} CPU threads"


def _unequal_measuring(arms: Sequence[ArmResult]) -> Iterator[str]:
    """What the speeds of inference were measured on, with, and at."""
    records = _with_part(arms, "speed")
    facts = {name: [str(t.evaluation.get(key, "unknown")) for t in records] for name, key in MEASURED_WITH.items()}
    facts["largest context"] = [f"{max(one['context'] for one in t.evaluation['speed']):,}" for t in records]
    for fact, found in facts.items():
        if values := disagreement(records, found):
            yield f"Measurements of inference differ in {fact}: {values}; their speeds cannot be compared."


def _unquiet(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Speeds that something else on the machine took part in."""
    records = _with_part(arms, "speed")
    if found := [record for record in records if any(map(_is_unquiet, record.evaluation["speed"]))]:
        names = enumerate_some(list(dict.fromkeys(record.arm for record in found)), MOST_NAMES)
        spread = f"more than {MOST_UNQUIET}{TIMES} the fastest"
        yield f"The machine was not quiet while inference was measured: a round took {spread} in {names}."


def _is_unquiet(entry: dict[str, Any]) -> bool:
    return any(max(taken) > MOST_UNQUIET * min(taken) for part in TIMED if (taken := rounds(entry, part)))


def _unlike_the_formula(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Arms whose KV cache is not of the size that the cost model gives it, with one example each."""
    found = {
        record.arm: (entry["measured_bytes"], entry["formula_bytes"], entry["context"])
        for record in _with_part(arms, "cache")
        for entry in record.evaluation["cache"]
        if entry["measured_bytes"] != entry["formula_bytes"]
    }
    for arm, (measured, formula, context) in found.items():
        sizes = f"{number(measured)} bytes are measured, and {number(formula)} by the formula"
        yield f"The KV cache of {arm} is not what its formula says: at {context:,} tokens {sizes}."


def _with_part(arms: Sequence[ArmResult], part: str) -> list[Record]:
    """The runs that arms are judged by and that have been evaluated in this."""
    return [record for arm in arms for record in arm.records if record.evaluation.get(part)]
