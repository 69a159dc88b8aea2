"""Existing runs, grouped into the arms of a study by any settings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llama_lab.runs.folder import is_run
from llama_lab.runs.naming import short_names
from llama_lab.runs.record import Record, every_run, read_record
from llama_lab.runs.study import FILE, Arm, Member, Study
from llama_lab.util.errors import ConfigError, suggestion

from .settings import RATE, text_of


def is_study(paths: Sequence[Path], group_by: Sequence[str]) -> bool:
    """Whether this is a single study with its own arms."""
    return len(paths) == 1 and (paths[0] / FILE).exists() and not group_by


def compared(paths: Sequence[Path], group_by: Sequence[str], baseline: str | None, title: str | None = None) -> Study:
    """The study of these runs, with absolute paths, against this baseline. Raises ConfigError; see `compare`."""
    study = Study.load(paths[0]) if is_study(paths, group_by) else combine(paths, group_by)
    names = [arm.name for arm in study.arms]
    if baseline is not None and baseline not in names:
        options = f"no such arm{suggestion(baseline, names)}; choose {' | '.join(names)}"
        raise ConfigError(f"--baseline {baseline}: {options}")
    if baseline is not None and study.is_scaling:
        raise ConfigError(f"--baseline {baseline}: a scaling study compares each option with the first; leave it out")
    return replace(
        study,
        arms=tuple(arm.below(paths[0].absolute()) for arm in study.arms),
        baseline=baseline or study.baseline,
        title=study.title if title is None else title,
    )


def combine(paths: Sequence[Path], group_by: Sequence[str]) -> Study:
    """A study with one arm per combination of values of `group_by`, or per arm of theirs; the first is the baseline.

    Raises ConfigError; see `compare`.
    """
    found = {path: runs_below(path) for path in paths}
    if empty := [path for path, runs in found.items() if not runs]:
        raise ConfigError(f"{empty[0]}: holds no run; name folders of runs or studies, such as runs/llama/base/seed=1")
    records = [read_record(run) for runs in found.values() for run in runs]
    groups: dict[tuple[tuple[str, str], ...], list[Record]] = {}  # by their levels of the axes
    for record, label in zip(records, short_names(records), strict=True):
        known = {**record.config, **record.environment.choices}
        for key in group_by:
            if key not in known:
                raise ConfigError(f"--group-by {key}: {record.path} has no such setting{suggestion(key, known)}")
        levels = tuple({key: text_of(known, key) for key in group_by}.items()) or (("arm", label),)
        groups.setdefault(levels, []).append(record)
    arms = []
    for levels, members in groups.items():
        name = ", ".join(map("=".join, levels)) if group_by else levels[0][1]
        arms.append(Arm(name, dict(levels), arm_members(name, members)))
    return Study("comparison", "comparison", arms[0].name, tuple(arms))


def runs_below(path: Path) -> list[Path]:
    """The path itself if it is a run, a study's judged runs, or all runs in its folders."""
    if is_run(path):
        return [path]
    if (path / FILE).exists():
        listed = [path / member.folder for arm in Study.load(path).arms for member in arm.judged]
        return [folder for folder in listed if is_run(folder)]
    return every_run(path)


def arm_members(name: str, records: Sequence[Record]) -> tuple[Member, ...]:
    """The runs of one arm, over seeds and, if a seed has several, learning rates. Raises ConfigError for duplicates."""
    runs = {(record.seed, record.config.get(RATE)) for record in records}
    is_swept = len(runs) > len({seed for seed, _ in runs})  # tuned runs have a rate of each seed
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
