"""Progress of a run: a bar in a terminal, lines in a file, and a table at the end."""

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

EVERY_SECONDS = 10.0  # there is a line of progress
# A sample may hold any character; control characters are shown as their Unicode pictures.
VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


class Display:
    """A run's progress: a line every few seconds, for files and pipes. Use as a context manager.

    shown: formats of the metrics that it shows in training.
    """

    def __init__(self, console: Console, steps: int, shown: Mapping[str, str] = MappingProxyType({})) -> None:
        self._console, self._steps, self._shown = console, steps, shown
        self._latest: dict[str, float] = {}
        self._phase, self._last = "", -float("inf")
        self._phase_start = 0, 0.0  # how much was done then, and when that was

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, done: int, total: int, phase: str) -> None:
        """Show how many of the bytes of a phase are done in which data is prepared."""
        if self._due(phase, done):
            self.print_line(f"{phase}: {done / 1e6:.1f} of {total / 1e6:.1f} MB{self._left(done, total, ', ')}")

    def print_line(self, line: str) -> None:
        """Print a line, above a bar if there is one."""
        self._last = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show that training is at `step`, with its latest metrics: if due, at every evaluation, and at the end.

        Losses of the validation set are shown where they were measured.
        """
        self._latest = {k: v for k, v in self._latest.items() if not k.startswith("val/")} | metrics
        is_due = self._due("training", step) and self._latest
        if is_due or step == self._steps or "val/loss" in metrics:
            self.print_line(f"step {step}/{self._steps}  {self._note()}{self._left(step, self._steps, '  ')}")

    def _note(self) -> str:
        """The latest metrics in one short line."""
        return "  ".join(text.format(self._latest[name]) for name, text in self._shown.items() if name in self._latest)

    def _due(self, phase: str, done: int) -> bool:
        """Whether a new phase starts, with so much done, or enough time has passed since the last line."""
        if phase != self._phase:
            self._phase, self._phase_start = phase, (done, time.monotonic())
            return True
        return time.monotonic() - self._last >= EVERY_SECONDS

    def _left(self, done: int, total: int, separator: str) -> str:
        """The time left of the phase, evaluations included, after a separator; empty before it is known."""
        first, start = self._phase_start
        if not first < done < total:
            return ""
        return f"{separator}{duration((time.monotonic() - start) * (total - done) / (done - first))} left"


class TerminalDisplay(Display):
    """A progress bar per phase; in a file, it would leave control characters."""

    def __init__(self, console: Console, steps: int, shown: Mapping[str, str]) -> None:
        super().__init__(console, steps, shown)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def prepare(self, done: int, total: int, phase: str, note: str = "") -> None:
        """Show the bar of a phase."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=total, note=note)
        self._bar.update(self._tasks[phase], completed=done, note=note)

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Show the bar of the training."""
        self._latest |= metrics
        self.prepare(step, self._steps, "training", self._note())


def open_display(steps: int, rank: int, shown: Mapping[str, str] = MappingProxyType({})) -> Display:
    """The display for standard output: a bar in a terminal, else lines. On ranks other than 0 it prints nothing."""
    return (TerminalDisplay if sys.stdout.isatty() else Display)(Console(quiet=rank != 0), steps, shown)


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
