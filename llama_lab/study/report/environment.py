"""The hardware, software and data of runs, in their last session and in earlier ones."""

from collections.abc import Iterator, Sequence
from itertools import groupby

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


def environment(session: Environment) -> dict[str, str]:
    """Hardware, software and data of a session, by the names of reports; hashes and commits are cut to 12 digits."""
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
    sessions = {record.path: [*record.environment.earlier_sessions, record.environment] for record in records}
    histories = [[environment(session) for session in sessions[record.path]] for record in records]
    facts = [fact for fact in (histories[0][0] if histories else ()) if fact != UNCOMMITTED]
    for fact in facts:
        if values := disagreement(records, [history[-1][fact] for history in histories]):
            yield sentence(f"Runs differ in {fact}: {values}", CONSEQUENCES.get(fact, ""))
    for fact in facts:  # that changed when a run was stopped and resumed
        paths = [" then ".join(value for value, _ in groupby(one[fact] for one in history)) for history in histories]
        if found := {path: runs for path, runs in by_value(records, paths).items() if " then " in path}:
            where = f"Sessions of one run differ in {fact}: {values_in(found, records)}"
            yield sentence(where, CONSEQUENCES.get(fact, ""))
    if values := disagreement(records, [str(record.config.get("train.recompute", "none")) for record in records]):
        yield f"Runs differ in train.recompute: {values}; their speeds and memory cannot be compared."
    if dirty := [r for r in records if any(one.git and one.git.dirty for one in sessions[r.path])]:
        yield f"The code had uncommitted changes: {named(dirty, records)}. The commit does not identify the code."
    if resumed := [record for record in records if _is_resumed(record, sessions[record.path])]:
        yield (
            f"Trained further with resume=: {named(resumed, records)}. Their budget and schedule are not those that "
            f"they started with."
        )


def _is_resumed(record: Record, sessions: Sequence[Environment]) -> bool:
    """Whether any session was started with resume=, beyond the run's first budget."""
    commands = [argument for session in sessions for argument in session.command[1:]]
    return bool(record.config.get("resume")) or any(
        override_key(argument) == "resume" and argument.partition("=")[2] not in ("", "null") for argument in commands
    )
