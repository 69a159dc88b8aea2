"""What Slurm's commands do for the launcher: which jobs there are, which partition has GPUs, a new array of jobs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_lab.errors import ConfigError

from .child import Origin, worker_variables
from .slots import RANKS, setting_error

LOOK_SECONDS = 3.0  # between two calls of squeue, however many jobs there are
# Of Slurm's states, those that a job does not leave by itself.
ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
FIELDS = "%i|%T|%N|%r|%S|%e|%o"  # a batch script's path may hold anything, so it is last
WORKER = "llama_lab.launching.slurm_worker"
NEVER = "Requested node configuration is not available"  # a job that asks for it may be accepted, to wait forever
PASSING = {"", "None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit"}  # why jobs wait that begin in the end
# Options of sbatch that have another place, and where that is.
PLACES = {
    **dict.fromkeys(("array", "error", "open_mode", "output", "requeue", "no_requeue"), "that is ours"),
    **dict.fromkeys(("ntasks", "ntasks_per_node", "gpus", "gpus_per_task"), "that is trainer.devices of the run"),
    "nodes": "that is trainer.num_nodes of the run",
    "partition": "that is hydra.launcher.partition",
    "time": "that is hydra.launcher.time",
    "cpus_per_task": "that is hydra.launcher.cpus_per_task",
    "mem": "that is hydra.launcher.memory",
    "signal": "that is hydra.launcher.signal_seconds",
}


@dataclass(frozen=True)
class Settings:
    """Keys of `hydra/launcher=slurm`; None leaves it to Slurm. Raises ConfigError for one that cannot be.

    partition: one, or several with commas. time: of a job, in minutes or as Slurm writes it (`1-12:00:00`).
    cpus_per_task: of each process. memory: of each node, as Slurm writes it (`64G`). at_a_time: jobs of one array.
    signal_seconds: before the end of `time`, when runs save and go back to the queue. setup: lines of shell, in every
    job. sbatch: any other of its options, such as {account: lab, qos: high, constraint: a100}.
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
            raise setting_error(
                "time", self.time, f"leaves nothing before the hydra.launcher.signal_seconds={self.signal_seconds} at "
                f"its end, when runs save; raise it"
            )  # fmt: skip
        for option, value in self.sbatch.items():
            if place := PLACES.get(option.replace("-", "_")):
                raise setting_error(f"sbatch.{option}", value, f"{place}; leave it out")


def seconds_of(time_limit: int | str) -> int:
    """A time limit as sbatch reads it: minutes, minutes:seconds, h:m:s, days-h, days-h:m or days-h:m:s."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time_limit))
    if found is None:
        raise setting_error("time", time_limit, "must be minutes, or as Slurm writes it, such as 90, 4:00:00, 1-12")
    days, *parts = (int(part or 0) for part in found.groups())
    hours, minutes, seconds = parts if found[1] or found[4] else (0, *parts[:2])
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True)
class Shape:
    """What a job takes of the cluster: tasks on each node, a GPU for each if on GPUs."""

    accelerator: str
    devices: int
    nodes: int


@dataclass(frozen=True)
class Seen:
    """A job as squeue shows it. began, ended: a time.time(); None if not yet. folder: of its batch script."""

    job_id: str
    state: str
    nodes: str
    reason: str
    began: float | None
    ended: float | None
    folder: Path


class Watch:
    """The user's jobs, those that have ended lately too, and the files beside their scripts.

    It looks every few seconds, once for all. When squeue fails, the jobs are as they were; that is told once.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Seen] = {}
        self._files: dict[Path, set[str]] = {}
        self._looked = float("-inf")
        self._fails = False

    def jobs(self) -> dict[str, Seen]:
        """By id: `12_0` is the first of array 12."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
            self._files = {}
            self._looked = time.monotonic()
        return self._jobs

    def fresh_jobs(self) -> dict[str, Seen]:
        """As they are now. Raises ConfigError if squeue fails: who submits must know what is there."""
        self._looked = float("-inf")
        jobs = self.jobs()
        if self._fails:
            raise ConfigError("hydra/launcher=slurm: squeue fails, so what runs already is not known; try again later")
        return jobs

    def files(self, folder: Path) -> set[str]:
        """The names in a folder. Listed, since a shared file system may remember for long that a file is missing."""
        if folder not in self._files:
            self._files[folder] = set(os.listdir(folder))
        return self._files[folder]

    def expect(self, job_id: str, folder: Path) -> Seen:
        """A job was submitted; it waits, until squeue says more."""
        self._jobs[job_id] = Seen(job_id, "PENDING", "", "", None, None, folder)
        return self._jobs[job_id]

    def _look(self) -> None:
        """Ask squeue."""
        done = subprocess.run(
            ("squeue", "--me", "--array", "--noheader", "--states=all", f"--format={FIELDS}"),
            capture_output=True,
            text=True,
        )
        if done.returncode and not self._fails:
            print(f"squeue fails, and is asked again: {' '.join(done.stderr.split())}", file=sys.stderr)
        self._fails = done.returncode != 0
        if not self._fails:
            found = [read_job(line) for line in done.stdout.splitlines()]
            self._jobs = {seen.job_id: seen for seen in found}


def read_job(line: str) -> Seen:
    """A line of squeue."""
    job_id, state, nodes, reason, start, end, script = line.split("|", maxsplit=len(FIELDS.split("|")) - 1)
    has_begun = bool(nodes) and state not in WAITING
    ended = read_time(end) if state in ENDED else None
    return Seen(job_id, state, nodes, reason, read_time(start) if has_begun else None, ended, Path(script).parent)


def read_time(text: str) -> float | None:
    """Slurm's local time as a time.time(); None for `N/A`."""
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) if text[:1].isdigit() else None


