"""The engine of `hydra/launcher=slurm`: the runs of a sweep as arrays of Slurm jobs, which outlive the launcher.

Every array has a folder, `<runs_dir>/.slurm/<name>/`, made before it is submitted. It holds the batch script and, for
job i, `i.yaml` (the run's config), `i.log` (a link to the output in the run's folder) and what the script writes:
`i.started` and finally `i.exit`, see `slurm_script.py`. Since squeue prints the script's path, the same command finds
its jobs again after the first launcher is gone.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.schema import CHANGEABLE
from llama_lab.config.trust import stored_settings
from llama_lab.devices.site import Site
from llama_lab.runs.folder import changes, resolved, write_yaml
from llama_lab.util.errors import INTERRUPTED, ConfigError

from .engine import Engine, QueuedRun
from .settings import SlurmSettings
from .slurm_script import batch_script, submit

ARRAYS = ".slurm"  # below runs_dir
GRACE_SECONDS = 10.0  # for a file to appear on a shared file system
REMEDIES = {"TIMEOUT": "hydra.launcher.time or signal_seconds", "OUT_OF_MEMORY": "hydra.launcher.memory"}
PASSING = {"", "None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit"}  # reasons to wait that end by itself
LOOK_SECONDS = 3.0  # between two calls of squeue, for any number of jobs
# Slurm's final states.
ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"),
    *("BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
FIELDS = "%i|%T|%r|%o"  # last the batch script's path, which may hold any character


@dataclass(frozen=True)
class JobInfo:
    """A job as squeue shows it. reason: why it waits. folder: of its batch script."""

    job_id: str
    state: str
    reason: str
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
            self._files[file.parent] = os.listdir(file.parent) if file.parent.exists() else []
        return file.name in self._files[file.parent]

    def expect(self, job_id: str, folder: Path) -> JobInfo:
        """Add a job just submitted, as pending until squeue lists it."""
        self._jobs[job_id] = JobInfo(job_id, "PENDING", "", folder)
        return self._jobs[job_id]


def read_job(line: str) -> JobInfo:
    """Parse a line of squeue."""
    job_id, state, reason, script = line.split("|", maxsplit=FIELDS.count("|"))
    return JobInfo(job_id, state, reason, Path(script).parent)


def partition_has_gpus(partition: str | None, must_answer: bool = True) -> bool:
    """Whether a partition has GPUs. partition: one or several separated by commas; None: the default one.

    must_answer: raise ConfigError if the cluster does not answer; else it has none.
    """
    sinfo = ("sinfo", "--noheader", "--format=%P|%G")
    rows = subprocess.run(sinfo, capture_output=True, text=True)
    if rows.returncode and must_answer:
        problem = f"sinfo failed, {' '.join(rows.stderr.split())}"
        raise ConfigError(f"hydra/launcher=slurm: {problem}; try again later")
    wanted = partition or os.environ.get("SBATCH_PARTITION")
    return any(
        re.search(r"\bgpu\b", gres) and (name.rstrip("*") in wanted.split(",") if wanted else name.endswith("*"))
        for name, gres in (line.split("|", maxsplit=1) for line in rows.stdout.splitlines())
    )


class SlurmEngine(Engine):
    """A Slurm cluster, on a machine where jobs can be submitted. config: of the command.

    Raises ConfigError without Slurm's commands, unless scripts are only to be printed.
    """

    def __init__(self, settings: SlurmSettings, config: DictConfig) -> None:
        prints = bool(OmegaConf.select(config, "study.dry_run"))
        missing = [name for name in ("sbatch", "squeue", "sinfo") if shutil.which(name) is None]
        if missing and not prints:
            raise ConfigError(
                f"hydra/launcher=slurm: this machine has no {missing[0]}; start the command where jobs are submitted"
            )
        has_gpus = "sinfo" not in missing and partition_has_gpus(settings.partition, must_answer=not prints)
        accelerators = ("gpu", "cpu") if has_gpus else ("cpu", "gpu")  # the first is for `auto`
        self.site = Site("slurm", accelerators, elsewhere=True)
        self._settings = settings
        self._watch = Watch()
        self._infos: dict[QueuedRun, JobInfo] = {}  # of all started runs, as squeue shows them, or showed them last
        self._over_since: dict[QueuedRun, float] = {}
        self._reported: set[str] = set()

    def open(self) -> str:
        """The partition; nothing needs to be acquired."""
        return f"Slurm, partition {self._settings.partition or 'by default'}"

    def start(self, ready: Sequence[QueuedRun], running: Sequence[QueuedRun], more: bool) -> Sequence[QueuedRun]:
        """Once all runs are ready, attach to those that are in Slurm already, and submit an array for each shape.

        Raises ConfigError if squeue fails, sbatch refuses, or a job in Slurm trains something else in a run's folder.
        """
        self._report_reasons(running)
        if more or not ready:
            return []
        self._attach(ready)
        for same in by_shape([queued for queued in ready if queued not in self._infos]):
            self._submit(same)
        return ready

    def _report_reasons(self, running: Sequence[QueuedRun]) -> None:
        """Print once why jobs wait, unless they wait for their turn."""
        for info in (self._infos[queued] for queued in running):
            if info.state == "PENDING" and info.reason not in PASSING | self._reported:
                self._reported.add(info.reason)
                print(f"job {info.job_id} waits, Slurm says: {info.reason}", flush=True)

    def _attach(self, ready: Sequence[QueuedRun]) -> None:
        """Attach to the jobs of runs that another launcher submitted."""
        there: dict[Path, JobInfo] = {}
        for info in self._watch.jobs(fresh=True).values():
            output = info.file(".log")
            is_ours = info.folder.parent.name == ARRAYS and output.is_symlink()
            if is_ours and info.state not in ENDED and not info.file(".exit").exists():
                there[output.readlink().parent] = info
        attached = {queued: there[queued.folder] for queued in ready if queued.folder in there}
        for queued, info in attached.items():
            queued.open_output()
            check_same(queued, info)
        if attached:
            print(f"{len(attached)} runs are in Slurm's queue, or at work: waiting for those", flush=True)
        self._infos |= attached

    def _submit(self, same: Sequence[QueuedRun]) -> None:
        """Submit runs of one shape as an array of jobs."""
        arrays = arrays_of(same)
        arrays.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=time.strftime("%m%d-%H%M-"), dir=arrays))
        for number, queued in enumerate(same):
            write_yaml(resolved(queued.run.cfg), folder / f"{number}.yaml")
            (folder / f"{number}.log").symlink_to(queued.open_output())
        try:
            array = submit(folder, same, self._settings)
        except ConfigError:
            shutil.rmtree(folder)
            raise
        accelerator, devices, nodes = shape_of(same[0])
        print(
            f"submitted job {array}: {len(same)} runs, each on {nodes} x {devices} {accelerator}; "
            f"scancel {array} would end it",
            flush=True,
        )
        for number, queued in enumerate(same):
            self._infos[queued] = self._watch.expect(f"{array}_{number}", folder)

    def poll(self, queued: QueuedRun) -> int | str | None:
        """The exit status that the batch script wrote; without one, the final state of the job."""
        jobs = self._watch.jobs()
        job_id = self._infos[queued].job_id
        info = self._infos[queued] = jobs.get(job_id, self._infos[queued])
        queued.place = None
        has_ended = self._watch.exists(exit_file := info.file(".exit"))
        if info.state not in WAITING and self._watch.exists(started := info.file(".started")):
            started_at = started.stat().st_mtime
            seconds = max(0.0, (exit_file.stat().st_mtime if has_ended else time.time()) - started_at)
            place = f"{started.read_text().strip()} (job {job_id})"  # with the id for scancel
            queued.start(place, started_at, seconds)
        if has_ended:
            return int(exit_file.read_text())
        if info.state not in ENDED and job_id in jobs:
            self._over_since.pop(queued, None)
            return None
        if time.monotonic() - self._over_since.setdefault(queued, time.monotonic()) < GRACE_SECONDS:
            return None
        if info.state == "COMPLETED" and not info.folder.exists():
            return 0  # another launcher that waited for it, too, has read how it ended, and deleted that
        if info.state in ("CANCELLED", "PREEMPTED", "COMPLETED"):
            return INTERRUPTED
        if info.state not in ENDED:
            return f"its job {job_id} is no longer in Slurm"
        advice = f"; raise {REMEDIES[info.state]}" if info.state in REMEDIES else ""
        return f"its job {job_id} ended as {info.state}{advice}"

    def stop(self, running: Sequence[QueuedRun]) -> None:
        """Stop waiting; the jobs stay."""
        raise KeyboardInterrupt

    def close(self, running: Sequence[QueuedRun]) -> None:
        """Print which jobs stay, and delete the folders of arrays that have ended."""
        if running:
            arrays = {self._infos[queued].job_id.partition("_")[0] for queued in running}
            waiting = f"{len(running)} runs stay in Slurm; the same command waits for them"
            print(f"{waiting}, scancel {' '.join(sorted(arrays, key=int))} ends them", flush=True)
        ended = {info.job_id for queued, info in self._infos.items() if queued not in running}
        live = [info for info in self._watch.jobs().values() if info.state not in ENDED and info.job_id not in ended]
        for folder in {info.folder for info in self._infos.values()} - {info.folder for info in live}:
            if folder.exists():
                shutil.rmtree(folder)


def print_scripts(runs: Sequence[QueuedRun], settings: SlurmSettings) -> None:
    """Print the batch scripts that would train the runs, to be submitted by hand."""
    for number, same in enumerate(by_shape(runs)):
        folder = arrays_of(runs) / f"{time.strftime('%m%d-%H%M')}-printed-{number}"
        print(batch_script(folder, same, settings))


def arrays_of(runs: Sequence[QueuedRun]) -> Path:
    """The folder of the arrays of runs, which have one runs_dir."""
    return Path(runs[0].run.cfg.runs_dir).absolute() / ARRAYS


def shape_of(queued: QueuedRun) -> tuple[str, int, int]:
    """What a run requests: its accelerator, devices per node, and nodes."""
    hardware = queued.run.hardware
    return hardware.accelerator, hardware.devices, hardware.num_nodes


def by_shape(runs: Sequence[QueuedRun]) -> Iterator[list[QueuedRun]]:
    """The runs that can share an array."""
    return (list(same) for _, same in groupby(sorted(runs, key=shape_of), shape_of))


def check_same(queued: QueuedRun, info: JobInfo) -> None:
    """Raise ConfigError if the job in Slurm trains with other settings than `queued`."""
    changed = changes(stored_settings(info.file(".yaml")), resolved(queued.run.cfg), CHANGEABLE)
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"{key}={new}: job {info.job_id} trains in {queued.run.folder.path} with {key}={old}; give the same "
            f"settings, choose another name, or scancel {info.job_id}"
        )
