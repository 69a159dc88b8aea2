"""A comparison of arms for notebooks: what `llama_lab.compare` returns."""

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import pandas as pd

from llama_lab.analysis.result import Result
from llama_lab.runs.study import SUMMARY

from .page import page, write_page
from .summary import summary_rows, write_summary_csv
from .write import PAGE

HEIGHT = 900  # pixels of a report in a notebook


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
