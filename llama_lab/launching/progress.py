"""The progress of a queue, read from the files of its runs: a live table in a terminal, or lines in a file."""

import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llama_lab.runs.stored import COLUMNS, Status
from llama_lab.training.run import Run
from llama_lab.util.formatting import duration

UNFINISHED = ("running", "waiting", "to follow")  # runs of a queue, and those that a study starts after it
TAIL = 4096  # bytes of metrics.csv, some twenty rows without telemetry


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run. loss: the last training loss, if any. seconds_left: of training; None if unknown."""

    step: int
    loss: float | None
    seconds_left: float | None


Row = tuple[str, Run, RunProgress]  # the place of a run that is training, the run, and its progress


def read_progress(run: Run, since: float) -> RunProgress:
    """Progress at the last row of metrics.csv; step 0 unless the run has started since then (a time.time())."""
    status = run.folder.path / Status.FILE
    if not status.exists() or status.stat().st_mtime < since or not run.folder.metrics.exists():
        return RunProgress(0, None, None)
    latest = latest_metrics(run.folder.metrics)
    step = int(latest.get("step", 0))
    left = latest["seconds"] / step * (run.steps - step) if step else None
    return RunProgress(step, latest.get("train/loss"), left)


def latest_metrics(file: Path, tail: int = TAIL) -> dict[str, float]:
    """The last value of each metric in the last `tail` bytes of a metrics.csv, or in more if no whole row is there."""
    with file.open("rb") as stream:
        stream.seek(start := max(0, file.stat().st_size - tail))
        lines = stream.read().decode().split("\n")[1:-1]  # the header or a cut line, and what follows the last newline
    if start and not lines:
        return latest_metrics(file, 2 * tail)
    latest: dict[str, float] = {}
    for row in csv.DictReader(lines, COLUMNS):
        latest |= {name: float(value) for name, value in row.items() if name and value}  # without a mixture's parts
    return latest


def queue_seconds_left(
    finished: Sequence[float], running: Sequence[tuple[float, float | None]], waiting: float, slots: int
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


class QueueDisplay(Live):
    """Prints events as lines, and between them the queue as a table (in a terminal) or a line (elsewhere).

    Use as a context manager.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, auto_refresh=False, transient=True)
        self._every = 1.0 if console.is_terminal else 30.0
        self._last = time.monotonic()

    def print_line(self, line: str) -> None:
        """Print an event."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def due(self) -> bool:
        """Whether it is time to call `show`."""
        return time.monotonic() - self._last >= self._every

    def show(self, rows: Sequence[Row], counts: Mapping[str, float], seconds_left: float | None) -> None:
        """Show the queue as it is now. counts: runs by status, such as `{"done": 3}`. seconds_left: None if unknown."""
        self._last = time.monotonic()
        line = ", ".join(f"{count:.0f} {status}" for status, count in counts.items() if round(count))
        if seconds_left is not None:
            line += f"; about {duration(seconds_left)} left"
        if self.console.is_terminal:
            ended = sum(count for status, count in counts.items() if status not in UNFINISHED)
            ended += sum(progress.step / run.steps for _, run, progress in rows)
            total = sum(counts.values())
            self.update(Group(table(rows, ended / total if total else 0.0, seconds_left), Text(line)), refresh=True)
        else:
            running = ", ".join(f"{run.title} {progress.step / run.steps:.0%}" for _, run, progress in rows)
            self.print_line("; ".join(filter(None, [line, running])))


def table(rows: Sequence[Row], ended: float, seconds_left: float | None) -> Table:
    """A table with a row per run, and one for all of them: which part of their work is done."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("slot", "run", "", "", "loss", "left"):
        shown.add_column(heading, no_wrap=True, overflow="ellipsis")
    for place, run, progress in rows:
        shown.add_row(
            place,
            Text(run.title),
            ProgressBar(total=run.steps, completed=progress.step, width=16),
            f"{progress.step / run.steps:.0%}",
            "" if progress.loss is None else f"{progress.loss:.3f}",
            "" if progress.seconds_left is None else duration(progress.seconds_left),
        )
    left = "" if seconds_left is None else duration(seconds_left)
    shown.add_row("all", "", ProgressBar(total=1.0, completed=ended, width=16), f"{ended:.0%}", "", left)
    return shown
