"""metrics.csv: the record of a run that needs no account, survives a kill, and is the source of every report."""

import csv
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from lightning.pytorch.loggers.logger import Logger

from llama_lab.util.errors import ConfigError
from llama_lab.util.files import replacing

from .layer_metrics import layer_metrics

METRICS = "metrics.csv"
COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train/loss",
    "val/loss",
    "val/bits_per_byte",
    "val/accuracy",
    "val/ema_loss",
    "optim/lr",
    "optim/grad_norm",
    "perf/tokens_per_second",
    "perf/tokens_per_second_per_device",
    "perf/mfu",
    "perf/peak_memory_bytes",
    "kv_cache/bytes_per_token",
    "kv_cache/bytes",
)


Cells = dict[str, str]
"""The text of each cell of a row that is not empty, by its column."""


class Rows(TypedDict):
    """How many rows a file has, and their checksum; a checkpoint has those before it."""

    count: int
    checksum: str


NO_ROWS = Rows(count=0, checksum=f"{0:08x}")


class MetricsLogger(Logger):
    """A logger of metrics alone: Lightning's other hooks do nothing."""

    @property
    def name(self) -> str:
        """The kind of logger."""
        return type(self).__name__

    @property
    def version(self) -> str:
        """None: a run's folder is its version."""
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: resolved.yaml holds the config."""


class MetricsCSV(MetricsLogger):
    """Appends a row per logged step, on disk at once. Lightning's own CSV logger deletes the old rows on resume.

    parts: names of a mixture's, each with a column for its loss, after the others. layers: whose telemetry is logged.
    For rank 0 alone, as all our loggers: the other ranks are given none.
    """

    def __init__(self, path: Path, parts: Iterable[str] = (), layers: int = 0) -> None:
        super().__init__()
        self.path = path
        self.columns = (*COLUMNS, *(f"val/loss/{name}" for name in parts), *layer_metrics(layers))
        self.rows = NO_ROWS

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row; a metric without a column is an error, so that none goes missing."""
        cells = {name: str(value) for name, value in {"step": step, **metrics}.items()}
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if is_new:
                writer.writeheader()
            writer.writerow(cells)
        self.rows = described([cells], self.rows)

    def forget_after(self, known: Rows) -> list[dict[str, float]]:
        """Drop the rows after a checkpoint: a run that resumes there writes them again. Returns the other metrics.

        These keep their columns, also where the run logs less from now on. known: the rows of the checkpoint. Raises
        ConfigError if these are not the file's first rows.
        """
        try:
            rows = read_cells(self.path)[: known["count"]]
            metrics = with_numbers(rows)
        except (ValueError, KeyError) as error:
            raise self._damaged(str(error)) from error
        self.rows = described(rows)
        if self.rows != known:
            raise self._damaged(f"it does not begin with the {known['count']} rows before the checkpoint")
        if not self.path.exists():
            return []
        self.columns = tuple(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with replacing(self.path) as kept, kept.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        return [{name: value for name, value in row.items() if name != "step"} for row in metrics]

    def _damaged(self, how: str) -> ConfigError:
        remedy = "restore it, choose another name, or start over with overwrite=true"
        return ConfigError(f"{self.path}: is damaged, {how}; {remedy}")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, each with the metrics logged at its step; a line cut short by a kill is left out."""
    return with_numbers(read_cells(path))


def read_cells(path: Path) -> list[Cells]:
    """The same as text; no rows if there is no file. Raises ValueError for a file that is no such table."""
    text = path.read_text() if path.exists() else ""
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), restkey="", restval="")
    try:
        return [{name: str(cell) for name, cell in row.items() if cell} for row in reader]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def with_numbers(rows: Iterable[Cells]) -> list[dict[str, float]]:
    """Rows with their cells as numbers. Raises ValueError for a cell that holds none."""
    return [{name: float(cell) for name, cell in row.items()} for row in rows]


def described(rows: Sequence[Cells], before: Rows = NO_ROWS) -> Rows:
    """What a file has with these rows after those `before`, in whatever order its columns are."""
    found = int(before["checksum"], 16)
    for row in rows:
        found = zlib.crc32(repr(sorted(row.items())).encode(), found)
    return Rows(count=before["count"] + len(rows), checksum=f"{found:08x}")
