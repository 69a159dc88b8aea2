"""The hardware, software and data of runs, in their last session and in earlier ones."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

from llama_lab.config.grammar import override_key
from llama_lab.runs.record import Record
from llama_lab.runs.stored import HASHES, UNLIKE_SPEEDS, Environment, Git

from .result import Result
from .sentences import by_value, disagreement, named, sentence, values_in

COMPARED = {fact.name: fact.metadata for fact in fields(Environment) if "compared" in fact.metadata}
TITLES = {name: declared["name"] or name.replace("_", " ") for name, declared in COMPARED.items()}
CONSEQUENCES = {TITLES[name]: declared["compared"] for name, declared in COMPARED.items()}
CONSEQUENCES |= CONSEQUENCES.pop("versions")  # of each library
HASH = re.compile("[0-9a-f]{13,}")
CONCERNS = dict.fromkeys((TITLES[name] for name in HASHES), "texts")
CONCERNS |= {fact: "speeds" for fact, consequence in CONSEQUENCES.items() if consequence == UNLIKE_SPEEDS}
BY_ROLE = (TITLES["data_hash"],)  # in which judged runs agree, and tuning runs, which are validated on other text


def environment(session: Environment) -> dict[str, str]:
    """Hardware, software and data of a session, by the names of reports; hashes and commits are cut to 12 digits."""
    dirty = {"uncommitted changes": _text(session.git and session.git.dirty)}
    return {name: _shortened([value])[0] for name, value in (_facts(session) | dirty).items()}


def _facts(session: Environment) -> dict[str, str]:
    """The facts in which all runs should agree, and the versions of libraries one by one."""
    values = {TITLES[name]: getattr(session, name) for name, fact in COMPARED.items() if not fact["within"]}
    versions = values.pop("versions")
    values["devices"] = f"{session.devices}{' shards' if session.sharded else ''}"
    return {name: _text(value) for name, value in (values | versions).items()}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in sorted(value.items())) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str((value.commit if isinstance(value, Git) else value) or "unknown")


def _shortened(texts: Sequence[str]) -> list[str]:
    """The texts with 12 digits of hashes, if these tell all apart."""
    short = [text[:12] if HASH.fullmatch(text) else text for text in texts]
    return short if len({*short}) == len({*texts}) else [*texts]


def unequal_environments(result: Result) -> Iterator[str]:
    """Facts that differ, without those of the two rules below, dirty code, and runs that went on."""
    records = result.started
    yield from _unequal(result, "rounding")
    yield from _unlike_what_they_follow_from(records)
    if dirty := [record for record in records if any(one.git and one.git.dirty for one in sessions(record))]:
        yield f"The code had uncommitted changes: {named(dirty, records)}. The commit does not identify the code."
    if resumed := [record for record in records if is_resumed(record)]:
        yield (
            f"Trained further with resume=: {named(resumed, records)}. Their budget and schedule are not those that "
            f"they started with."
        )


def unequal_texts(result: Result) -> Iterator[str]:
    """Data and tokenizers that differ, with which losses mean something else."""
    yield from _unequal(result, "texts")


def unequal_machines(result: Result) -> Iterator[str]:
    """Facts that differ and concern speeds alone."""
    records = result.started
    yield from _unequal(result, "speeds")
    if values := disagreement(records, [str(record.config.get("train.recompute", "none")) for record in records]):
        yield f"Runs differ in train.recompute: {values}; their speeds and memory cannot be compared."


def _unequal(result: Result, concern: str) -> Iterator[str]:
    """A sentence for every fact of this concern that differs between runs, or between the sessions of one run."""
    records = result.started
    histories = {record.path: [_facts(session) for session in sessions(record)] for record in records}
    facts = dict.fromkeys(fact for history in histories.values() for session in history for fact in session)
    for fact in (fact for fact in facts if CONCERNS.get(fact, "rounding") == concern):
        for runs in result.by_role if fact in BY_ROLE else [records]:
            known = [histories[record.path][-1].get(fact, "unknown") for record in runs]
            if values := disagreement(runs, _shortened(known)):
                yield sentence(f"Runs differ in {fact}: {values}", CONSEQUENCES.get(fact, ""))
        # What changed when a run was stopped and resumed.
        of_runs = [[value for value, _ in groupby(one.get(fact, "unknown") for one in of)] for of in histories.values()]
        paths = [" then ".join(_shortened(values)) for values in of_runs]
        if found := {path: runs for path, runs in by_value(records, paths).items() if " then " in path}:
            where = f"Sessions of one run differ in {fact}: {values_in(found, records)}"
            yield sentence(where, CONSEQUENCES.get(fact, ""))


def _unlike_what_they_follow_from(records: Sequence[Record]) -> Iterator[str]:
    """Facts that differ between runs that agree in everything that determines them."""
    for name, declared in COMPARED.items():
        causes = [
            str([getattr(record.environment, cause, record.config.get(cause)) for cause in declared["within"]])
            for record in records
        ]
        groups = by_value(records, causes).values() if declared["within"] else ()
        found = [disagreement(runs, [_text(getattr(run.environment, name)) for run in runs]) for runs in groups]
        if values := "; ".join(filter(None, found)):
            yield sentence(f"Runs differ in {TITLES[name]}: {values}", CONSEQUENCES[TITLES[name]])


def sessions(record: Record) -> list[Environment]:
    """What a run's sessions ran on, the last one last."""
    return [*record.environment.earlier_sessions, record.environment]


def is_resumed(record: Record) -> bool:
    """Whether any session was started with resume=, beyond the run's first budget."""
    commands = [argument for session in sessions(record) for argument in session.command[1:]]
    return bool(record.config.get("resume")) or any(
        override_key(argument) == "resume" and argument.partition("=")[2] not in ("", "null") for argument in commands
    )
