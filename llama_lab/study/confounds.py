"""The controls of a study: what differs between runs that should differ in nothing but their arm.

Every finding is a sentence that names the runs and the values concerned.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llama_lab.training.folder import CHANGEABLE, belongs

from .inference import TIMED, rounds
from .record import Study
from .result import ArmResult, LearningRates
from .trial import NOT_BEGUN, Trial
from .words import TIMES, count, enumerate_some, learning_rate, number, percent

MOST_RESIDUAL = 0.005  # of matching
MOST_UNMATCHED = 0.01  # difference in parameters, where nothing was matched
MOST_UNQUIET = 1.5  # of the slowest over the fastest round of one measurement
MOST_NAMES = 8  # in one sentence

# Settings that may differ: of where a run computes; of its name and seed, which pairing takes care of; of the model,
# which is what arms are about; of the text and how much of it is read, since the hashes of data and tokenizer are
# compared.
SEEDS = ("data.seed", "model.seed")
TEXT = ("data.files", "data.source", "data.val_tokens", "tokenizer.sample_bytes")
UNCOMPARED = (*CHANGEABLE, "name", "arm", "study", "seed", "data.seed", *TEXT, "model", "size")
COMPARED = ("model.max_seq_len",)  # a longer context lowers the loss of any model
MOST_KEYS = 4  # in one sentence

# The keys of the config that a group of the model stands for.
GROUPS = {
    "norm": ("model.norm",),
    "block": ("model.block",),
    "position": ("model.position",),
    "attention": ("model.attention", "model.n_kv_heads"),
    "ffn": ("model.ffn", "model.hidden_dim"),
    "embedding": ("model.embedding",),
    "init": ("model.init",),
    "size": (
        "size",
        "model.dim",
        "model.n_layers",
        "model.n_heads",
        "model.head_dim",
        "model.n_kv_heads",
        "model.hidden_dim",
        "model.vocab_size",
    ),
}

# What it means that runs differ in a fact of `surroundings`.
CONSEQUENCES = {
    "device": "their speeds cannot be compared, and their losses differ by rounding",
    "devices": "their speeds cannot be compared, and their losses differ by rounding, with shards in bf16 more so",
    "precision": "a part of the difference in loss may be rounding",
    "attention kernel": "their speeds are not those of their architectures",
    "data": "their losses are of different texts",
    "tokenizer": "their nats per token mean different things",
    "CPU threads": "their speeds cannot be compared",
    "torch": "their kernels and rounding may differ",
    "commit": "their code may differ",
}

# What speeds of inference are measured on and with, as a sentence calls it, and its key in eval.json.
MEASURED_WITH = {"device": "device", "precision": "precision", "CPU threads": "threads", "torch": "torch"}


def confounds(
    study: Study, arms: Sequence[ArmResult], trials: Sequence[Trial], rates: Sequence[LearningRates]
) -> tuple[str, ...]:
    """A sentence for everything that was not controlled.

    trials: all of the study, each with the name that the study gives its arm. rates: of the arms that sweep them.
    """
    begun = [trial for trial in trials if trial.status != NOT_BEGUN]
    return (
        *_unfinished(trials),
        *_missing_seeds(arms),
        *_single_seeds(arms),
        *_unequal_surroundings(begun),
        *_uncommitted(begun),
        *_unequal_tokens(begun),
        *_unequal_settings(study, begun, is_swept=bool(rates)),
        *_mixed_arms(study, begun, is_swept=bool(rates)),
        *_ungrouped(study, begun),
        *_unpaired(begun),
        *_copies(arms),
        *_unmatched(study, arms),
        *_unequal_search(study, begun, is_swept=bool(rates)),
        *_rates_on_edge(rates),
        *_one_rate(study, begun, is_swept=bool(rates)),
        *_unequal_measuring(arms),
        *_unquiet(arms),
        *_unlike_the_formula(arms),
    )


def surroundings(trial: Trial) -> dict[str, str]:
    """What a run ran on and with, by the names that a report uses; hashes and commits by their first 12 digits."""
    facts = trial.facts
    git = facts.get("git") or {}
    versions = facts.get("versions", {})
    values = {
        "device": facts.get("device"),
        "devices": f"{facts.get('devices', 1)}{' shards' if facts.get('sharded') else ''}",
        "precision": facts.get("precision"),
        "attention kernel": facts.get("attention_kernel"),
        "data": facts.get("data_hash", "")[:12],
        "tokenizer": facts.get("tokenizer_hash", "")[:12],
        "python": facts.get("python"),
        "torch": versions.get("torch"),
        "lightning": versions.get("lightning"),
        "platform": facts.get("platform"),
        "CPU threads": facts.get("cpu_threads"),
        "commit": git.get("commit", "")[:12],
        "uncommitted changes": "yes" if git.get("dirty") else "no" if git else None,
    }
    return {name: str(value or "unknown") for name, value in values.items()}


def different_settings(reference: Trial, trial: Trial, is_swept: bool) -> dict[str, tuple[Any, Any]]:
    """Config keys in which two runs differ, those of names, seeds and places left out, with (reference's, trial's)."""
    ignored = (*CHANGEABLE, "name", "arm", "study", "seed", *SEEDS, *_swept(is_swept))
    keys = [key for key in sorted(reference.config.keys() | trial.config.keys()) if not belongs(key, ignored)]
    pairs = {key: (reference.config.get(key), trial.config.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _swept(is_swept: bool) -> tuple[str, ...]:
    return ("optim.lr",) if is_swept else ()


def _unfinished(trials: Sequence[Trial]) -> Iterator[str]:
    for status in sorted({trial.status for trial in trials} - {"done"}):
        runs = [trial for trial in trials if trial.status == status]
        yield f"{count(len(runs), 'run')} did not finish ({status}): {_named(runs, ())}."


def _missing_seeds(arms: Sequence[ArmResult]) -> Iterator[str]:
    finished = {arm.name: {trial.seed for trial in arm.trials if trial.done} for arm in arms}
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


def _unequal_surroundings(trials: Sequence[Trial]) -> Iterator[str]:
    all_values = [surroundings(trial) for trial in trials]
    for fact in all_values[0] if all_values else ():
        if fact != "uncommitted changes" and (values := _disagreement(trials, [v[fact] for v in all_values])):
            yield _sentence(f"Runs differ in {fact}: {values}", CONSEQUENCES.get(fact, ""))


def _uncommitted(trials: Sequence[Trial]) -> Iterator[str]:
    if runs := [trial for trial in trials if (trial.facts.get("git") or {}).get("dirty")]:
        yield f"The code had uncommitted changes: {_named(runs, trials)}. Its commit does not tell what ran."


def _unequal_tokens(trials: Sequence[Trial]) -> Iterator[str]:
    """The budgets, and, where these are equal, what finished runs were really trained on."""
    finished = [trial for trial in trials if trial.done]
    budgets = _disagreement(trials, [f"{trial.config['train.tokens']:,.0f}" for trial in trials])
    trained = _disagreement(finished, [f"{trial.summary['tokens']:,.0f}" for trial in finished])
    if values := budgets or trained:
        yield _sentence(f"Training tokens differ: {values}", "more training alone lowers the loss")


def _unequal_settings(study: Study, trials: Sequence[Trial], is_swept: bool) -> Iterator[str]:
    """The settings that all arms should share."""
    shared = [key for key in _keys(trials) if _is_shared(key, study, is_swept)]
    for key, values in _different(trials, shared).items():
        yield f"{key} differs: {values}."


def _mixed_arms(study: Study, trials: Sequence[Trial], is_swept: bool) -> Iterator[str]:
    """The settings that may differ between arms, but not within one, whose runs are averaged."""
    ignored = (*CHANGEABLE, "name", "arm", "study", "seed", *SEEDS, *TEXT, "train.tokens", *_swept(is_swept))
    for arm in study.arms:
        runs = [trial for trial in trials if trial.arm == arm.name]
        keys = [key for key in _keys(runs) if not belongs(key, ignored) and not _is_shared(key, study, is_swept)]
        if found := _different(runs, keys):
            yield f"Runs that are averaged as {arm.name} differ in {_first_and_more(found)}."


def _ungrouped(study: Study, trials: Sequence[Trial]) -> Iterator[str]:
    """What sets the models of a comparison's arms apart, but is none of the settings that it groups runs by."""
    axes = {axis for arm in study.arms for axis in arm.axes}
    if study.design != "comparison" or "arm" in axes:  # an arm of its own name stands for all of its settings
        return
    grouped = axes | (GROUPS.keys() - {"size"} if "arch" in axes else set())
    others = [group for group in GROUPS if group not in grouped]
    choices = {group: [str(t.facts["choices"].get(group, "unset")) for t in trials] for group in others}
    groups = {group: values for group, options in choices.items() if (values := _disagreement(trials, options))}
    matched = ("model.hidden_dim",) if study.match in ("params", "flops") else ()
    told = (*SEEDS, *COMPARED, *matched, *grouped, *_stands_for(grouped), *_stands_for(groups))
    keys = [key for key in _keys(trials) if belongs(key, ("model", "size")) and not belongs(key, told)]
    if found := groups | _different(trials, keys):
        yield f"Arms differ in more than what they are grouped by: {_first_and_more(found)}."


