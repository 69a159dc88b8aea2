"""A run's progress for the user: a bar in a terminal, plain lines in a file, and a table at the end."""

import logging
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Self

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .formatting import duration

# A sample may hold any character; control characters are shown as their Unicode pictures.
VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def describe(metrics: dict[str, float], shown: Mapping[str, str]) -> str:
    """The metrics that are `shown`, each in a format of its own, in one short line."""
    return "  ".join(text.format(metrics[name]) for name, text in shown.items() if name in metrics)


class TerminalDisplay:
    """A progress bar per phase. Use as a context manager."""

    def __init__(self, console: Console, steps: int, shown: Mapping[str, str]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console)
        self._tasks: dict[str, TaskID] = {}
        self._steps, self._shown = steps, shown
        self._latest: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def prepare(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        """Show the progress of a phase in which data is prepared."""
        self._show(phase, done_bytes, total_bytes, "")

    def print_line(self, line: str) -> None:
        """Print a line above the bars."""
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show that training is at `step`, with its latest metrics."""
        self._latest |= metrics
        self._show("training", step, self._steps, describe(self._latest, self._shown))

    def _show(self, phase: str, done: int, total: int, note: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total, note=note)
        self._bar.update(self._tasks[phase], completed=done, note=note)


class LogDisplay:
    """A line every few seconds, for files and pipes, where a bar would leave control characters."""

    def __init__(self, console: Console, steps: int, shown: Mapping[str, str], every_seconds: float = 10.0) -> None:
        self._console = console
        self._steps, self._shown = steps, shown
        self._every = every_seconds
        self._phase_start = time.monotonic()
        self._last = -float("inf")
        self._phase = ""
        self._latest: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, done_bytes: int, total_bytes: int, phase: str) -> None:
        """Print the progress of a phase in which data is prepared, if a line is due."""
        if self._due(phase):
            time_left = self._time_left(done_bytes, total_bytes)
            self.print_line(f"{phase}: {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB{time_left}")

    def print_line(self, line: str) -> None:
        """Print a line."""
        self._last = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Print the step and the latest metrics if a line is due, at every evaluation, and at the end."""
        self._latest |= metrics
        if (self._latest and self._due("training")) or step == self._steps or "val/loss" in metrics:
            self.print_line(f"step {step}/{self._steps}  {describe(self._latest, self._shown)}")

    def _due(self, phase: str) -> bool:
        """Whether a new phase starts, or enough time has passed since the last line."""
        if phase == self._phase and time.monotonic() - self._last < self._every:
            return False
        if phase != self._phase:
            self._phase, self._phase_start = phase, time.monotonic()
        return True

    def _time_left(self, done: int, total: int) -> str:
        """The time left for the phase at its mean speed so far; empty at the start and at the end."""
        seconds = time.monotonic() - self._phase_start
        return f", {duration(seconds * (total - done) / done)} left" if done and done < total else ""


Display = TerminalDisplay | LogDisplay


def open_display(steps: int, rank: int, shown: Mapping[str, str] = MappingProxyType({})) -> Display:
    """The display for standard output: a bar in a terminal, else lines. On ranks other than 0 it prints nothing.

    shown: formats of the metrics that it shows in training.
    """
    console = Console(quiet=rank != 0)
    return (TerminalDisplay if sys.stdout.isatty() else LogDisplay)(console, steps, shown)


def plain_table(title: str, left: Iterable[str] = (), right: Iterable[str] = (), gap: int = 3) -> Table:
    """A table without a frame, of columns with these headings: text on the left, then numbers, which never wrap."""
    padding = (0, gap - 1, 0, 0)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=padding, pad_edge=False)
    table.caption_justify = "left"
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    table.show_header = bool(table.columns)
    return table


def fact_table(facts: Iterable[tuple[str, str]], frame: box.Box = box.HEAVY_HEAD) -> Table:
    """A table of labels and values."""
    table = Table(show_header=False, box=frame)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in facts:
        table.add_row(label, value)
    return table


def print_sample(console: Console, sample: str | None) -> None:
    """Print a run's sample of text, if there is one."""
    if sample:
        console.print(Panel(Text(sample.translate(VISIBLE)), title="sample", title_align="left"))


def quiet_libraries() -> None:
    """Silence Lightning's banners and tips; hardware and progress are printed by our own displays."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what it raises
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
