"""A study's report: one analysis, written as a page, a CSV file, a table on the terminal, a W&B run and an export."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path

import pandas as pd
from omegaconf import DictConfig

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.grouping import compared, is_study
from llama_lab.analysis.result import Result
from llama_lab.config.trust import Trust
from llama_lab.runs.study import FILE, SUMMARY, Study, StudySpeed, measured_speed
from llama_lab.util.errors import ConfigError

from .page import page, pictures, write_page
from .summary import print_table, summary_rows, write_summary_csv

PAGE = "report.html"
HEIGHT = 900  # pixels of a report in a notebook
COMMAND = "llama-lab-compare"


def write_report(folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, Trust is immutable
    """Write report.html and summary.csv into a study's folder, print the table, and return the result.

    trust: packages whose components the configs of runs may name; models are rebuilt to check sizes.
    """
    result = analyse(Study.load(folder), folder, trust)
    file = write_files(result, folder)
    print_table(result)
    print(f"the report is {file}")
    return result


def write_files(result: Result, folder: Path) -> Path:
    """Write report.html and summary.csv into a folder; returns the path of the report."""
    write_summary_csv(result, folder / SUMMARY)
    write_page(result, folder / PAGE)
    return folder / PAGE


# Of W&B's table of arms, which is no wider than a screen; summary.csv has all.
WANDB_COLUMNS = (
    *("arm", "seeds", "val_loss_mean", "val_second_half_loss_mean", "to_baseline_nats_mean", "to_baseline_nats_low"),
    *("to_baseline_nats_high", "to_baseline_nats_p", "params", "flops_per_token", "perf/tokens_per_second"),
)


def log_report(result: Result, folder: Path, logger: DictConfig) -> None:
    """Log the table of arms, the charts and the page as a W&B run with job_type "report", in the group of the runs."""
    import wandb

    from llama_lab.training.loggers import finish_wandb, start_wandb

    study = result.study
    first, *others = [record.config for record in result.started] or [{}]
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    config = {"design": study.design, "baseline": study.baseline, "match": study.match, **shared}
    run = start_wandb(folder, logger, "report", study.name, [study.design], config, job_type="report")
    rows = summary_rows(result)
    columns: list[str | int] = [column for column in rows[0] if column in WANDB_COLUMNS]
    table = wandb.Table(columns=columns, data=[[row[str(column)] for column in columns] for row in rows])
    charts = {f"figures/{title}": wandb.Html(svg) for title, svg in pictures(result).items()}
    run.log({"arms": table, "report": wandb.Html((folder / PAGE).read_text(encoding="utf-8")), **charts})
    finish_wandb(run)


def compare(
    paths: Sequence[Path],
    group_by: Sequence[str],
    baseline: str | None,
    out: Path | None,
    title: str | None = None,
    trust: Trust = Trust(),  # noqa: B008, Trust is immutable
    export: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write a report on runs and studies, and export it for a paper if `export` is given.

    out: folder of the report (default: "comparison", or the study's own folder for a single unchanged study). title: of
    the report (default: the study's). overwrite: replace an earlier export. Raises ConfigError for a path without runs,
    runs of one arm with the same seed, or an `export` that holds other files.
    """
    if export is not None:
        from .export import check_export, write_export

        check_export(export, overwrite)
    folder = paths[0]
    if not is_study(paths, group_by) or (baseline, out, title) != (None, None, None):
        study = compared(paths, group_by, baseline, title)
        folder = out or Path("comparison")
        if (folder / FILE).exists() and not Study.load(folder).command.startswith(COMMAND):
            raise ConfigError(f"--out {folder}: holds a study, which the comparison would replace; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        speeds = [speed for at in (paths[0], folder) if study.is_in(at) and (speed := measured_speed(at))]
        (folder / StudySpeed.FILE).unlink(missing_ok=True)  # of other runs
        for speed in speeds[:1]:
            speed.save(folder)
        replace(study, command=shlex.join([COMMAND, *sys.argv[1:]])).save(folder)
    result = write_report(folder, trust)
    if export is not None:
        write_export(result, export, overwrite)


@dataclass(frozen=True)
class Report:
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
        return write_files(self.result, folder)

    def __repr__(self) -> str:
        return f"{self.result.study.heading}\n{self.result.verdict}"

    def _repr_html_(self) -> str:
        """The report in a frame of its own, whose styles and scripts do not reach the notebook."""
        return (
            f'<iframe srcdoc="{escape(page(self.result))}" style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'
        )
