"""`llama-lab-compare`: a report on existing runs, grouped into arms by any settings."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_lab.config.trust import Trust
from llama_lab.errors import ConfigError, suggestion
from llama_lab.runs.record import Record, is_run, read_record
from llama_lab.study.settings import RATE
from llama_lab.study.study import FILE, Arm, Member, Study

from .result import Result
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
    result = _report(paths, group_by, baseline, out, title, trust)
    if export is not None:
        write_export(result, export, overwrite)


def _report(
    paths: Sequence[Path],
    group_by: Sequence[str],
    baseline: str | None,
    out: Path | None,
    title: str | None,
    trust: Trust,
) -> Result:
    alone = len(paths) == 1 and (paths[0] / FILE).exists() and not group_by
    if alone and baseline is None and out is None and title is None:
        return write_report(paths[0], trust)
    study = absolute(Study.load(paths[0]), paths[0]) if alone else combine(paths, group_by)
    if baseline is not None:
        study = replace(study, baseline=checked_baseline(baseline, study))
    if title is not None:
        study = replace(study, title=title)
    folder = out or Path("comparison")
    if (folder / FILE).exists() and not Study.load(folder).command.startswith(COMMAND):
        raise ConfigError(f"--out {folder}: holds a study, which the comparison would replace; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    replace(study, command=shlex.join([COMMAND, *sys.argv[1:]])).save(folder)
    return write_report(folder, trust)


def absolute(study: Study, folder: Path) -> Study:
    """The study with absolute paths of its members."""
    arms = [
        replace(arm, members=tuple(replace(m, folder=str((folder / m.folder).absolute())) for m in arm.members))
        for arm in study.arms
    ]
    return replace(study, arms=tuple(arms))


def combine(paths: Sequence[Path], group_by: Sequence[str]) -> Study:
    """A study with one arm per combination of values of `group_by`, or per run name and arm; the first is the baseline.

    Raises ConfigError; see `compare`.
    """
    records = [read_record(folder) for path in paths for folder in run_folders(path)]
    groups: dict[str, list[Record]] = {}
    axes: dict[str, dict[str, str]] = {}
    for record in records:
        levels = {key: value_of(record, key) for key in group_by} or {"arm": f"{record.environment.name}/{record.arm}"}
        name = ", ".join(f"{key}={value}" for key, value in levels.items()) if group_by else levels["arm"]
        groups.setdefault(name, []).append(record)
        axes[name] = levels
    arms = tuple(Arm(name, axes[name], arm_members(name, members)) for name, members in groups.items())
    return Study("comparison", "comparison", arms[0].name, arms)


def run_folders(path: Path) -> list[Path]:
    """The path itself if it is a run, a study's judged runs, or all runs below. Raises ConfigError without any."""
    if is_run(path):
        return [path]
    if (path / FILE).exists():
        listed = [path / member.folder for arm in Study.load(path).arms for member in arm.judged]
        found = [folder for folder in listed if is_run(folder)]
    else:
        found = sorted(file.parent for file in path.rglob("status.json") if is_run(file.parent))
    if not found:
        raise ConfigError(f"{path}: holds no run; name folders of runs or studies, such as runs/llama/base/seed=1")
    return found


def value_of(record: Record, key: str) -> str:
    """A run's choice in a config group, or a setting of its config. Raises ConfigError for an unknown key."""
    known = {**record.config, **record.environment.choices}
    if key not in known:
        raise ConfigError(f"--group-by {key}: {record.path} has no such setting{suggestion(key, known)}")
    return str(known[key])


def arm_members(name: str, records: Sequence[Record]) -> tuple[Member, ...]:
    """The runs of one arm, over seeds and, if they differ, learning rates. Raises ConfigError for duplicates."""
    is_swept = len({record.config.get(RATE) for record in records}) > 1
    first: dict[tuple[int, float | None], Record] = {}
    for record in records:
        other = first.setdefault((record.seed, record.config.get(RATE)), record)
        if other.path.absolute() != record.path.absolute():
            differ = [key for key in record.config if record.config[key] != other.config.get(key) and key != "name"]
            raise ConfigError(
                f"{record.path}: has seed {record.seed} of {name}, and so has {other.path}; separate them with "
                f"--group-by {','.join(differ[:3]) or 'another key'}"
            )
    return tuple(
        Member(str(record.path.absolute()), record.seed, record.config.get(RATE) if is_swept else None)
        for record in first.values()
    )


def checked_baseline(wanted: str, study: Study) -> str:
    """The name of the arm to compare with. Raises ConfigError if no arm has it."""
    names = [arm.name for arm in study.arms]
    if wanted not in names:
        raise ConfigError(f"--baseline {wanted}: no such arm{suggestion(wanted, names)}; choose {' | '.join(names)}")
    return wanted
