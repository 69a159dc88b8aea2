"""The pages of the book: one of each claim, and the table of all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_lab.analysis.power import LEVEL
from llama_lab.analysis.result import Result
from llama_lab.util.files import replace_text
from llama_lab.util.formatting import count

from .claim import Claim, Figure, Statement
from .judging import DECIDED, WORDS, Verdict


@dataclass(frozen=True)
class Judged:
    """A claim's verdicts, by statement or figure, on one kind of device; figures are of none."""

    device: str
    verdicts: Sequence[tuple[Statement | Figure, Verdict]]
    result: Result | None = None
    hours: float = 0.0
    dates: str = ""
    stale: str = ""


def page(claim: Claim, judged: Sequence[Judged]) -> str:
    """The page of a claim, in Markdown."""
    lines = [f"# {claim.title}", ""]
    if claim.study:
        lines += ["```bash", f"python -m llama_lab.claims {claim.name}", "```", ""]
    for one in judged:
        lines += [f"## On a {one.device.upper()}", ""] if one.device else []
        lines += [f"**Stale**: {one.stale}.", ""] if one.stale else []
        lines += ["| statement | source | verdict | found |", "|---|---|---|---|"]
        lines += [f"| {said.text} | {said.source} | **{found.word}** | {found.why} |" for said, found in one.verdicts]
        lines += ["", *study_lines(one)] if one.result else [""]
    if claim.study and not judged:
        lines += ["Not run yet.", ""]
    return "\n".join(lines).rstrip() + "\n"


def study_lines(judged: Judged) -> list[str]:
    """What was measured, and on what."""
    result = judged.result
    assert result is not None
    lines = ["| arm | loss, nats per token | seeds |", "|---|---|---|"]
    lines += [
        f"| {arm.name} | {arm.loss.text if arm.loss else 'no finished run'} | {len(arm.records)} |"
        for arm in result.arms
    ]
    machine = ", ".join(dict.fromkeys(r.environment.cpu for r in result.started))
    lines += [
        "",
        f"{machine}, {judged.dates}, {judged.hours:.1f} hours of training; intervals are those of {result.tests}.",
        "",
    ]
    return [*lines, *(f"- {warning}" for warning in (*result.warnings, *result.notes)), ""]


def table(book: Mapping[str, tuple[Claim, Sequence[Judged]]]) -> str:
    """The table of all claims, in Markdown; those that contradict their source come first."""
    rows = [
        (found.word, claim, said, found, one.device)
        for claim, judged in book.values()
        for one in judged
        for said, found in one.verdicts
    ]
    rows.sort(key=lambda row: WORDS.index(row[0]))
    words = Counter(row[0] for row in rows)
    tested = sum(row[0] in DECIDED and isinstance(row[2], Statement) for row in rows)
    lines = [
        "# Claims",
        "",
        f"{count(len(rows), 'verdict')}: {', '.join(f'{n} {word}' for word, n in words.items())}. Of the "
        f"{tested} that rest on tests, {LEVEL * tested:.1f} are expected to be wrong at 5%. "
        f"`python -m llama_lab.claims` makes this page.",
        "",
        "| verdict | statement | source | found |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {word}{f', {device}' if device else ''} | [{said.text}]({claim.name}.md) | {said.source} | {found.why} |"
        for word, claim, said, found, device in rows
    ]
    waiting = [claim for claim, judged in book.values() if claim.study and not judged]
    lines += [f"| not run | [{claim.title}]({claim.name}.md) | | |" for claim in waiting]
    return "\n".join(lines) + "\n"


def write_pages(book: Mapping[str, tuple[Claim, Sequence[Judged]]], folder: Path) -> None:
    """Write a page for each claim, and the table."""
    folder.mkdir(parents=True, exist_ok=True)
    for claim, judged in book.values():
        replace_text(folder / f"{claim.name}.md", page(claim, judged))
    replace_text(folder / "README.md", table(book))
