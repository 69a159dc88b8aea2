"""Wrappers of Slurm's commands: list the user's jobs, find a partition's GPUs."""

import os
import re
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

    def file(self, suffix: str) -> Path:
        """One of the files that belong to one of our jobs."""
        return self.folder / f"{self.job_id.partition('_')[2]}{suffix}"


class Watch:
    """The user's jobs, recently ended ones included, and the files beside their scripts.

    One call of squeue every few seconds lists all jobs. If it fails, the last list stands, and that is reported once.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, JobInfo] = {}
        self._files: dict[Path, list[str]] = {}
        self._looked = float("-inf")
        self._fails = False

    def jobs(self, fresh: bool = False) -> dict[str, JobInfo]:
        """The jobs by id; `12_0` is the first of array 12.

        fresh: call squeue now, and raise ConfigError if it fails, as jobs might then be submitted twice.
        """
        if not fresh and time.monotonic() - self._looked < LOOK_SECONDS:
            return self._jobs
        squeue = ("squeue", "--me", "--array", "--noheader", "--states=all", f"--format={FIELDS}")
        done = subprocess.run(squeue, capture_output=True, text=True)
        if done.returncode and not self._fails:
            print(f"squeue failed, and will be called again: {' '.join(done.stderr.split())}", file=sys.stderr)
        self._fails = done.returncode != 0
        if not self._fails:
            self._jobs = {info.job_id: info for info in map(read_job, done.stdout.splitlines())}
        self._files = {}
        self._looked = time.monotonic()
        if fresh and self._fails:
            raise ConfigError("hydra/launcher=slurm: squeue failed, so running jobs are unknown; try again later")
        return self._jobs

    def exists(self, file: Path) -> bool:
        """Whether a file exists, by a list of its folder: shared file systems cache for long that a file is missing."""
        if file.parent not in self._files:
            self._files[file.parent] = os.listdir(file.parent)
        return file.name in self._files[file.parent]

    def expect(self, job_id: str, folder: Path) -> JobInfo:
        """Add a job just submitted, as pending until squeue lists it."""
        self._jobs[job_id] = JobInfo(job_id, "PENDING", "", "", None, None, folder)
        return self._jobs[job_id]


def read_job(line: str) -> JobInfo:
    """Parse a line of squeue."""
    job_id, state, nodes, reason, start, end, script = line.split("|", maxsplit=FIELDS.count("|"))
    started_at = read_time(start) if nodes and state not in WAITING else None
    ended_at = read_time(end) if state in ENDED else None
    return JobInfo(job_id, state, nodes, reason, started_at, ended_at, Path(script).parent)


def read_time(text: str) -> float | None:
    """Parse Slurm's local time to a time.time(); None for `N/A`."""
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) if text[:1].isdigit() else None


def partition_has_gpus(partition: str | None, must_answer: bool = True) -> bool:
    """Whether a partition has GPUs. partition: one or several separated by commas; None: the default one.

    must_answer: raise CalledProcessError if the cluster does not answer; else it has none.
    """
    sinfo = ("sinfo", "--noheader", "--format=%P|%G")
    rows = subprocess.run(sinfo, capture_output=True, text=True, check=must_answer)
    wanted = partition or os.environ.get("SBATCH_PARTITION")
    return any(
        re.search(r"\bgpu\b", gres) and (name.rstrip("*") in wanted.split(",") if wanted else name.endswith("*"))
        for name, gres in (line.split("|", maxsplit=1) for line in rows.stdout.splitlines())
    )
