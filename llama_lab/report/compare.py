"""`llama-lab-compare`: a report on existing runs, grouped into arms by any settings."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_lab.analysis.grouping import compared, is_study
from llama_lab.config.trust import Trust
from llama_lab.runs.study import FILE, Study
from llama_lab.util.errors import ConfigError

from .write import write_report

COMMAND = "llama-lab-compare"


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
        from .export import check_export, write_export  # matplotlib takes a second to import

        check_export(export, overwrite)
    folder = paths[0]
    if not is_study(paths, group_by) or (baseline, out, title) != (None, None, None):
        study = compared(paths, group_by, baseline, title)
        folder = out or Path("comparison")
        if (folder / FILE).exists() and not Study.load(folder).command.startswith(COMMAND):
            raise ConfigError(f"--out {folder}: holds a study, which the comparison would replace; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        replace(study, command=shlex.join([COMMAND, *sys.argv[1:]])).save(folder)
    result = write_report(folder, trust)
    if export is not None:
        write_export(result, export, overwrite)
