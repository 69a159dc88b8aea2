"""The hardware, software and data of runs, in their last session and in earlier ones."""

from collections.abc import Iterator, Sequence

from llama_lab.config.components import override_key
from llama_lab.runs.record import Record
from llama_lab.runs.stored import Environment
from llama_lab.study.naming import by_value, disagreement, named, sentence, values_in

# What follows if runs differ in a fact of `environment`.
CONSEQUENCES = {
    "device": "their speeds cannot be compared, and their losses differ by rounding",
    "devices": "their speeds cannot be compared, and their losses differ by rounding, with shards in bf16 more so",
    "precision": "a part of the difference in loss may be rounding",
    "attention kernel": "their speeds are not those of their architectures",
    "data": "their losses are of different texts",
    "tokenizer": "their nats per token mean different things",
    "CPU threads": "their speeds cannot be compared",
    "torch": "their kernels and rounding may differ",
    "llama-lab": "their code may differ",
    "commit": "their code may differ",
}
UNCOMMITTED = "uncommitted changes"


def environment(record: Record) -> dict[str, str]:
    """A run's hardware, software and data, by the names that reports use; hashes and commits are cut to 12 digits."""
    return _environment(record.environment)


def _environment(session: Environment) -> dict[str, str]:
    git, versions = session.git, session.versions
    values = {
        "device": session.device,
        "devices": f"{session.devices}{' shards' if session.sharded else ''}",
        "precision": session.precision,
        "attention kernel": session.attention_kernel,
        "data": session.data_hash[:12],
        "tokenizer": session.tokenizer_hash[:12],
        "python": session.python,
        **{library: versions.get(library) for library in ("torch", "lightning", "numpy", "tokenizers", "llama-lab")},
        "platform": session.platform,
        "CPU threads": session.cpu_threads,
        "commit": git and git.commit[:12],
        UNCOMMITTED: git and ("yes" if git.dirty else "no"),
    }
    return {name: str(value or "unknown") for name, value in values.items()}


def unequal_environments(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for every fact that differs between runs, or between the sessions of one run."""
    yield from _between_runs(records)
    yield from _between_sessions(records)
    yield from _uncommitted(records)
    yield from _resumed(records)


def _between_runs(records: Sequence[Record]) -> Iterator[str]:
    all_values = [environment(record) for record in records]
    for fact in all_values[0] if all_values else ():
        if fact != UNCOMMITTED and (values := disagreement(records, [v[fact] for v in all_values])):
            yield sentence(f"Runs differ in {fact}: {values}", CONSEQUENCES.get(fact, ""))


def _sessions(record: Record) -> list[Environment]:
    """The environments of a run's sessions, the earliest first."""
    return [*record.environment.earlier_sessions, record.environment]


def _between_sessions(records: Sequence[Record]) -> Iterator[str]:
    """Facts that changed when a run was stopped and resumed."""
    histories = [[_environment(session) for session in _sessions(record)] for record in records]
    for fact in histories[0][0] if histories else ():
        paths = [" then ".join(_without_repeats([session[fact] for session in history])) for history in histories]
        found = {path: runs for path, runs in by_value(records, paths).items() if " then " in path}
        if found and fact != UNCOMMITTED:
            yield sentence(
                f"Sessions of one run differ in {fact}: {values_in(found, records)}", CONSEQUENCES.get(fact, "")
            )


def _without_repeats(values: Sequence[str]) -> list[str]:
    return [value for i, value in enumerate(values) if i == 0 or value != values[i - 1]]


def _uncommitted(records: Sequence[Record]) -> Iterator[str]:
    dirty = [r for r in records if any(session.git and session.git.dirty for session in _sessions(r))]
    if dirty:
        yield f"The code had uncommitted changes: {named(dirty, records)}. The commit does not identify the code."


def _resumed(records: Sequence[Record]) -> Iterator[str]:
    if runs := [record for record in records if _is_resumed(record)]:
        yield (
            f"Trained further with resume=: {named(runs, records)}. Their budget and schedule are not those that they "
            f"started with."
        )


def _is_resumed(record: Record) -> bool:
    """Whether any session was started with resume=, beyond the run's first budget."""
    commands = [argument for session in _sessions(record) for argument in session.command[1:]]
    return bool(record.config.get("resume")) or any(
        override_key(argument) == "resume" and argument.partition("=")[2] not in ("", "null") for argument in commands
    )
