"""The results of a study as a small CSV, a row per run: enough to judge again, and to go on in another clone."""

import json
import shutil
from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from llama_lab.api import composing
from llama_lab.config.grammar import override_key, override_value
from llama_lab.config.schema import CHANGEABLE, INDIRECT, belongs, flatten
from llama_lab.runs.evaluation import DocumentLosses, Evaluation
from llama_lab.runs.folder import OVERRIDES, RESOLVED, RunFolder, read_overrides, resolved, write_yaml
from llama_lab.runs.json_file import from_json
from llama_lab.runs.metrics import METRICS_CSV, cells_of, with_numbers
from llama_lab.runs.stored import Environment, Status, Summary
from llama_lab.runs.study import FILE, Study, StudySpeed
from llama_lab.study.design.designs import Composer
from llama_lab.util.errors import ConfigError
from llama_lab.util.files import checksum, replace_text, replacing

ENDED = ("done", "diverged")
# What is kept of a run, with what its columns begin with: `environment.`, ...
RECORDS = {kind.FILE.removesuffix("json"): kind for kind in (Environment, Summary, Evaluation, DocumentLosses, Status)}
OF_RUNS = {"arm", "seed", "optim.lr"}  # in which the runs of an arm differ


def pack(folder: Path, archive: Path) -> None:
    """Write a row for each run of the study in `folder` that has ended, and copy the study's own files beside it."""
    members = dict.fromkeys(member.folder for arm in Study.load(folder).arms for member in arm.members)
    kept = {row["run"]: row for row in rows_of(archive)} if archive.exists() else {}
    rows = [row for one in members if (row := kept.get(one) or row_of(folder, one))]
    if not rows:
        return
    cells = pd.DataFrame([{name: json.dumps(value) for name, value in row.items()} for row in rows]).fillna("-")
    new = cells.mask(cells == cells.shift(), "")  # what a run has in common with the one above is left out
    archive.parent.mkdir(parents=True, exist_ok=True)
    with replacing(archive) as file:
        new.to_csv(file, index=False, lineterminator="\n")
    for name in (FILE, StudySpeed.FILE):
        if (folder / name).exists():
            shutil.copyfile(folder / name, beside(archive, name))


def beside(archive: Path, name: str) -> Path:
    """Where one of the study's own files is kept."""
    return archive.with_suffix(f".{name}")


def row_of(folder: Path, member: str) -> dict[str, Any] | None:
    """What the archive has of a run; None of one that has not ended."""
    run = RunFolder(folder / member)
    if (status := run.status) is None or status.status not in ENDED:
        return None
    files = {prefix: kind for prefix, kind in RECORDS.items() if (run.path / kind.FILE).exists()}
    records = {prefix: kind.load(run.path).to_json() for prefix, kind in files.items()}
    return {
        "run": member,
        "overrides": read_overrides(run.path),
        "config": fingerprint(resolved(run.config())),
        "date": date.fromtimestamp((run.path / Status.FILE).stat().st_mtime).isoformat(),
        METRICS_CSV: run.metrics.read_text(encoding="utf-8") if run.metrics.exists() else "",
        **{prefix + key: value for prefix, record in records.items() for key, value in record.items()},
    }


def fingerprint(config: dict[str, Any]) -> str:
    """Of the settings of a resolved config that decide a run's numbers."""
    settings = {key: value for key, value in flatten(config).items() if value is not None}
    others = (*CHANGEABLE, *INDIRECT, "trainer", "init_from")  # a path, and the weights there have a hash
    kept = {key: value for key, value in settings.items() if not belongs(key, others)}
    return checksum(json.dumps(kept, sort_keys=True))


def settings_of(rows: Sequence[dict[str, Any]], config_dir: str | None) -> list[dict[str, Any]]:
    """The resolved configs of runs now."""
    return resolved_all(tuple(tuple(row["overrides"]) for row in rows), config_dir)


@lru_cache
def resolved_all(runs: tuple[tuple[str, ...], ...], config_dir: str | None) -> list[dict[str, Any]]:
    """The resolved configs of these overrides; kept, since a claim asks for them more than once."""
    return [*map(resolved, configs_of(runs, config_dir))]


def configs_of(runs: Sequence[Sequence[str]], config_dir: str | None) -> list[DictConfig]:
    """The configs of these overrides. The runs of an arm share the one that is composed."""
    overrides = [{override_key(one): one for one in run} for run in runs]
    shared = [tuple(one for key, one in given.items() if key not in OF_RUNS) for given in overrides]
    with composing([], config_dir):
        composed = {given: Composer().compose(*given)[0] for given in dict.fromkeys(shared)}
    configs = [composed[given].copy() for given in shared]
    for cfg, given in zip(configs, overrides, strict=True):
        for key in OF_RUNS & given.keys():
            OmegaConf.update(cfg, key, override_value(given[key]))
    return configs


def changed_arms(archive: Path, config_dir: str | None = None) -> list[str]:
    """The arms of which a run would have other settings now."""
    rows = rows_of(archive)
    now = map(fingerprint, settings_of(rows, config_dir))
    changed = (row for row, config in zip(rows, now, strict=True) if config != row["config"])
    return [*dict.fromkeys(str(row["environment.arm"]) for row in changed)]


def rows_of(archive: Path) -> list[dict[str, Any]]:
    """The rows of an archive. Raises ConfigError for one that is damaged."""
    try:
        cells = pd.read_csv(archive, dtype=str, keep_default_na=False)
        rows = cells.mask(cells == "").ffill().to_dict("records")
        return [{str(name): json.loads(cell) for name, cell in row.items() if cell != "-"} for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{archive}: is damaged, {error}; restore it") from error


def curve(row: dict[str, Any]) -> list[dict[str, float]]:
    """What a run of an archive logged, by step."""
    return with_numbers(cells_of(row[METRICS_CSV]))


def unpack(archive: Path, folder: Path, config_dir: str | None = None) -> None:
    """Make the study's folder, with a folder for each run that it lacks; these have no weights."""
    for name in (FILE, StudySpeed.FILE):
        if beside(archive, name).exists() and not (folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(beside(archive, name), folder / name)
    rows = rows_of(archive)
    for row, settings in zip(rows, settings_of(rows, config_dir), strict=True):
        path = folder / row["run"]
        if (path / Status.FILE).exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        write_yaml(row["overrides"], path / OVERRIDES)
        decided = {"compile": row["environment.compiled"]}  # which is `auto` until a run starts
        write_yaml(settings | {"trainer": settings["trainer"] | decided}, path / RESOLVED)
        replace_text(path / METRICS_CSV, row[METRICS_CSV])
        for prefix, kind in RECORDS.items():
            if record := {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}:
                from_json(kind, record).save(path)
