"""What a person sees of a queue: a table that lives in a terminal, or lines in a file."""

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

from .progress import Progress


@dataclass(frozen=True)
class Row:
    """A run in its slot."""

    slot: str
    run: Run
    progress: Progress


@dataclass(frozen=True)
class View:
    """A queue at one moment. counts: runs by state, such as `{"done": 3}`. seconds_left: None if unknown."""

    rows: Sequence[Row]
    counts: dict[str, int]
    seconds_left: float | None

    def in_a_line(self) -> str:
        """The counts, and the time left."""
        counted = ", ".join(f"{count} {state}" for state, count in self.counts.items() if count)
        return counted + ("" if self.seconds_left is None else f"; about {duration(self.seconds_left)} left")


class Board:
    """Shows events as lines, and the state between them as a table (in a terminal) or a line (elsewhere).

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

    def tell(self, line: str) -> None:
        """Something happened."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @property
    def due(self) -> bool:
        """Whether it is time to `show`."""
        return time.monotonic() - self._last >= self._every

    def show(self, view: View) -> None:
        """The queue is here now."""
        self._last = time.monotonic()
        if self._live:
            self._live.update(Group(table(view.rows), Text(view.in_a_line())), refresh=True)
        else:
            running = [f"{row.run.title} {percent(row)}" for row in view.rows]
            self.tell("; ".join([view.in_a_line(), *([", ".join(running)] if running else [])]))


def table(rows: Sequence[Row]) -> Table:
    """A line per slot that is at work."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("slot", "run", "", "", "loss", "left"):
        shown.add_column(heading, no_wrap=True, overflow="ellipsis")
    for row in rows:
        loss, left = row.progress.loss, row.progress.seconds_left
        shown.add_row(
            row.slot,
            Text(row.run.title),
            ProgressBar(total=row.run.steps, completed=row.progress.step, width=16),
            percent(row),
            "" if loss is None else f"{loss:.3f}",
            "" if left is None else duration(left),
        )
    return shown


def percent(row: Row) -> str:
    """How much of a run's steps are done."""
    return f"{row.progress.step / row.run.steps:.0%}"
