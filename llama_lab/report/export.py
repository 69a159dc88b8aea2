"""Export of a study for a paper: figures, tables and runs in one folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_lab.analysis.environments import environment
from llama_lab.analysis.result import Result
from llama_lab.analysis.settings import RATE
from llama_lab.runs.record import MISSING
from llama_lab.runs.stored import CURVES, FIXED_COSTS, HASHES, LOSSES, MEASURED_COSTS
from llama_lab.runs.study import SUMMARY
from llama_lab.util.errors import ConfigError
from llama_lab.util.files import report_disk_errors

from .figures import write_figures
from .markup import latex_table, markdown_table
from .summary import write_csv, write_summary_csv
from .tables import Table, tables

CONTENTS = "contents.txt"  # lists the files of an export, so that nothing else is ever overwritten
FIGURES, TABLES = "figures", "tables"


def check_export(folder: Path, overwrite: bool) -> None:
    """Raises ConfigError unless `folder` is missing, empty, or, with overwrite, holds nothing but an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--export {folder}: is a file; name a folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"--export {folder}: is not empty; name another folder, or add --overwrite")
    contents = folder / CONTENTS
    if not contents.exists():
        raise ConfigError(f"--export {folder}: holds no export that --overwrite could replace; name another folder")
    if strange := sorted(_files(folder) - {CONTENTS, *contents.read_text(encoding="utf-8").splitlines()}):
        raise ConfigError(
            f"--export {folder}: holds {strange[0]}, which no export wrote and --overwrite would delete; name another "
            "folder"
        )


def write_export(result: Result, folder: Path, overwrite: bool = False) -> None:
    """Write an export, replacing `folder` atomically, and print its size. Raises ConfigError; see `check_export`."""
    check_export(folder, overwrite)
    with report_disk_errors(f"--export {folder}"), _replacing(folder) as fresh:
        write_runs(result, fresh / "runs.csv")
        write_curves(result, fresh / "curves.csv")
        write_summary_csv(result, fresh / SUMMARY)
        for part in (FIGURES, TABLES):
            (fresh / part).mkdir()
        write_figures(result, fresh / FIGURES)
        for slug, table in tables(result).items():
            write_table(table, slug, fresh / TABLES)
        written = sorted(_files(fresh))
        _write(fresh / CONTENTS, "".join(f"{name}\n" for name in written))
    print(f"exported {len(written)} files to {folder}, which {CONTENTS} lists")


def write_table(table: Table, slug: str, folder: Path) -> None:
    """Write a table as CSV, Markdown and LaTeX."""
    write_csv((dict(zip(table.head, row, strict=True)) for row in table.rows), folder / f"{slug}.csv")
    _write(folder / f"{slug}.md", markdown_table(table))
    _write(folder / f"{slug}.tex", latex_table(table, slug))


def write_runs(result: Result, path: Path) -> None:
    """Write one row per run; unknown values are empty.

    Column `judged`: whether the arm is judged by this run. Column `tunes_seed`: the judged seed whose learning rate the
    run helped to choose.
    """
    axes = result.study.axes
    levels = {arm.name: arm.axes for arm in result.study.arms}
    members = [member for arm in result.study.arms for member in arm.members]
    environments = {r.path: environment(r.environment) if r.status != MISSING else {} for r in result.records}
    judged = {(arm.name, record.path) for arm in result.arms for record in arm.records}
    rows = [
        {
            "arm": record.arm,
            **{f"axis:{axis}": levels[record.arm].get(axis) for axis in axes},
            "seed": record.seed,
            "learning_rate": record.config.get(RATE, member.learning_rate),
            "status": record.status,
            "judged": (record.arm, record.path) in judged,
            "tunes_seed": member.tunes,
            **{name: record.summary.get(name) for name in ("tokens", "step", "seconds", *LOSSES)},
            **{name: record.costs.get(name) for name in FIXED_COSTS},
            **{name: record.summary.get(name) for name in MEASURED_COSTS},
            **{name: getattr(record.environment, name) for name in HASHES},
            **{name: value for name, value in environments[record.path].items() if name not in ("data", "tokenizer")},
        }
        for record, member in zip(result.records, members, strict=True)
    ]
    write_csv(rows, path)


def write_curves(result: Result, path: Path) -> None:
    """Write one row per run, step and logged metric."""
    rows = (
        {"arm": record.arm, "seed": record.seed, "learning_rate": record.config.get(RATE)}
        | {"step": int(row["step"]), "tokens": int(row["tokens"]), "metric": metric, "value": row[metric]}
        for record in result.records
        for row in record.metrics
        for metric in CURVES
        if metric in row
    )
    write_csv(rows, path)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _files(folder: Path) -> set[str]:
    """The relative paths of all files below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces `folder` on success, and is deleted on failure."""
    folder = folder.resolve()  # follows a link
    fresh, old = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    for left in (fresh, old):  # by a killed process
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)