def _stands_for(groups: Iterable[str]) -> list[str]:
    return [key for group in groups for key in GROUPS.get(group, ())]


def _keys(trials: Sequence[Trial]) -> list[str]:
    return sorted({key for trial in trials for key in trial.config})


def _is_shared(key: str, study: Study, is_swept: bool) -> bool:
    """Whether no arm should have a value of its own: no axis is a group, the key, or its end, such as `warmup`."""
    axes = {axis for arm in study.arms for axis in arm.axes}
    is_axis = belongs(key, tuple(axes)) or key.rpartition(".")[2] in axes
    return not is_axis and (key in COMPARED or not belongs(key, (*UNCOMPARED, "train.tokens", *_swept(is_swept))))


def _different(trials: Sequence[Trial], keys: Sequence[str]) -> dict[str, str]:
    """Those of the keys in which runs differ, with the runs that have each value."""
    found = {key: _disagreement(trials, [_text(t.config.get(key, "unset")) for t in trials]) for key in keys}
    return {key: values for key, values in found.items() if values}


def _first_and_more(found: dict[str, str]) -> str:
    """One setting with its values, and the names of the others."""
    first, *others = found
    more = f"; also in {enumerate_some(others, MOST_KEYS)}" if others else ""
    return f"{first}: {found[first]}{more}"