def partition_has_gpus(partition: str | None) -> bool:
    """Whether the partition (one of several; the default one if None) has GPUs."""
    rows = subprocess.run(("sinfo", "--noheader", "--format=%P|%G"), capture_output=True, text=True, check=True)
    wanted = partition or os.environ.get("SBATCH_PARTITION")
    return any(
        re.search(r"\bgpu\b", gres) and (name.rstrip("*") in wanted.split(",") if wanted else name.endswith("*"))
        for name, gres in (line.split("|", maxsplit=1) for line in rows.stdout.splitlines())
    )


def check_installed() -> None:
    """Raise ConfigError unless submitit and Slurm's commands are here."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ConfigError("hydra/launcher=slurm: needs submitit; pip install 'llama-lab[slurm]'") from None
    missing = [name for name in ("sbatch", "squeue", "sinfo") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"hydra/launcher=slurm: this machine has no {missing[0]}; start the command where jobs are submitted"
        )


def submit(folder: Path, count: int, shape: Shape, settings: Settings) -> str:
    """Submit an array whose task i does what the file `i.task` in `folder` says; its id.

    Raises ConfigError in sbatch's own words.
    """
    script = folder / "batch.sh"
    script.write_text(batch_script(folder, count, shape, settings))
    for option in ("--test-only", "--parsable"):
        done = subprocess.run(("sbatch", option, script), env=submitting(os.environ), capture_output=True, text=True)
        # A trial may also fail for what passes, such as nodes that are down.
        if done.returncode and (option == "--parsable" or NEVER in done.stderr):
            words = ", ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines())
            raise ConfigError(f"hydra/launcher=slurm: sbatch refuses: {words}; see the keys of hydra.launcher")
    return done.stdout.strip().partition(";")[0]  # the cluster's name may follow


def batch_script(folder: Path, count: int, shape: Shape, settings: Settings) -> str:
    """What sbatch reads, as submitit writes it.

    Its executors are not for us: they hand a job its function after sbatch, and a launcher that is killed in between
    would lose the job; and they have handlers of their own for the signals that are the run's.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    exports = [f"export {name}={shlex.quote(value)}" for name, value in worker_variables(folder, Origin.here()).items()]
    ours = {"requeue": True, "output": f"{str(folder).replace('%', '%%')}/%a.log"}
    others = {option.replace("-", "_"): value for option, value in settings.sbatch.items()}
    options: dict[str, Any] = {
        "job_name": "llama-lab",
        "partition": settings.partition,
        "time": settings.time,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.devices,
        "gpus_per_node": shape.devices if shape.accelerator == "gpu" else None,
        "cpus_per_task": settings.cpus_per_task,
        "mem": settings.memory,
        "signal_delay_s": settings.signal_seconds,
        "map_count": count,
        "array_parallelism": settings.at_a_time or count,
        "wckey": None,
        "setup": [*exports, *settings.setup],
        "use_srun": False,  # `command` does, so that the output of all ranks goes where the job's does
        "stderr_to_stdout": True,
    }
    return _make_sbatch_string(command(settings), folder, **options, additional_parameters={**ours, **others})


def command(settings: Settings) -> str:
    """The line of the batch script that starts all ranks. One that dies takes the others along: they would wait.

    Without `--unbuffered`, which would give them a terminal: Python is told by the environment.
    """
    cpus = [] if settings.cpus_per_task is None else [f"--cpus-per-task={settings.cpus_per_task}"]
    return shlex.join(["srun", "--kill-on-bad-exit=1", *cpus, sys.executable, "-m", WORKER, *sys.argv[1:]])


def submitting(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch: without what would tell its jobs that they are a part of this process's own."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not (name in RANKS or name.startswith(("SLURM_", "SRUN_", "TORCHELASTIC_")))
    }
