"""Shows the progress of a queue: a live table in a terminal, or lines in a file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llama_lab.formatting import duration
from llama_lab.training.run import Run

from .progress import RunProgress


@dataclass(frozen=True)
class Row:
    """A run that is training, and where."""

    place: str
    run: Run
    progress: RunProgress

    @property
    def percent(self) -> str:
        """The share of the run's steps that are done."""
        return f"{self.progress.step / self.run.steps:.0%}"


@dataclass(frozen=True)
class Snapshot:
    """A queue at one moment. counts: runs by status, such as `{"done": 3}`. seconds_left: None if unknown."""

    rows: Sequence[Row]
    counts: dict[str, int]
    seconds_left: float | None

    def as_line(self) -> str:
        """The counts and the time left."""
        counted = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        return counted + ("" if self.seconds_left is None else f"; about {duration(self.seconds_left)} left")


class QueueDisplay:
    """Prints events as lines, and between them the queue as a table (in a terminal) or a line (elsewhere).

    Use as a context manager.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every = 1.0 if self._live else 30.0
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def print_line(self, line: str) -> None:
        """Print an event."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def due(self) -> bool:
        """Whether it is time to call `show`."""
        return time.monotonic() - self._last >= self._every

    def show(self, snapshot: Snapshot) -> None:
        """Show the queue as it is now."""
        self._last = time.monotonic()
        if self._live:
            self._live.update(Group(table(snapshot.rows), Text(snapshot.as_line())), refresh=True)
        else:
            running = ", ".join(f"{row.run.title} {row.percent}" for row in snapshot.rows)
            self.print_line("; ".join(filter(None, [snapshot.as_line(), running])))


def table(rows: Sequence[Row]) -> Table:
    """A table with a row per run."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("slot", "run", "", "", "loss", "left"):
        shown.add_column(heading, no_wrap=True, overflow="ellipsis")
    for row in rows:
        loss, left = row.progress.loss, row.progress.seconds_left
        shown.add_row(
            row.place,
            Text(row.run.title),
            ProgressBar(total=row.run.steps, completed=row.progress.step, width=16),
            row.percent,
            "" if loss is None else f"{loss:.3f}",
            "" if left is None else duration(left),
        )
    return shown
