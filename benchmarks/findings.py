"""What a benchmark found, beside its goals: one JSON file and one Markdown table, replaced after every finding."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from llama_lab.errors import first_line
from llama_lab.files import replacing

Outcome = Literal["met", "not met", "measured", "skipped", "failed"]
HEADINGS = ("part", "finding", "measured", "goal", "outcome")


@dataclass(frozen=True)
class Finding:
    """A value, and whether it meets its goal.

    value: in `unit`; a bool for what holds or does not; None for what was skipped or failed, whose reason is the note.
    goal: the lowest value that meets it, or the highest if `at_most`; None for none.
    """

    name: str
    value: float | bool | None
    unit: str = ""
    goal: float | bool | None = None
    at_most: bool = False
    note: str = ""
    failed: bool = False

    @property
    def outcome(self) -> Outcome:
        """`met` or `not met`; `measured` without a goal; `skipped` or `failed` without a value."""
        if self.value is None:
            return "failed" if self.failed else "skipped"
        if self.goal is None:
            return "measured"
        return "met" if (self.value <= self.goal if self.at_most else self.value >= self.goal) else "not met"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, goal and outcome as text."""
        bound = "" if self.goal is None or self.goal is True else "at most " if self.at_most else "at least "
        goal = "" if self.goal is None else f"{bound}{quantity(self.goal, self.unit)}"
        outcome = f"{self.outcome} ({self.note})" if self.note else self.outcome
        return self.name, "" if self.value is None else quantity(self.value, self.unit), goal, outcome

    def __str__(self) -> str:
        name, value, goal, outcome = self.cells
        return ", ".join(filter(None, (f"{name}: {value}" if value else name, f"goal {goal}" if goal else "", outcome)))


def skipped(name: str, reason: str) -> Finding:
    """A finding that cannot be made here."""
    return Finding(name, None, note=reason)


def failure(error: Exception) -> Finding:
    """What ended a part, in one line."""
    return Finding("the rest of this part", None, note=first_line(error), failed=True)


def quantity(value: float | bool, unit: str) -> str:
    """A value with its unit: `yes`, `51.2%`, `12,345 tokens/s`, `1.03`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number}{unit}" if unit in ("", "%") else f"{number} {unit}"


class Findings:
    """The findings of a command, in the files `stem`.json and `stem`.md of a folder. where: what they depend on."""

    def __init__(self, folder: Path, stem: str, where: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.json, self.table = folder / f"{stem}.json", folder / f"{stem}.md"
        self.where = where
        self.found: list[tuple[str, Finding]] = []
        self.seconds: dict[str, float] = {}

    def add(self, part: str, finding: Finding) -> None:
        """Keep a finding, and write both files."""
        self.found.append((part, finding))
        self.save()

    def took(self, part: str, seconds: float) -> None:
        """Keep the time that a part took, and write both files."""
        self.seconds[part] = round(seconds, 1)
        self.save()

    def save(self) -> None:
        """Replace both files."""
        rows = [{"part": part, **asdict(one), "outcome": one.outcome} for part, one in self.found]
        content = {"where": dict(self.where), "findings": rows, "seconds": self.seconds}
        with replacing(self.json) as fresh:
            fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        with replacing(self.table) as fresh:
            fresh.write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The conditions and the table."""
        lines = [", ".join(f"{name} {value}" for name, value in self.where.items()), ""]
        lines += [row(HEADINGS), row(["---"] * len(HEADINGS))]
        lines += [row((part, *finding.cells)) for part, finding in self.found]
        return "\n".join(lines) + "\n"


def row(cells: tuple[str, ...] | list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
