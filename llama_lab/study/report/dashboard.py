"""The report on W&B, in the group of the study's runs."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from llama_lab.training.loggers import start_wandb

from .result import Result
from .summary import summary_rows


def log_report(result: Result, folder: Path, logger: DictConfig) -> None:
    """Log the table of arms and the page as a W&B run with job_type "report"."""
    import wandb

    study = result.study
    run = start_wandb(folder, logger.wandb_project, "report", study.name, [study.design], {}, job_type="report")
    rows: list[Any] = summary_rows(result)
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    run.log({"arms": table, "report": wandb.Html((folder / "report.html").read_text(encoding="utf-8"))})
    run.finish()
