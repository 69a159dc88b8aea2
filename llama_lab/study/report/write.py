"""A study's report: analysed once, told three ways."""

from pathlib import Path

from llama_lab.config.trust import Trust
from llama_lab.study.study import SUMMARY, Study

from .analysis import analyse
from .page import write_page
from .result import Result
from .summary import print_table, write_summary_csv


def write_report(folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, it cannot be changed
    """Write report.html and summary.csv into a study's folder, print the table, and return what was found.

    trust: what the configs of runs may name, whose models are rebuilt to check their sizes.
    """
    result = analyse(Study.load(folder), folder, trust)
    write_summary_csv(result, folder / SUMMARY)
    write_page(result, folder / "report.html")
    print_table(result)
    print(f"the report is {folder / 'report.html'}")
    return result
