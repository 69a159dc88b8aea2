"""The engine of `hydra/launcher=slurm`: the runs of a sweep as arrays of Slurm jobs, which outlive the launcher.

Every array has a folder, `<runs_dir>/.slurm/<name>/`, made before it is submitted: the batch script, and for its job i
`i.task`, what to do, `i.log`, a link to the output in the run's folder, and in the end `i.result`. Since squeue shows
the script's path, the same command finds its jobs again, whatever became of the first launcher.
"""

import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hydra.core.utils import JobStatus
from omegaconf import DictConfig

from llama_lab.devices.hardware import Hardware, hardware_elsewhere
from llama_lab.errors import ConfigError
from llama_lab.runs import environment
from llama_lab.runs.folder import CHANGEABLE, OUTPUT, changes, settled
from llama_lab.study.design.parsing import run_config

from .engine import Engine, Execution
from .jobs import Job
from .slurm_cluster import ENDED, PASSING, Seen, Settings, Shape, Watch, check_installed, partition_has_gpus, submit
from .task import Task, result_file

ARRAYS = ".slurm"  # below runs_dir
GRACE_SECONDS = 10.0  # in which a result may still travel through a shared file system
REMEDIES = {"TIMEOUT": "hydra.launcher.time or signal_seconds", "OUT_OF_MEMORY": "hydra.launcher.memory"}


class SlurmJob(Execution):
    """A run in Slurm's queue, or on its nodes."""

    def __init__(self, job: Job, seen: Seen, watch: Watch) -> None:
        super().__init__(job)
        self._result = result_file(task_file(seen))
        self._watch = watch
        self._last_seen = seen
        self._over_since: float | None = None

    @property
    def seen(self) -> Seen:
        """The job as Slurm shows it, or as it showed it last."""
        self._last_seen = self._watch.jobs().get(self._last_seen.job_id, self._last_seen)
        return self._last_seen

    @property
    def place(self) -> str:
        """Its nodes, and its id for scancel."""
        return f"{self.seen.nodes} (job {self.seen.job_id})"

    @property
    def began(self) -> float | None:
        """When Slurm started it, for the last time if it was requeued."""
        return self.seen.began

    @property
    def seconds(self) -> float:
        """Since then, until it ended."""
        seen = self.seen
        return 0.0 if seen.began is None else max(0.0, (seen.ended or time.time()) - seen.began)

    def has_ended(self) -> bool:
        """Whether there is a result, or no job any more that could write one.

        Of a run that crashed, srun may bring the last lines after the result: they are there once its job is over.
        """
        is_over = self.seen.state in ENDED or self.seen.job_id not in self._watch.jobs()
        returned = self.returned()
        if returned is not None and (is_over or returned[0] != JobStatus.FAILED):
            return True
        if not is_over and returned is None:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()
        return self._over_since is not None and time.monotonic() - self._over_since >= GRACE_SECONDS

    def _has_result(self) -> bool:
        """Whether the run has left one."""
        return self._result.name in self._watch.files(self._result.parent)

    def interrupt(self) -> None:
        """Have it save and stop."""
        self._cancel("--signal=TERM")

    def kill(self) -> None:
        """Cancel the job."""
        self._cancel()

    def _cancel(self, *options: str) -> None:
        """Ask scancel."""
        subprocess.run(("scancel", *options, self.seen.job_id), check=True)

    @property
    def was_stopped(self) -> bool:
        """Whether it was cancelled, preempted for good, or ended by itself without a result, after a signal."""
        return not self._has_result() and self.seen.state in ("CANCELLED", "PREEMPTED", "COMPLETED")

    def returned(self) -> tuple[JobStatus, Any] | None:
        """What the first rank has written."""
        return pickle.loads(self._result.read_bytes()) if self._has_result() else None

    def how_it_ended(self) -> str:
        """As Slurm calls it."""
        seen = self.seen
        if seen.state not in ENDED:
            return f"Slurm has forgotten its job {seen.job_id}"
        advice = f"; raise {REMEDIES[seen.state]}" if seen.state in REMEDIES else ""
        return f"its job {seen.job_id} ended as {seen.state}{advice}"


