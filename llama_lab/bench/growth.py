"""How time grows: of a trained token with the model's sizes, of planning with arms, of a report with its runs.

`python -m llama_lab.bench growth`. Each size is measured at a few points around a small base, one point after the other
in every round, and compared with what was counted: FLOPs of the model, or the number of arms or runs.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import pandas as pd
from rich.table import Table
from torch import nn

from llama_lab.devices.memory import keep_freed_memory
from llama_lab.display import plain_table, quiet_libraries
from llama_lab.model import Decoder, measure_cost
from llama_lab.plots import save
from llama_lab.timing import alternating, measurement

from .charts import growth_chart
from .growing_studies import Workshop
from .peers import Preset, spec_of
from .rows import rows_of, start, timing_text, write_csv
from .side import Work

SHARES = {"score_share": "scores", "head_share": "head", "update_share": "AdamW"}  # headings by column
COLUMNS = ("measured", "counted", *SHARES)
HEAD_DIM = 32


@dataclass(frozen=True)
class Base:
    """The model around which sizes vary, one at a time. tokens: of a step, whatever the context."""

    depth: int = 4
    width: int = 128
    vocabulary: int = 2048
    context: int = 128
    tokens: int = 2048

    @property
    def overrides(self) -> tuple[str, ...]:
        """Those of its config, a Llama."""
        return (
            f"model.n_layers={self.depth}",
            f"model.dim={self.width}",
            f"model.n_heads={max(1, self.width // HEAD_DIM)}",
            f"model.vocab_size={self.vocabulary}",
            f"model.max_seq_len={self.context}",
            f"train.batch_size={self.tokens // self.context}",
        )


@dataclass(frozen=True)
class Grid:
    """Points: multiples of the base's sizes, numbers of arms, and of runs. steps: timed in a round."""

    base: Base = Base()
    multiples: Sequence[float] = (0.5, 1, 2, 4)
    arms: Sequence[int] = (2, 4, 8, 16)
    runs: Sequence[int] = (6, 12, 24, 48)
    steps: int = 4


GRIDS = {"full": Grid(), "tiny": Grid(Base(1, 32, 64, 16, 64), (1, 2), (2, 4), (4, 8), steps=1)}
SIZES = ("depth", "width", "vocabulary", "context")
TITLES = {
    **{size: f"a trained token over the {size}" for size in SIZES},
    "arms": "planning a study over its arms",
    "runs": "the report of a study over its runs",
}


def run(preset: str, rounds: int, out: Path) -> None:
    """Measure all, print a table of each, and write `growth.csv` and `growth.png` into `out`."""
    quiet_libraries()
    grid = GRIDS[preset]
    _, where, console = start("cpu", f"{rounds} rounds")
    keep_freed_memory()  # as in a run
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        found = [
            *(measure_size(size, grid, rounds) for size in SIZES),
            measure_counts("arms", {n: partial(workshop.plan, n) for n in grid.arms}, rounds),
            measure_counts("runs", {n: workshop.report_of(n) for n in grid.runs}, rounds),
        ]
    for rows in found:
        console.print(growth_table(rows))
    write_csv([rows.assign(component="growth") for rows in found], COLUMNS, where, out / "growth.csv")
    save(growth_chart(found, TITLES), out / "growth.png")
    console.print(f"wrote {out / 'growth.csv'} and {out / 'growth.png'}", soft_wrap=True)


def measure_size(size: str, grid: Grid, rounds: int) -> pd.DataFrame:
    """Seconds per trained token at each multiple of a size, with what is counted, relative to the base."""
    points = {int(multiple * getattr(grid.base, size)): multiple for multiple in grid.multiples}
    works = {value: training(replace(grid.base, **{size: value})) for value in points}
    shares: dict[int, list[float]] = {value: [] for value in points}
    steps = {value: partial(train, work, grid.steps, shares[value]) for value, work in works.items()}
    rows = rows_at(size, "train", in_turn(steps, rounds), parts=grid.steps * grid.base.tokens)
    counts = pd.DataFrame([counted(work.side.model) for work in works.values()])
    rows = relative(rows, counts.pop("flops"), [multiple == 1 for multiple in points.values()])
    return rows.join(counts).assign(
        update_share=[median(share[1:]) for share in shares.values()]
    )  # without the warm-up


def measure_counts(what: str, works: Mapping[int, Callable[[], object]], rounds: int) -> pd.DataFrame:
    """Seconds of a whole work on `what`, by their number, relative to the smallest number."""
    seconds = in_turn({number: partial(timed, work) for number, work in works.items()}, rounds)
    numbers = pd.Series(list(works), dtype=float)
    return relative(rows_at(what, "whole", seconds), numbers, list(numbers == numbers.min()))


def training(base: Base) -> Work:
    """The training of a model as `peers` trains ours."""
    return Work(spec_of(Preset(base.overrides), decode=False))


def train(work: Work, steps: int, shares: list[float]) -> float:
    """Seconds of the next steps; the share of clipping and AdamW in them is added to `shares`."""
    took = work.train(steps)
    shares.append(took["update_seconds"] / took["seconds"])
    seconds: float = took["seconds"]
    return seconds


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(points: Mapping[int, Callable[[], float]], rounds: int) -> dict[int, list[float]]:
    """The seconds that each point says it took, in every round after a first one that warms up."""
    for point in points.values():
        point()
    seconds: dict[int, list[float]] = {value: [] for value in points}
    for number in range(rounds):
        for value in alternating(points, number):
            seconds[value].append(points[value]())
    return seconds


def rows_at(what: str, direction: str, seconds: Mapping[int, Sequence[float]], parts: int = 1) -> pd.DataFrame:
    """A row for each point, its seconds divided by `parts`."""
    rows = [rows_of(str(value), direction, {what: measurement(took)}, parts) for value, took in seconds.items()]
    return pd.concat(rows, ignore_index=True)


def relative(rows: pd.DataFrame, counts: pd.Series, is_base: Sequence[bool]) -> pd.DataFrame:
    """The rows with their time and their count as multiples of the base's."""
    base = is_base.index(True)
    return rows.assign(measured=rows.median_s / rows.median_s[base], counted=counts / counts[base])


def counted(model: nn.Module) -> dict[str, float]:
    """FLOPs of training on a token, and the shares of attention's scores and of the head in them."""
    assert isinstance(model, Decoder)
    flops = measure_cost(model).flops_per_token
    matrices = sum(2 * m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    head = 2 * model.embedding.head.weight.numel()
    return {"flops": 3 * flops, "score_share": 1 - matrices / flops, "head_share": head / flops}


def growth_table(rows: pd.DataFrame) -> Table:
    """Time and count as multiples of the base's, for a terminal of 80 columns.

    The shares of attention's scores and of the head are those of the count, that of AdamW with clipping is of the time.
    """
    what = rows.what[0]
    shares = [name for name in SHARES if name in rows]
    headings = ("median", "low to high", "time", "count", "ratio", *(SHARES[name] for name in shares))
    table = plain_table(TITLES[what], [what], headings, gap=2)
    for row in rows.to_dict("records"):
        growth = (f"{row['measured']:.2f}x", f"{row['counted']:.2f}x", f"{row['measured'] / row['counted']:.2f}")
        times = timing_text(row["median_s"], row["low_s"], row["high_s"])
        table.add_row(row["size"], *times, *growth, *(f"{row[share]:.0%}" for share in shares))
    return table
