"""The controls of a study: what differs between runs that should differ in nothing but their arm.

Every finding is a sentence that names the runs and the values concerned.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llama_lab.training.folder import CHANGEABLE, belongs

from .record import Study
from .result import ArmResult, LearningRates
from .trial import NOT_BEGUN, Trial
from .words import count, enumerate_some, learning_rate, percent

MOST_RESIDUAL = 0.005  # of matching
MOST_UNMATCHED = 0.01  # difference in parameters, where nothing was matched
MOST_NAMES = 8  # in one sentence

# Settings that may differ: of where a run computes; of its name and seed, which pairing takes care of; of the model,
# which is what arms are about; of the files of text, since their hash is compared.
UNCOMPARED = (*CHANGEABLE, "name", "arm", "study", "seed", "data.seed", "data.files", "data.source", "model", "size")
COMPARED = ("model.max_seq_len",)  # a longer context lowers the loss of any model

# What it means that runs differ in a fact of `surroundings`.
CONSEQUENCES = {
    "device": "their speeds cannot be compared, and their losses differ by rounding",
    "precision": "a part of the difference in loss may be rounding",
    "attention kernel": "their speeds are not those of their architectures",
    "data": "their losses are of different texts",
    "tokenizer": "their nats per token mean different things",
    "CPU threads": "their speeds cannot be compared",
    "torch": "their kernels and rounding may differ",
    "commit": "their code may differ",
}


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
        *_unpaired(begun),
        *_unmatched(study, arms),
        *_rates_on_edge(rates),
        *_one_rate(study, begun, is_swept=bool(rates)),
    )


def surroundings(trial: Trial) -> dict[str, str]:
    """What a run ran on and with, by the names that a report uses; hashes and commits by their first 12 digits."""
    facts = trial.facts
    git = facts.get("git") or {}
    versions = facts.get("versions", {})
    values = {
        "device": facts.get("device"),
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
    ignored = (*CHANGEABLE, "name", "arm", "study", "seed", "data.seed", "model.seed", *_swept(is_swept))
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
    axes = {axis for arm in study.arms for axis in arm.axes}
    ignored = (*UNCOMPARED, "train.tokens", *_swept(is_swept))
    for key in sorted({key for trial in trials for key in trial.config}):
        # An axis is a group, a key, or the end of a key, such as `warmup`.
        is_axis = belongs(key, tuple(axes)) or key.rpartition(".")[2] in axes
        if is_axis or (belongs(key, ignored) and key not in COMPARED):
            continue
        if values := _disagreement(trials, [_text(trial.config.get(key, "unset")) for trial in trials]):
            yield f"{key} differs: {values}."


def _unpaired(trials: Sequence[Trial]) -> Iterator[str]:
    """Pairs share the order of their data and the seed of their parameters."""
    for key in ("data.seed", "model.seed"):
        for seed in sorted({trial.seed for trial in trials}):
            pairs = [trial for trial in trials if trial.seed == seed]
            if values := _disagreement(pairs, [str(trial.config.get(key)) for trial in pairs]):
                yield f"{key} differs between the runs of seed {seed}: {values}."


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