class Slurm(Engine):
    """A Slurm cluster, as seen from a machine where jobs are submitted."""

    def __init__(self, settings: Settings) -> None:
        check_installed()
        self._settings = settings
        self._watch = Watch()
        self._waited_for: list[SlurmJob] = []
        self._told: set[str] = set()
        self._warned = False

    @property
    def places(self) -> str:
        """The partition."""
        return f"Slurm, partition {self._settings.partition or 'by default'}"

    @property
    def width(self) -> None:
        """That is Slurm's to say."""
        return None

    def settle(self, overrides: list[str]) -> list[str]:
        """They stay; a job is told its share of the cluster when it is submitted."""
        return overrides

    def hardware(self, trainer: DictConfig) -> Hardware:
        """What the job asks Slurm for; the nodes have the last word on its precision. Raises ConfigError."""
        for key in ("devices", "num_nodes"):
            if trainer[key] == -1:
                raise ConfigError(f"trainer.{key}=-1: hydra/launcher=slurm needs a number, of each run")
        accelerator = self._accelerator if trainer.accelerator == "auto" else trainer.accelerator
        if accelerator not in ("cpu", "gpu"):
            raise ConfigError(f"trainer.accelerator={accelerator}: hydra/launcher=slurm knows auto, gpu and cpu")
        return hardware_elsewhere(trainer, accelerator)

    @cached_property
    def _accelerator(self) -> str:
        """The partition's best."""
        return "gpu" if partition_has_gpus(self._settings.partition) else "cpu"

    def start(self, ready: list[Job], running: Sequence[Execution], more: bool) -> list[Execution]:
        """Once all jobs are planned, attach to those that Slurm has already, and submit an array of each shape.

        Raises ConfigError if squeue fails, sbatch refuses, or a job there trains something else in a run's folder.
        """
        self._tell_reasons()
        if more or not ready:
            return []
        taken = {execution.job.run.folder.path for execution in running}
        chosen = {job.run.folder.path: job for job in reversed(ready) if job.run.folder.path not in taken}
        jobs = sorted(chosen.values(), key=lambda job: job.index)
        started = self._attach(jobs)
        attached = {execution.job.index for execution in started}
        rest = sorted((job for job in jobs if job.index not in attached), key=shape_of)
        for shape, same in groupby(rest, shape_of):
            started += self._submit(Shape(*shape), list(same))
        self._waited_for += started
        ready[:] = [job for job in ready if all(job is not execution.job for execution in started)]
        return list(started)

    def _tell_reasons(self) -> None:
        """Say once why jobs wait, if it is not for their turn."""
        for seen in (job.seen for job in self._waited_for):
            if seen.state == "PENDING" and seen.reason not in PASSING and seen.reason not in self._told:
                self._told.add(seen.reason)
                print(f"job {seen.job_id} waits, Slurm says: {seen.reason}", flush=True)

    def _attach(self, jobs: Sequence[Job]) -> list[SlurmJob]:
        """Those that another launcher has submitted."""
        there: dict[Path, Seen] = {}
        for seen in self._watch.fresh_jobs().values():
            file = task_file(seen)
            output = file.with_suffix(".log")
            is_ours = seen.folder.parent.name == ARRAYS and output.is_symlink()
            if is_ours and seen.state not in ENDED and not result_file(file).exists():
                there[output.readlink().parent] = seen
        attached: list[SlurmJob] = []
        for job in jobs:
            found = there.get(job.run.folder.path.absolute())
            if found is not None:
                check_same(job, found)
                attached.append(SlurmJob(job, found, self._watch))
        if attached:
            print(f"{len(attached)} runs are in Slurm's queue, or at work: waiting for those", flush=True)
        return attached

    def _submit(self, shape: Shape, jobs: Sequence[Job]) -> list[SlurmJob]:
        """A new array."""
        self._warn_if_dirty()
        arrays = Path(jobs[0].run.cfg.runs_dir).absolute() / ARRAYS
        arrays.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=time.strftime("%m%d-%H%M-"), dir=arrays))
        for number, job in enumerate(jobs):
            file = folder / f"{number}.task"
            replace(job.task, config=with_shape(job.config, shape)).save(file)
            output = job.run.folder.path.absolute() / OUTPUT
            output.parent.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".log").symlink_to(output)
        try:
            array = submit(folder, len(jobs), shape, self._settings)
        except ConfigError:
            shutil.rmtree(folder)
            raise
        waiting = [self._watch.expect(f"{array}_{number}", folder) for number in range(len(jobs))]
        tasks = f"{shape.nodes} x {shape.devices} {shape.accelerator}"
        print(f"submitted job {array}: {len(jobs)} runs, each on {tasks}; scancel {array} would end it", flush=True)
        return [SlurmJob(job, seen, self._watch) for job, seen in zip(jobs, waiting, strict=True)]

    def _warn_if_dirty(self) -> None:
        """Jobs import the program as it is when they begin, which may be days from now."""
        git = None if self._warned else environment.git_state(Path(environment.__file__).parent)
        self._warned = True
        if git and git["dirty"]:
            print(
                "warning: the source tree has uncommitted changes, and jobs that wait import it as it is then",
                file=sys.stderr,
            )

    def stop(self, running: Sequence[Execution]) -> None:
        """The user does not want to wait; the jobs stay."""
        raise KeyboardInterrupt

    def close(self, running: Sequence[Execution]) -> None:
        """Tell of the jobs that stay, and clear away the arrays of which none does."""
        left = [job for job in self._waited_for if job in running]
        if left:
            arrays = " ".join(sorted({job.seen.job_id.partition("_")[0] for job in left}, key=int))
            print(
                f"{len(left)} runs stay in Slurm; the same command waits for them, scancel {arrays} ends them",
                flush=True,
            )
        ended = {job.seen.job_id for job in self._waited_for if job not in left}
        live = [seen for seen in self._watch.jobs().values() if seen.state not in ENDED and seen.job_id not in ended]
        for folder in {job.seen.folder for job in self._waited_for} - {seen.folder for seen in live}:
            shutil.rmtree(folder)


def shape_of(job: Job) -> tuple[str, int, int]:
    """What a job takes of the cluster, see `Shape`."""
    hardware = job.run.hardware
    return hardware.accelerator, hardware.devices, hardware.num_nodes


def with_shape(config: DictConfig, shape: Shape) -> DictConfig:
    """A job's config with nothing left to what its nodes have."""
    config = config.copy()
    config.trainer.accelerator = shape.accelerator
    config.trainer.devices = shape.devices
    config.trainer.num_nodes = shape.nodes
    return config


def task_file(seen: Seen) -> Path:
    """Where the task of a job is, if it is one of ours."""
    return seen.folder / f"{seen.job_id.partition('_')[2]}.task"


def check_same(job: Job, seen: Seen) -> None:
    """Raise ConfigError if the job in Slurm trains with other settings than those asked for now."""
    theirs, _ = run_config(Task.load(task_file(seen)).config.copy(), {})
    changed = changes(settled(theirs), settled(job.run.cfg), CHANGEABLE)
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"{key}={new}: job {seen.job_id} trains in {job.run.folder.path} with {key}={old}; give the same settings, "
            f"choose another name, or scancel {seen.job_id}"
        )
