"""Measurements as tables, with a row for each contender at a size: printed, and written as CSV.

Columns: what: the contender. size: of its input. pass: such as "forward" or "backward". median_ms, low_ms, high_ms: of
a call, over the rounds. ratio: the median speed relative to the first contender; below 1 is slower.
"""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils.benchmark import Measurement, TaskSpec

from llama_lab.devices.hardware import choose_accelerator
from llama_lab.evaluation.speed import Contenders, time_in_turn
from llama_lab.runs.environment import cpu_name
from llama_lab.util.formatting import three_digits


def measure(size: str, direction: str, contenders: Contenders, rounds: int, parts: int = 1) -> pd.DataFrame:
    """Time contenders in turn, and compare them with the first; see `rows_of`."""
    return rows_of(size, direction, time_in_turn(contenders, rounds), parts)


def rows_of(size: str, direction: str, timings: Mapping[str, Measurement], parts: int = 1) -> pd.DataFrame:
    """A row for each timing of calls, by contender; its time is that of one of a call's equal `parts`."""
    times = [[timing.median, min(timing.times), max(timing.times)] for timing in timings.values()]
    rows = 1e3 / parts * pd.DataFrame(times, columns=["median_ms", "low_ms", "high_ms"])
    rows.insert(0, "what", list(timings))
    rows.insert(1, "size", size)
    rows.insert(2, "pass", direction)
    return rows.assign(ratio=rows.median_ms[0] / rows.median_ms)


def start(wanted: str) -> tuple[torch.device, dict[str, Any]]:
    """The device named `wanted`, and what else times depend on, which is printed, as columns of every row.

    `auto` is the GPU if there is one. Raises ConfigError for a missing device.
    """
    if wanted == "auto":
        wanted = "gpu" if torch.cuda.is_available() else "cpu"
    device = torch.device({"gpu": "cuda"}.get(choose_accelerator(wanted, "--device"), wanted))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    where = {"device": name, **versions, "date": date.today().isoformat()}
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    return device, where


def show(title: str, rows: pd.DataFrame) -> None:
    """Print a table."""
    print(f"\n{title}\n{rows.to_string(index=False, na_rep='', float_format=three_digits)}", flush=True)


def write(tables: Sequence[pd.DataFrame], where: Mapping[str, Any], path: Path) -> None:
    """Write tables as one CSV file, with the conditions `where` they were measured, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.concat(tables).assign(**where).to_csv(path, index=False)
    print(f"\nwrote {path}", flush=True)


def measurement(seconds: Sequence[float], parts: int = 1) -> Measurement:
    """Seconds of a call in every round as PyTorch's measurement of one of its equal `parts`."""
    return Measurement(parts, list(seconds), TaskSpec("work()", ""))
