"""Measurements as tables, with a row for each contender at a size: printed, and written as CSV.

Columns: what: the contender. size: of its input, as text. pass: such as "forward" or "backward". median_s, low_s,
high_s: seconds of a call over the rounds. ratio: the median speed relative to the first contender; below 1 is slower.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Measurement

from llama_lab.devices.hardware import choose_accelerator
from llama_lab.display import plain_table
from llama_lab.files import replacing
from llama_lab.formatting import in_bytes
from llama_lab.timing import Contenders, time_in_turn

COLUMNS = ("component", "what", "size", "pass", "median_s", "low_s", "high_s", "ratio")
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


def measure(size: str, direction: str, contenders: Contenders, rounds: int, parts: int = 1) -> pd.DataFrame:
    """Time contenders in turn, and compare them with the first; see `rows_of`."""
    return with_ratio(rows_of(size, direction, time_in_turn(contenders, rounds), parts))


def rows_of(size: str, direction: str, timings: Mapping[str, Measurement], parts: int = 1) -> pd.DataFrame:
    """A row for each timing of calls, by contender; its seconds are those of one of a call's equal `parts`."""
    rows = [
        (what, size, direction, *(s / parts for s in (timing.median, min(timing.times), max(timing.times))))
        for what, timing in timings.items()
    ]
    return pd.DataFrame(rows, columns=["what", "size", "pass", "median_s", "low_s", "high_s"])


def with_ratio(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with their `ratio`."""
    return rows.assign(ratio=rows.median_s.iloc[0] / rows.median_s)


def speeds(rows: pd.DataFrame, *contenders: str) -> str:
    """The ranges of the contenders' ratios in every pass: `1.57 to 1.62 times forward, 0.95 times backward`."""
    passes = rows["pass"].unique()
    return ", ".join(f"{ratios(rows, name, *contenders)} times {PASSES.get(name, name)}" for name in passes)


def ratios(rows: pd.DataFrame, direction: str, *contenders: str) -> str:
    """The range of the contenders' ratios over all sizes: `0.93 to 1.20`, or one number if both ends agree."""
    found = rows.ratio[rows.what.isin(contenders) & (rows["pass"] == direction)]
    return " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (found.min(), found.max())))


def start(wanted: str, *details: str) -> tuple[torch.device, dict[str, Any], Console]:
    """The device named `wanted`, what else times depend on, as columns of every row, and a console that shows it.

    `auto` is the GPU if there is one. Raises ConfigError for a missing device.
    """
    if wanted == "auto":
        wanted = "gpu" if torch.cuda.is_available() else "cpu"
    device = torch.device({"gpu": "cuda"}.get(choose_accelerator(wanted, "--device"), wanted))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    version, threads = torch.__version__, torch.get_num_threads()
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(", ".join((name, f"{threads} threads", f"PyTorch {version}", *details)))
    where = {"device": name, "torch": version, "threads": threads, "date": date.today().isoformat()}
    return device, where, console


def write_csv(rows: Sequence[pd.DataFrame], columns: Sequence[str], where: Mapping[str, Any], path: Path) -> None:
    """Write tables as one, atomically, with further `columns` and the conditions `where` they were measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = pd.concat([part.astype(object) for part in rows])  # otherwise counts beside empty cells become floats
    with replacing(path) as fresh:
        whole.reindex(columns=[*COLUMNS, *columns]).assign(**where).to_csv(fresh, index=False, lineterminator="\r\n")


def row_table(title: str, left: Mapping[str, str], rows: pd.DataFrame) -> Table:
    """Rows for a terminal of 80 columns. left: the first columns, by heading."""
    shown = [name for name in SHOWN if name in rows]
    table = plain_table(title, left, ["median", "low to high", *(SHOWN[name][0] for name in shown)], gap=2)
    size = ""
    for row in rows.to_dict("records"):
        if row["size"] != size:
            table.add_section()
        size = row["size"]
        values = ("" if pd.isna(row[name]) else SHOWN[name][1](row[name]) for name in shown)
        times = timing_text(row["median_s"], row["low_s"], row["high_s"])
        table.add_row(*(row[name] for name in left.values()), *times, *values)
    return table


def timing_text(*seconds: float) -> tuple[str, str]:
    """Median, low and high as a median with its unit, and a range in the same unit: `("1.25 ms", "1.21 to 1.40")`.

    The range is empty if both ends are equal, as after one round.
    """
    scale, unit = next((u for u in TIME_UNITS if seconds[0] >= u[0]), TIME_UNITS[-1])
    median, low, high = (f"{float(f'{s / scale:.3g}'):,g}" for s in seconds)  # 1,000 for 1e+03
    return f"{median} {unit}", f"{low} to {high}" if seconds[1] < seconds[2] else ""
