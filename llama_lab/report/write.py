"""A study's report: one analysis, written as a page, a CSV file, a table on the terminal and a W&B run."""

from pathlib import Path

from omegaconf import DictConfig

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.config.trust import Trust
from llama_lab.runs.study import SUMMARY, Study

from .page import figures, write_page
from .summary import print_table, summary_rows, write_summary_csv

PAGE = "report.html"


def write_report(folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, Trust is immutable
    """Write report.html and summary.csv into a study's folder, print the table, and return the result.

    trust: packages whose components the configs of runs may name; models are rebuilt to check sizes.
    """
    result = analyse(Study.load(folder), folder, trust)
    write_summary_csv(result, folder / SUMMARY)
    write_page(result, folder / PAGE)
    print_table(result)
    print(f"the report is {folder / PAGE}")
    return result


def log_report(result: Result, folder: Path, logger: DictConfig) -> None:
    """Log the table of arms, the charts and the page as a W&B run with job_type "report", in the group of the runs."""
    import wandb

    from llama_lab.training.wandb_run import finish_wandb, start_wandb

    study = result.study
    run = start_wandb(folder, logger, "report", study.name, [study.design], {}, job_type="report")
    rows = summary_rows(result)
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    charts = {f"figures/{title}": wandb.Plotly(figure) for title, figure in figures(result).items()}
    run.log({"arms": table, "report": wandb.Html((folder / PAGE).read_text(encoding="utf-8")), **charts})
    finish_wandb(run)
