"""Measurements, as rows of a table and of a CSV file."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Measurement

from llama_lab.files import replacing
from llama_lab.formatting import in_bytes
from llama_lab.timing import Contenders, measurement, time_in_turn

TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
PASSES = {"both": "forward and backward"}  # others are called as they are

# Columns of the CSV file that a table shows, with their heading and format; of the others, only times are shown.
SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "ratio": ("speed", "{:.2f}x".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "peak_bytes": ("peak", in_bytes),
    "kv_cache_bytes": ("KV cache", in_bytes),
    "kv_computations": ("KV computed", "{:,}".format),
    "of_memory_floor": ("of memory", "{:.1%}".format),
    "of_cache_floor": ("of cache", "{:.1%}".format),
}


@dataclass(frozen=True)
class Row:
    """One contender at one size.

    what: the contender. size: of its input, as text. direction: the pass, such as "forward" or "backward".
    timing: of one call. values: what else is known, by column of the CSV file. `ratio` is the median speed relative to
    the first contender; below 1 is slower.
    """

    component: str
    what: str
    size: str
    direction: str
    timing: Measurement
    values: Mapping[str, float] = field(default_factory=dict)

    def adding(self, **values: float) -> "Row":
        """The row with more values."""
        return replace(self, values={**self.values, **values})

    def cells(self) -> dict[str, Any]:
        """What the CSV file holds of it, by column."""
        return {
            "component": self.component,
            "what": self.what,
            "size": self.size,
            "pass": self.direction,
            "median_s": self.timing.median,
            "low_s": min(self.timing.times),
            "high_s": max(self.timing.times),
            "ratio": None,
            **self.values,
        }


def measure(
    component: str, size: str, direction: str, contenders: Contenders, rounds: int, parts: int = 1
) -> list[Row]:
    """`rows_of` contenders that are timed in turn."""
    return rows_of(component, size, direction, time_in_turn(contenders, rounds), parts)


def rows_of(component: str, size: str, direction: str, timings: Mapping[str, Measurement], parts: int = 1) -> list[Row]:
    """Timings of calls as rows for each of their equal `parts`; the others are compared with the first."""
    first = next(iter(timings.values())).median
    return [
        Row(component, what, size, direction, measurement(timing.times, parts), {"ratio": first / timing.median})
        for what, timing in timings.items()
    ]


def speeds(rows: Sequence[Row], *contenders: str) -> str:
    """The ranges of the contenders' ratios in every pass: `1.57 to 1.62 times forward, 0.95 times backward`."""
    passes = dict.fromkeys(row.direction for row in rows)
    return ", ".join(f"{ratios(rows, name, *contenders)} times {PASSES.get(name, name)}" for name in passes)


def ratios(rows: Sequence[Row], direction: str, *contenders: str) -> str:
    """The range of the contenders' ratios over all sizes: `0.93 to 1.20`, or one number if both ends agree."""
    found = [row.values["ratio"] for row in rows if row.what in contenders and row.direction == direction]
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(found), max(found))))


def conditions(device: torch.device) -> dict[str, Any]:
    """Columns of every row with what else times depend on: device, PyTorch's version and threads, and the date."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }


def write_csv(rows: Sequence[Row], columns: Sequence[str], where: Mapping[str, Any], path: Path) -> None:
    """Write rows atomically, with further `columns` for their values, and the conditions `where` they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh, fresh.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*replace(rows[0], values={}).cells(), *columns, *where])
        writer.writeheader()
        writer.writerows({**row.cells(), **where} for row in rows)


def open_console(where: Mapping[str, Any], *details: str) -> Console:
    """A console without highlighting, on which the conditions have been printed."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(", ".join((where["device"], f"{where['threads']} threads", f"PyTorch {where['torch']}", *details)))
    return console


def row_table(title: str, left: Mapping[str, str], rows: Sequence[Row]) -> Table:
    """A table in 80 columns, without a frame. left: the fields of its first columns, by heading."""
    shown = [name for name in SHOWN if any(name in row.values for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in ("median", "low to high", *(SHOWN[name][0] for name in shown)):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        if number and row.size != rows[number - 1].size:
            table.add_section()
        values = (SHOWN[name][1](row.values[name]) if name in row.values else "" for name in shown)
        table.add_row(*(getattr(row, name) for name in left.values()), *timing_text(row.timing), *values)
    return table


def timing_text(timing: Measurement) -> tuple[str, str]:
    """The median with its unit, and the range in the same unit, empty for one round: `("1.25 ms", "1.21 to 1.40")`."""
    scale, unit = next((u for u in TIME_UNITS if timing.median >= u[0]), TIME_UNITS[-1])
    times = (timing.median, min(timing.times), max(timing.times))
    median, low, high = (f"{float(f'{seconds / scale:.3g}'):,g}" for seconds in times)  # 1,000 for 1e+03
    return f"{median} {unit}", f"{low} to {high}" if len(timing.times) > 1 else ""
