"""How a sentence names runs, and the values in which they differ."""

from collections.abc import Sequence

from llama_lab.formatting import enumerate_some
from llama_lab.runs.record import Trial

MOST_NAMES = 8  # in one sentence
MOST_KEYS = 4  # in one sentence


def disagreement(trials: Sequence[Trial], values: Sequence[str]) -> str:
    """`cuda in rmsnorm/seed=2; cpu in gpt2, rmsnorm/seed=1`, the rarest value first; empty where all agree."""
    groups = by_value(trials, values)
    return values_in(groups, trials) if len(groups) > 1 else ""


def by_value(trials: Sequence[Trial], values: Sequence[str]) -> dict[str, list[Trial]]:
    """The runs that have each value."""
    groups: dict[str, list[Trial]] = {}
    for trial, value in zip(trials, values, strict=True):
        groups.setdefault(value, []).append(trial)
    return groups


def values_in(groups: dict[str, list[Trial]], every: Sequence[Trial]) -> str:
    """`cuda in rmsnorm/seed=2; cpu in gpt2, rmsnorm/seed=1`, the rarest value first."""
    rarest_first = sorted(groups.items(), key=lambda group: len(group[1]))
    return "; ".join(f"{value} in {named(runs, every)}" for value, runs in rarest_first)


def named(runs: Sequence[Trial], every: Sequence[Trial]) -> str:
    """The arms all of whose runs in `every` are among `runs`, and the other runs one by one."""
    partial = {trial.arm for trial in every if trial not in runs} if every else {trial.arm for trial in runs}
    names = [run_name(run) if run.arm in partial else run.arm for run in runs]
    return enumerate_some(list(dict.fromkeys(names)), MOST_NAMES)


def run_name(run: Trial) -> str:
    """`rmsnorm/seed=2`, or `rmsnorm-lr=0.001/seed=2` where learning rates are swept, as its folder says."""
    folder, seed = run.path.parent.name, run.path.name
    arm = folder if folder.startswith(f"{run.arm}-lr=") else run.arm
    return f"{arm}/{seed if seed.startswith('seed=') else f'seed={run.seed}'}"


def first_and_more(found: dict[str, str]) -> str:
    """One setting with its values, and the names of the others."""
    first, *others = found
    more = f"; also in {enumerate_some(others, MOST_KEYS)}" if others else ""
    return f"{first}: {found[first]}{more}"


def sentence(statement: str, consequence: str) -> str:
    """A statement and what it means, if that is known."""
    return f"{statement}; {consequence}." if consequence else f"{statement}."
