"""Names of runs, and of the values in which they differ, for use in sentences."""

from collections.abc import Iterator, Mapping, Sequence

from llama_lab.runs.record import Record
from llama_lab.util.formatting import count, enumerate_some

MOST_NAMES = 8  # in one sentence
MOST_KEYS = 4  # in one sentence


def disagreement(records: Sequence[Record], values: Sequence[str]) -> str:
    """`cuda in rmsnorm/seed=2; cpu in gpt2, rmsnorm/seed=1`, the rarest value first; empty where all agree."""
    groups = by_value(records, values)
    return values_in(groups, records) if len(groups) > 1 else ""


def disagreements(records: Sequence[Record], values: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The `disagreement` about each fact or setting in which runs differ. values: one for each run, by name."""
    return {name: text for name, of_runs in values.items() if (text := disagreement(records, of_runs))}


def by_value(records: Sequence[Record], values: Sequence[str]) -> dict[str, list[Record]]:
    """Group runs by value."""
    groups: dict[str, list[Record]] = {}
    for record, value in zip(records, values, strict=True):
        groups.setdefault(value, []).append(record)
    return groups


def faults_in(statement: str, records: Sequence[Record], faults: Sequence[str]) -> Iterator[str]:
    """One sentence with what is wrong with each run, the rarest fault first; none if every text is empty."""
    if groups := by_fault(records, faults):
        yield sentence(f"{statement}: {values_in(groups, records)}")


def by_fault(records: Sequence[Record], faults: Sequence[str]) -> dict[str, list[Record]]:
    """Group runs by what is wrong with them; those with an empty text are in no group."""
    return {fault: runs for fault, runs in by_value(records, faults).items() if fault}


def values_in(groups: Mapping[str, Sequence[Record]], every: Sequence[Record]) -> str:
    """`cuda in rmsnorm/seed=2; cpu in gpt2, rmsnorm/seed=1`, the rarest value first; fewer names of many values."""
    rarest_first = sorted(groups.items(), key=lambda group: len(group[1]))
    most = max(1, 2 * MOST_NAMES // max(2, len(groups)))
    return enumerate_some([f"{value} in {named(runs, every, most)}" for value, runs in rarest_first], MOST_NAMES, "; ")


def named(runs: Sequence[Record], every: Sequence[Record] = (), most: int = MOST_NAMES) -> str:
    """The names of `runs`; those of an arm whose runs in `every` are all among them are named by the arm."""
    partial = {record.arm for record in every if record not in runs} if every else {record.arm for record in runs}
    names = [run_name(run) if run.arm in partial else run.arm for run in runs]
    return enumerate_some(list(dict.fromkeys(names)), most)


def run_name(run: Record) -> str:
    """The run's name after its folder: `rmsnorm/seed=2`, or `rmsnorm-lr=0.001/seed=2` for a tuning run."""
    folder, seed = run.path.parent.name, run.path.name
    arm = folder if folder.startswith(f"{run.arm}-lr=") else run.arm
    return f"{arm}/{seed if seed.startswith('seed=') else f'seed={run.seed}'}"


def first_and_more(found: Mapping[str, str]) -> str:
    """One setting with its values, and the names of the others."""
    first, *others = found
    more = f"; also in {enumerate_some(others, MOST_KEYS)}" if others else ""
    return f"{first}: {found[first]}{more}"


def sentence(statement: str, consequence: str = "") -> str:
    """A statement and its consequence, if any, as a sentence."""
    return f"{statement}; {consequence}." if consequence else f"{statement}."


def listing(statement: str, cases: Sequence[str], consequence: str = "") -> Iterator[str]:
    """One sentence with all cases of a kind, such as arms with their values; none without a case."""
    if cases:
        yield sentence(f"{statement}: {enumerate_some(list(dict.fromkeys(cases)), MOST_NAMES)}", consequence)


def divergence(arm: str, records: Sequence[Record]) -> str:
    """`postnorm diverged in 2 of 5 seeds`; empty if no run of the arm did."""
    diverged = sum(record.status == "diverged" for record in records)
    return f"{arm} diverged in {diverged} of {count(len(records), 'seed')}" if diverged else ""
