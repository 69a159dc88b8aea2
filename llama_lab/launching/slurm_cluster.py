"""Wrappers of Slurm's commands: list the user's jobs, find a partition's GPUs."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from llama_lab.util.errors import ConfigError

LOOK_SECONDS = 3.0  # between two calls of squeue, for any number of jobs
# Slurm's final states.
ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
FIELDS = "%i|%T|%N|%r|%S|%e|%o"  # last the batch script's path, which may hold any character


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

    @property
    def array(self) -> str:
        """The id of its array."""
        return self.job_id.partition("_")[0]

    def file(self, suffix: str) -> Path:
        """One of the files that belong to one of our jobs."""
        return self.folder / f"{self.job_id.partition('_')[2]}{suffix}"


class Watch:
    """The user's jobs, recently ended ones included, and the files beside their scripts.

    One call of squeue every few seconds lists all jobs. If it fails, the last list stands, and that is reported once.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, JobInfo] = {}
        self._files: dict[Path, set[str]] = {}
        self._looked = float("-inf")
        self._fails = False

    def jobs(self, fresh: bool = False) -> dict[str, JobInfo]:
        """The jobs by id; `12_0` is the first of array 12.

        fresh: call squeue now, and raise ConfigError if it fails, as jobs might then be submitted twice.
        """
        if fresh or time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
            self._files = {}
            self._looked = time.monotonic()
        if fresh and self._fails:
            raise ConfigError("hydra/launcher=slurm: squeue failed, so running jobs are unknown; try again later")
        return self._jobs

    def exists(self, file: Path) -> bool:
        """Whether a file exists, by a list of its folder: shared file systems cache for long that a file is missing."""
        if file.parent not in self._files:
            self._files[file.parent] = set(os.listdir(file.parent))
        return file.name in self._files[file.parent]

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
    job_id, state, nodes, reason, start, end, script = line.split("|", maxsplit=FIELDS.count("|"))
    started_at = read_time(start) if nodes and state not in WAITING else None
    ended_at = read_time(end) if state in ENDED else None
    return JobInfo(job_id, state, nodes, reason, started_at, ended_at, Path(script).parent)


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
