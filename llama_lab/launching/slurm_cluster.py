"""The launcher's keys for Slurm, and wrappers of its commands: list the user's jobs, find a partition's GPUs."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_lab.errors import ConfigError

from .slots import setting_error

LOOK_SECONDS = 3.0  # between two calls of squeue, for any number of jobs
# Slurm's final states.
ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
FIELDS = "%i|%T|%N|%r|%S|%e|%o"  # last the batch script's path, which may hold any character
PASSING = {"", "None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit"}  # reasons to wait that end by itself
# Options of sbatch that are set elsewhere, and where.
PLACES = {
    **dict.fromkeys(("array", "chdir", "error", "open_mode", "output", "requeue", "no_requeue"), "that is ours"),
    **dict.fromkeys(("ntasks", "ntasks_per_node", "gpus", "gpus_per_task"), "that is trainer.devices of the run"),
    "nodes": "that is trainer.num_nodes of the run",
    "partition": "that is hydra.launcher.partition",
    "time": "that is hydra.launcher.time",
    "cpus_per_task": "that is hydra.launcher.cpus_per_task",
    "mem": "that is hydra.launcher.memory",
    "signal": "that is hydra.launcher.signal_seconds",
}


@dataclass(frozen=True)
class SlurmSettings:
    """Keys of `hydra/launcher=slurm`; None: Slurm's default. Raises ConfigError for an invalid one.

    partition: one, or several separated by commas. time: limit of a job, in minutes or in Slurm's notation
    (`1-12:00:00`). cpus_per_task: of each process. memory: of each node, in Slurm's notation (`64G`). at_a_time:
    running jobs of one array. signal_seconds: before the time limit, when runs save and are requeued. setup: shell
    commands at the start of every job. sbatch: other options, such as {account: lab, qos: high, constraint: a100}.
    """

    partition: str | None
    time: int | str | None
    cpus_per_task: int | None
    memory: str | int | None
    at_a_time: int | None
    signal_seconds: int
    setup: list[str]
    sbatch: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("cpus_per_task", "at_a_time", "signal_seconds"):
            value = getattr(self, name)
            if (value is not None or name == "signal_seconds") and (type(value) is not int or value < 1):
                raise setting_error(name, value, "must be a positive whole number")
        limit = None if self.time is None else seconds_of(self.time)
        if limit is not None and limit <= self.signal_seconds:
            reason = (
                f"must be longer than hydra.launcher.signal_seconds={self.signal_seconds}, the time to save; raise it"
            )
            raise setting_error("time", self.time, reason)
        for option, value in self.sbatch.items():
            if place := PLACES.get(option.replace("-", "_")):
                raise setting_error(f"sbatch.{option}", value, f"{place}; leave it out")


def seconds_of(time_limit: int | str) -> int:
    """Seconds of a time limit in sbatch's notation: minutes, minutes:seconds, h:m:s, days-h, days-h:m, days-h:m:s."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time_limit))
    if found is None:
        raise setting_error("time", time_limit, "must be minutes, or as Slurm writes it, such as 90, 4:00:00, 1-12")
    days, *parts = (int(part or 0) for part in found.groups())
    hours, minutes, seconds = parts if found[1] or found[4] else (0, *parts[:2])
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True)
class JobInfo:
    """A job as squeue shows it. started_at, ended_at: a time.time(), None if not yet. folder: of its batch script."""

    job_id: str
    state: str
    nodes: str
    reason: str
    started_at: float | None
    ended_at: float | None
    folder: Path


class Watch:
    """The user's jobs, recently ended ones included, and the files beside their scripts.

    One call of squeue every few seconds lists all jobs. If it fails, the last list stands, and that is reported once.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, JobInfo] = {}
        self._files: dict[Path, set[str]] = {}
        self._looked = float("-inf")
        self._fails = False

    def jobs(self) -> dict[str, JobInfo]:
        """The jobs by id; `12_0` is the first of array 12."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
            self._files = {}
            self._looked = time.monotonic()
        return self._jobs

    def fresh_jobs(self) -> dict[str, JobInfo]:
        """The jobs from a new call of squeue. Raises ConfigError if it fails, as jobs might then be submitted twice."""
        self._looked = float("-inf")
        jobs = self.jobs()
        if self._fails:
            raise ConfigError("hydra/launcher=slurm: squeue failed, so running jobs are unknown; try again later")
        return jobs

    def files(self, folder: Path) -> set[str]:
        """The names in a folder. They are listed, since shared file systems cache for long that a file is missing."""
        if folder not in self._files:
            self._files[folder] = set(os.listdir(folder))
        return self._files[folder]

    def expect(self, job_id: str, folder: Path) -> JobInfo:
        """Add a job just submitted, as pending until squeue lists it."""
        self._jobs[job_id] = JobInfo(job_id, "PENDING", "", "", None, None, folder)
        return self._jobs[job_id]

    def _look(self) -> None:
        done = subprocess.run(
            ("squeue", "--me", "--array", "--noheader", "--states=all", f"--format={FIELDS}"),
            capture_output=True,
            text=True,
        )
        if done.returncode and not self._fails:
            print(f"squeue failed, and will be called again: {' '.join(done.stderr.split())}", file=sys.stderr)
        self._fails = done.returncode != 0
        if not self._fails:
            found = [read_job(line) for line in done.stdout.splitlines()]
            self._jobs = {info.job_id: info for info in found}


def read_job(line: str) -> JobInfo:
    """Parse a line of squeue."""
    job_id, state, nodes, reason, start, end, script = line.split("|", maxsplit=len(FIELDS.split("|")) - 1)
    has_started = bool(nodes) and state not in WAITING
    ended_at = read_time(end) if state in ENDED else None
    return JobInfo(
        job_id, state, nodes, reason, read_time(start) if has_started else None, ended_at, Path(script).parent
    )


def read_time(text: str) -> float | None:
    """Parse Slurm's local time to a time.time(); None for `N/A`."""
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) if text[:1].isdigit() else None


def partition_has_gpus(partition: str | None) -> bool:
    """Whether a partition has GPUs. partition: one or several separated by commas; None: the default one."""
    rows = subprocess.run(("sinfo", "--noheader", "--format=%P|%G"), capture_output=True, text=True, check=True)
    wanted = partition or os.environ.get("SBATCH_PARTITION")
    return any(
        re.search(r"\bgpu\b", gres) and (name.rstrip("*") in wanted.split(",") if wanted else name.endswith("*"))
        for name, gres in (line.split("|", maxsplit=1) for line in rows.stdout.splitlines())
    )


def check_installed() -> None:
    """Raise ConfigError unless this machine has Slurm's commands."""
    missing = [name for name in ("sbatch", "squeue", "sinfo") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"hydra/launcher=slurm: this machine has no {missing[0]}; start the command where jobs are submitted"
        )
