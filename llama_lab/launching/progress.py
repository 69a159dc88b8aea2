"""How far runs in other processes are, from the files that they write."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_lab.runs.folder import STATUS
from llama_lab.runs.metrics import COLUMNS
from llama_lab.training.run import Run

TAIL = 4096  # bytes of metrics.csv, some twenty rows


@dataclass(frozen=True)
class Progress:
    """Where a run is. loss: the last of training, None before the first. seconds_left: of training, None if unknown."""

    step: int
    loss: float | None
    seconds_left: float | None


def read_progress(run: Run, since: float) -> Progress:
    """Where a run is, as of the last row of its metrics.csv, if it has begun `since` then (a time.time())."""
    status = run.folder.path / STATUS
    if not status.exists() or status.stat().st_mtime < since or not run.folder.metrics.exists():
        return Progress(0, None, None)
    latest = latest_metrics(run.folder.metrics)
    step = int(latest.get("step", 0))
    left = latest["seconds"] / step * (run.steps - step) if step else None
    return Progress(step, latest.get("train/loss"), left)


def latest_metrics(file: Path) -> dict[str, float]:
    """The last value of each metric in the end of a metrics.csv, however long that is."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL))
        lines = stream.read().decode().split("\n")[1:-1]  # the header or a cut line, and what follows the last newline
    latest: dict[str, float] = {}
    for row in csv.DictReader(lines, COLUMNS):
        latest |= {name: float(value) for name, value in row.items() if value}
    return latest


def queue_seconds_left(
    finished: Sequence[float], running: Sequence[tuple[float, float | None]], waiting: int, slots: int
) -> float | None:
    """Time that a queue still takes, if the runs to come take as long as the others on average; None if nobody knows.

    finished: seconds that each took. running: seconds since each began, and seconds left of it where they are known.
    """
    whole = [*finished, *(since + left for since, left in running if left is not None)]
    if not whole:
        return None
    mean = sum(whole) / len(whole)
    left = [max(0.0, mean - since) if known is None else known for since, known in running]
    return max([(sum(left) + waiting * mean) / slots, *left])
