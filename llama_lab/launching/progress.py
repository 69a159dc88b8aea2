"""The progress of runs in other processes, read from their files."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_lab.runs.metrics import COLUMNS
from llama_lab.runs.stored import Status
from llama_lab.training.run import Run

TAIL = 4096  # bytes of metrics.csv, some twenty rows


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run. loss: the last training loss, if any. seconds_left: of training; None if unknown."""

    step: int
    loss: float | None
    seconds_left: float | None


def read_progress(run: Run, since: float) -> RunProgress:
    """Progress at the last row of metrics.csv; step 0 unless the run has started since then (a time.time())."""
    status = run.folder.path / Status.FILE
    if not status.exists() or status.stat().st_mtime < since or not run.folder.metrics.exists():
        return RunProgress(0, None, None)
    latest = latest_metrics(run.folder.metrics)
    step = int(latest.get("step", 0))
    left = latest["seconds"] / step * (run.steps - step) if step else None
    return RunProgress(step, latest.get("train/loss"), left)


def latest_metrics(file: Path) -> dict[str, float]:
    """The last value of each metric in the last 4 KiB of a metrics.csv."""
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
    """Time left for a queue if waiting runs take the mean time of the others; None while no run has a known time.

    finished: seconds of each finished run. running: (seconds since its start, seconds left if known) of each.
    """
    whole = [*finished, *(since + left for since, left in running if left is not None)]
    if not whole:
        return None
    mean = sum(whole) / len(whole)
    left = [max(0.0, mean - since) if known is None else known for since, known in running]
    return max([(sum(left) + waiting * mean) / slots, *left])
