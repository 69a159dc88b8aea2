"""A study's report: analysed once, told three ways."""

from pathlib import Path

from .analysis import analyse
from .page import write_page
from .record import SUMMARY, Study
from .result import Result
from .table import print_table, write_summary_csv


def write_report(folder: Path) -> Result:
    """Write report.html and summary.csv into a study's folder, print the table, and return what was found."""
    result = analyse(Study.load(folder), folder)
    write_summary_csv(result, folder / SUMMARY)
    write_page(result, folder / "report.html")
    print_table(result)
    print(f"the report is {folder / 'report.html'}")
    return result