def _unpaired(trials: Sequence[Trial]) -> Iterator[str]:
    """Pairs share the order of their data and the seed of their parameters."""
    for key in SEEDS:
        for seed in sorted({trial.seed for trial in trials}):
            pairs = [trial for trial in trials if trial.seed == seed]
            if values := _disagreement(pairs, [str(trial.config.get(key)) for trial in pairs]):
                yield f"{key} differs between the runs of seed {seed}: {values}."


def _copies(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Seeds of an arm that are seeds by their name alone."""
    for arm in arms:
        by_seeds: dict[tuple[Any, ...], list[Trial]] = {}
        for trial in arm.trials:
            if trial.status != NOT_BEGUN:
                by_seeds.setdefault(tuple(trial.config.get(key) for key in SEEDS), []).append(trial)
        for (data, model), runs in by_seeds.items():
            if len({run.seed for run in runs}) > 1:
                same = f"data.seed={data} and model.seed={model}"
                yield f"{_named(runs, ())} have the same {same}: they are no independent seeds."


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


def _unequal_search(study: Study, trials: Sequence[Trial], is_swept: bool) -> Iterator[str]:
    """Arms that had different learning rates to be best at."""
    if not is_swept or "optim.lr" in {axis for arm in study.arms for axis in arm.axes}:
        return
    found = {arm.name: {t.config["optim.lr"] for t in trials if t.arm == arm.name} for arm in study.arms}
    grids = [", ".join(map(learning_rate, sorted(found[trial.arm]))) for trial in trials]
    if values := _disagreement(trials, grids):
        yield f"Learning rates searched differ: {values}; the best of more rates is lower by chance alone."


def _rates_on_edge(rates: Sequence[LearningRates]) -> Iterator[str]:
    for arm in rates:
        if arm.on_edge:
            low, high = (learning_rate(rate) for rate in (min(arm.rates), max(arm.rates)))
            best = learning_rate(arm.best)
            yield f"{arm.arm} is best at {best}, an end of the grid from {low} to {high}: a better rate may lie beyond."


def _one_rate(study: Study, trials: Sequence[Trial], is_swept: bool) -> Iterator[str]:
    rates = {trial.config.get("optim.lr") for trial in trials}
    if not is_swept and len(rates) == 1 and len(study.arms) > 1:
        rate = learning_rate(*rates)
        yield f"One learning rate for all arms, {rate}: an arm with another optimum is at a disadvantage."


def _unequal_measuring(arms: Sequence[ArmResult]) -> Iterator[str]:
    """What the speeds of inference were measured on, with, and at."""
    trials = _with_part(arms, "speed")
    facts = {name: [str(t.evaluation.get(key, "unknown")) for t in trials] for name, key in MEASURED_WITH.items()}
    facts["largest context"] = [f"{max(one['context'] for one in t.evaluation['speed']):,}" for t in trials]
    for fact, found in facts.items():
        if values := _disagreement(trials, found):
            yield f"Measurements of inference differ in {fact}: {values}; their speeds cannot be compared."


def _unquiet(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Speeds that something else on the machine took part in."""
    trials = _with_part(arms, "speed")
    if found := [trial for trial in trials if any(map(_is_unquiet, trial.evaluation["speed"]))]:
        names = enumerate_some(list(dict.fromkeys(trial.arm for trial in found)), MOST_NAMES)
        spread = f"more than {MOST_UNQUIET}{TIMES} the fastest"
        yield f"The machine was not quiet while inference was measured: a round took {spread} in {names}."


def _is_unquiet(entry: dict[str, Any]) -> bool:
    return any(max(taken) > MOST_UNQUIET * min(taken) for part in TIMED if (taken := rounds(entry, part)))


def _unlike_the_formula(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Arms whose KV cache is not of the size that the cost model gives it, with one example each."""
    found = {
        trial.arm: (entry["measured_bytes"], entry["formula_bytes"], entry["context"])
        for trial in _with_part(arms, "cache")
        for entry in trial.evaluation["cache"]
        if entry["measured_bytes"] != entry["formula_bytes"]
    }
    for arm, (measured, formula, context) in found.items():
        sizes = f"{number(measured)} bytes are measured, and {number(formula)} by the formula"
        yield f"The KV cache of {arm} is not what its formula says: at {context:,} tokens {sizes}."


def _with_part(arms: Sequence[ArmResult], part: str) -> list[Trial]:
    """The runs that arms are judged by and that have been evaluated in this."""
    return [trial for arm in arms for trial in arm.trials if trial.evaluation.get(part)]


def _text(value: Any) -> str:
    """A setting, the same whether it was written 16 or 16.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _sentence(statement: str, consequence: str) -> str:
    return f"{statement}; {consequence}." if consequence else f"{statement}."


def _disagreement(trials: Sequence[Trial], values: Sequence[str]) -> str:
    """`cuda in rmsnorm/seed=2; cpu in gpt2, rmsnorm/seed=1`, the rarest value first; empty where all agree."""
    groups: dict[str, list[Trial]] = {}
    for trial, value in zip(trials, values, strict=True):
        groups.setdefault(value, []).append(trial)
    if len(groups) < 2:
        return ""
    rarest_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return "; ".join(f"{value} in {_named(runs, trials)}" for value, runs in rarest_first)


def _named(runs: Sequence[Trial], every: Sequence[Trial]) -> str:
    """The arms all of whose runs in `every` are among `runs`, and the other runs one by one."""
    partial = {trial.arm for trial in every if trial not in runs} if every else {trial.arm for trial in runs}
    names = [_run_name(run) if run.arm in partial else run.arm for run in runs]
    return enumerate_some(list(dict.fromkeys(names)), MOST_NAMES)


def _run_name(run: Trial) -> str:
    """`rmsnorm/seed=2`, or `rmsnorm-lr=0.001/seed=2` where learning rates are swept, as its folder says."""
    folder = run.path.parent.name
    return f"{folder if folder.startswith(f'{run.arm}-lr=') else run.arm}/seed={run.seed}"
