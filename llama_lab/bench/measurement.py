"""Measurements, as rows of a CSV file and of a table."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from llama_lab.files import replacing
from llama_lab.formatting import in_bytes
from llama_lab.timing import Timing, time_in_turn

TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Measurement:
    """One contender at one size.

    what: the contender. size: of its input, as text. direction: "forward", "backward", or "both".
    timing: of one call. speed_ratio: median speed relative to the first contender; below 1 is slower.
    peak_bytes: peak memory of a call above that before it. kv_cache_bytes: of all layers.
    kv_computations: tokens whose key and value were computed, per layer. tokens_per_second: over all sequences.
    """

    component: str
    what: str
    size: str
    direction: str
    timing: Timing
    speed_ratio: float
    peak_bytes: int | None = None
    kv_cache_bytes: int | None = None
    kv_computations: int | None = None
    tokens_per_second: float | None = None

    def row(self) -> dict[str, Any]:
        """The row of the CSV file; None for what was not measured."""
        return {
            "component": self.component,
            "what": self.what,
            "size": self.size,
            "pass": self.direction,
            "median_s": self.timing.median,
            "low_s": self.timing.low,
            "high_s": self.timing.high,
            "ratio": self.speed_ratio,
            "peak_bytes": self.peak_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "kv_computations": self.kv_computations,
            "tokens_per_s": self.tokens_per_second,
        }


def measure(
    component: str, size: str, direction: str, contenders: Mapping[str, Callable[[], object]], rounds: int
) -> list[Measurement]:
    """Time contenders in turn; the others are compared with the first."""
    return measurements_of(component, size, direction, time_in_turn(contenders, rounds))


def measurements_of(component: str, size: str, direction: str, timings: Mapping[str, Timing]) -> list[Measurement]:
    """Timings as measurements; the others are compared with the first."""
    first = next(iter(timings.values())).median
    return [
        Measurement(component, what, size, direction, timing, first / timing.median) for what, timing in timings.items()
    ]


def backward(output: Tensor, inputs: Sequence[Tensor]) -> Callable[[], object]:
    """A function that computes only the gradients of `inputs`, from a random gradient of `output`."""
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def conditions(device: torch.device) -> dict[str, Any]:
    """Columns of every row with what else times depend on: device, PyTorch's version and threads, and the date."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows with the same keys atomically; None becomes empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh, fresh.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def console() -> Console:
    """A console without highlighting."""
    return Console(highlight=False, markup=False, emoji=False)


def new_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without a frame, with left-aligned and then right-aligned columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def measurement_table(title: str, size_name: str, measurements: Sequence[Measurement]) -> Table:
    """A table of measurements in 80 columns; `size_name` is the heading of the sizes."""
    extra = {name: text for name, text in EXTRA.items() if any(text(m) for m in measurements)}
    table = new_table(title, (size_name, "what", "pass"), ("median", "low to high", "speed", *extra))
    for number, m in enumerate(measurements):
        if number and m.size != measurements[number - 1].size:
            table.add_section()
        cells = (*timing_text(m.timing), f"{m.speed_ratio:.2f}x", *(text(m) for text in extra.values()))
        table.add_row(m.size, m.what, m.direction, *cells)
    return table


# Further columns of the table, shown if any measurement has a value.
EXTRA: dict[str, Callable[[Measurement], str]] = {
    "tokens/s": lambda m: "" if m.tokens_per_second is None else f"{m.tokens_per_second:,.0f}",
    "peak": lambda m: "" if m.peak_bytes is None else in_bytes(m.peak_bytes),
    "KV cache": lambda m: "" if m.kv_cache_bytes is None else in_bytes(m.kv_cache_bytes),
    "KV computed": lambda m: "" if m.kv_computations is None else f"{m.kv_computations:,}",
}


def timing_text(timing: Timing) -> tuple[str, str]:
    """The median with its unit, and the range in the same unit: `("1.25 ms", "1.21 to 1.40")`."""
    scale, unit = next((u for u in TIME_UNITS if timing.median >= u[0]), TIME_UNITS[-1])
    median, low, high = (f"{seconds / scale:.3g}" for seconds in (timing.median, timing.low, timing.high))
    return f"{plain(median)} {unit}", f"{plain(low)} to {plain(high)}"


def plain(digits: str) -> str:
    """A number without an exponent: 1000 for 1e+03."""
    return f"{float(digits):,.0f}" if "e+" in digits else digits


def ratios(measurements: Sequence[Measurement], what: str, direction: str) -> str:
    """The range of a contender's speed ratios over all sizes: `0.93 to 1.20`, or one number if both ends agree."""
    found = [m.speed_ratio for m in measurements if (m.what, m.direction) == (what, direction)]
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(found), max(found))))
