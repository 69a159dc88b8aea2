"""`llama-lab-compare`: a study put together afterwards, from any run folders, grouped by any settings."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_lab.config.trust import Trust
from llama_lab.errors import ConfigError, suggestion
from llama_lab.runs.record import Record, is_run, read_record
from llama_lab.study.study import FILE, Arm, Member, Study

from .result import Result
from .write import write_report

SWEPT = "optim.lr"


COMMAND = "llama-lab-compare"


def compare(
    paths: Sequence[Path],
    group_by: Sequence[str],
    baseline: str | None,
    out: Path | None,
    title: str | None = None,
    trust: Trust = Trust(),  # noqa: B008, it cannot be changed
    export: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Report on runs and studies, in `out`, "comparison" unless told; and export for a paper, into `export` if given.

    title: of the report; default: the study's. One study as it is, without `out` and `title`, is reported on in its own
    folder. overwrite: an earlier export. Raises ConfigError for a path without runs, runs that the grouping does not
    tell apart, or an `export` that holds other files.
    """
    if export is not None:
        from .export import check_export, write_export  # draws with matplotlib, which takes a second to import

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
    study = absolute(Study.load(paths[0]), paths[0]) if alone else put_together(paths, group_by)
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
    """A study whose members are found from anywhere."""
    arms = [
        replace(arm, members=tuple(replace(m, folder=str((folder / m.folder).absolute())) for m in arm.members))
        for arm in study.arms
    ]
    return replace(study, arms=tuple(arms))


def put_together(paths: Sequence[Path], group_by: Sequence[str]) -> Study:
    """One arm per combination of the values of `group_by`, or per run name and arm; the first one is the baseline."""
    records = [read_record(folder) for path in paths for folder in run_folders(path)]
    groups: dict[str, list[Record]] = {}
    axes: dict[str, dict[str, str]] = {}
    for record in records:
        levels = {key: value_of(record, key) for key in group_by} or {"arm": f"{record.facts['name']}/{record.arm}"}
        name = ", ".join(f"{key}={value}" for key, value in levels.items()) if group_by else levels["arm"]
        groups.setdefault(name, []).append(record)
        axes[name] = levels
    arms = tuple(Arm(name, axes[name], arm_members(name, members)) for name, members in groups.items())
    return Study("comparison", "comparison", arms[0].name, arms)


def run_folders(path: Path) -> list[Path]:
    """The runs that a path stands for: itself, a study's judged ones, or all below it. ConfigError without any."""
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
    """A run's choice in a config group, or a setting of its config. Raises ConfigError for a key it does not have."""
    known = {**record.config, **record.facts["choices"]}
    if key not in known:
        raise ConfigError(f"--group-by {key}: {record.path} has no such setting{suggestion(key, known)}")
    return str(known[key])


def arm_members(name: str, records: Sequence[Record]) -> tuple[Member, ...]:
    """The runs of one arm, over seeds and, if they differ in it, learning rates. Raises ConfigError for two alike."""
    is_swept = len({record.config.get(SWEPT) for record in records}) > 1
    first: dict[tuple[int, float | None], Record] = {}
    for record in records:
        other = first.setdefault((record.seed, record.config.get(SWEPT)), record)
        if other.path.absolute() != record.path.absolute():
            differ = [key for key in record.config if record.config[key] != other.config.get(key) and key != "name"]
            raise ConfigError(
                f"{record.path}: has seed {record.seed} of {name}, as {other.path} has; tell them apart by --group-by "
                f"{','.join(differ[:3]) or 'another key'}"
            )
    return tuple(
        Member(str(record.path.absolute()), record.seed, record.config.get(SWEPT) if is_swept else None)
        for record in first.values()
    )


def checked_baseline(wanted: str, study: Study) -> str:
    """The arm to compare with. Raises ConfigError if there is none of this name."""
    names = [arm.name for arm in study.arms]
    if wanted not in names:
        raise ConfigError(f"--baseline {wanted}: no such arm{suggestion(wanted, names)}; choose {' | '.join(names)}")
    return wanted
