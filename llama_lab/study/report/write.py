"""A study's report: one analysis, written as a page, a CSV file and a table on the terminal."""

from pathlib import Path

from llama_lab.config.trust import Trust
from llama_lab.study.study import SUMMARY, Study

from .analysis import analyse
from .page import write_page
from .result import Result
from .summary import print_table, write_summary_csv


def write_report(folder: Path, trust: Trust = Trust()) -> Result:  # noqa: B008, Trust is immutable
    """Write report.html and summary.csv into a study's folder, print the table, and return the result.

    trust: packages whose components the configs of runs may name; models are rebuilt to check sizes.
    """
    result = analyse(Study.load(folder), folder, trust)
    write_summary_csv(result, folder / SUMMARY)
    write_page(result, folder / "report.html")
    print_table(result)
    print(f"the report is {folder / 'report.html'}")
    return result
