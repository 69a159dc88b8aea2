"""metrics.csv: the record of a run that needs no account, survives a kill, and is the source of every report."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from llama_lab.files import replacing

from .telemetry import layer_metrics

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

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row; a metric without a column is an error, so that none goes missing."""
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if is_new:
                writer.writeheader()
            writer.writerow({"step": step, **metrics})

    def forget_after(self, step: int) -> list[dict[str, float]]:
        """Drop the rows after `step`: a run that resumes there writes them again. Returns the metrics of the others.

        These keep their columns, also where the run logs less from now on.
        """
        if not self.path.exists():
            return []
        rows = [row for row in read_metrics(self.path) if row["step"] <= step]
        self.columns = tuple(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with replacing(self.path) as kept, kept.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(row | {"step": int(row["step"]), "tokens": int(row["tokens"])} for row in rows)
        return [{name: value for name, value in row.items() if name != "step"} for row in rows]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, each with the metrics logged at its step; a line cut short by a kill is left out."""
    text = path.read_text()
    whole_lines = text[: text.rfind("\n") + 1].splitlines()
    return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(whole_lines)]
