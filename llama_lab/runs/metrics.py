"""Reading metrics.csv, the source of every report."""

import csv
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

METRICS_CSV = "metrics.csv"

Cells = dict[str, str]
"""The text of each cell of a row that is not empty, by its column."""


class Rows(TypedDict):
    """How many rows a file has, and their checksum; a checkpoint has those before it."""

    count: int
    checksum: str


NO_ROWS = Rows(count=0, checksum=f"{0:08x}")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, each with the metrics logged at its step; a line cut short by a kill is left out."""
    return with_numbers(read_cells(path))


def read_cells(path: Path) -> list[Cells]:
    """The same as text; empty if there is no file. Raises ValueError for an invalid file."""
    return cells_of(path.read_text() if path.exists() else "")


def cells_of(text: str) -> list[Cells]:
    """The rows of such a file's text. Raises ValueError for an invalid one."""
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), restkey="", restval="")
    try:
        return [{name: str(cell) for name, cell in row.items() if cell} for row in reader]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def with_numbers(rows: Iterable[Cells]) -> list[dict[str, float]]:
    """Rows with numeric cells. Raises ValueError for a cell that is no number."""
    return [{name: float(cell) for name, cell in row.items()} for row in rows]


def described(rows: Sequence[Cells], before: Rows = NO_ROWS) -> Rows:
    """What a file has with these rows after those `before`, in whatever order its columns are."""
    found = int(before["checksum"], 16)
    for row in rows:
        found = zlib.crc32(repr(sorted(row.items())).encode(), found)
    return Rows(count=before["count"] + len(rows), checksum=f"{found:08x}")
