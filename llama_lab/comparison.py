"""Runs as tables and reports, for notebooks and other programs: a part of `import llama_lab`."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from llama_lab.config.trust import Trust
from llama_lab.errors import ConfigError
from llama_lab.runs.naming import short_names
from llama_lab.runs.record import Record, every_run, read_record
from llama_lab.study.report.analysis import analyse
from llama_lab.study.report.compare import compared, is_study
from llama_lab.study.report.page import page, write_page
from llama_lab.study.report.result import Result
from llama_lab.study.report.summary import summary_rows, write_summary_csv
from llama_lab.study.report.write import PAGE
from llama_lab.study.study import SUMMARY

HEIGHT = 900  # pixels of a report in a notebook


def read_runs(pattern: str | Path) -> pd.DataFrame:
    """One row per run in the folders that match a pattern, such as `runs/*`, and below them, whatever their status.

    Columns: `run`, its short name among these; `seed`, `status`; the last value of every metric and the costs, as in
    summary.json; the option of every config group; every config key with a dot, such as `train.tokens`; `path`. Raises
    ConfigError if there are none.
    """
    matches = map(Path, sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True)))
    records = [read_record(run) for run in dict.fromkeys(run for match in matches for run in every_run(match))]
    if not records:
        raise ConfigError(f"{pattern}: holds no run; name folders of runs or studies, such as runs/*")
    return pd.DataFrame([_row(record, name) for record, name in zip(records, short_names(records), strict=True)])


def _row(record: Record, name: str) -> dict[str, Any]:
    identity = {"run": name, "seed": record.seed, "status": record.status}
    settings = {key: value for key, value in record.config.items() if "." in key}
    choices = record.environment.choices
    return {**identity, **record.costs, **record.summary, **choices, **settings, "path": record.path}


def compare(
    *paths: str | Path,
    group_by: Sequence[str] = (),
    baseline: str | None = None,
    title: str | None = None,
    trust: Sequence[str] = (),
) -> "Comparison":
    """A report on runs and studies, as `llama-lab-compare` makes it; writes nothing.

    group_by: groups or settings that define the arms. trust: packages whose components the runs use. Raises ConfigError
    for a path without runs, an unknown key or arm, and runs of one arm with the same seed.
    """
    if not paths:
        raise ConfigError("compare: names no run; name folders of runs or studies, such as runs/llama")
    folders = [Path(path) for path in paths]
    study = compared(folders, group_by, baseline, title)
    own = folders[0] if is_study(folders, group_by) else Path("comparison")  # where speeds measured together are
    return Comparison(analyse(study, own, Trust(tuple(trust))))


@dataclass(frozen=True)
class Comparison:
    """A comparison of arms. In a notebook it shows itself as the report."""

    result: Result

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per arm: the columns of summary.csv."""
        return pd.DataFrame(summary_rows(self.result)).set_index("arm")

    def save(self, folder: str | Path) -> Path:
        """Write report.html and summary.csv into a folder; returns the path of the report."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_summary_csv(self.result, folder / SUMMARY)
        write_page(self.result, folder / PAGE)
        return folder / PAGE

    def __repr__(self) -> str:
        return f"{self.result.study.heading}\n{self.result.verdict}"

    def _repr_html_(self) -> str:
        """The report in a frame of its own, whose styles and scripts do not reach the notebook."""
        return (
            f'<iframe srcdoc="{escape(page(self.result))}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'
        )
