"""The engine of `hydra/launcher=slurm`: the runs of a sweep as arrays of Slurm jobs, which outlive the launcher.

Every array has a folder, `<runs_dir>/.slurm/<name>/`, made before it is submitted. It holds the batch script and, for
job i, `i.task`, `i.log` (a link to the output in the run's folder) and finally `i.result`. Since squeue prints the
script's path, the same command finds its jobs again after the first launcher is gone.
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
from llama_lab.study.design.command import run_config

from .engine import Engine, SubmittedRun
from .slurm_cluster import (
    ENDED,
    PASSING,
    JobInfo,
    Shape,
    SlurmSettings,
    Watch,
    check_installed,
    partition_has_gpus,
    submit,
)
from .sweep import Job
from .task import Task, result_file

ARRAYS = ".slurm"  # below runs_dir
GRACE_SECONDS = 10.0  # for a result to appear on a shared file system
REMEDIES = {"TIMEOUT": "hydra.launcher.time or signal_seconds", "OUT_OF_MEMORY": "hydra.launcher.memory"}


class SlurmRun(SubmittedRun):
    """A run as a job of a Slurm array, waiting or running."""

    def __init__(self, job: Job, info: JobInfo, watch: Watch) -> None:
        super().__init__(job)
        self._result = result_file(task_file(info))
        self._watch = watch
        self._info = info
        self._over_since: float | None = None

    @property
    def info(self) -> JobInfo:
        """The job as squeue shows it, or showed it last."""
        self._info = self._watch.jobs().get(self._info.job_id, self._info)
        return self._info

    @property
    def place(self) -> str:
        """The job's nodes, and its id for scancel."""
        return f"{self.info.nodes} (job {self.info.job_id})"

    @property
    def started_at(self) -> float | None:
        """When Slurm last started the job, as a time.time(); None while it waits."""
        return self.info.started_at

    @property
    def seconds(self) -> float:
        """Seconds from `started_at` until the job ended, or until now."""
        info = self.info
        return 0.0 if info.started_at is None else max(0.0, (info.ended_at or time.time()) - info.started_at)

    def has_ended(self) -> bool:
        """Whether there is a result, or the job has ended without one.

        A crashed run has ended when its job has: srun may deliver its last lines of output after the result.
        """
        is_over = self.info.state in ENDED or self.info.job_id not in self._watch.jobs()
        result = self.read_result()
        if result is not None and (is_over or result[0] != JobStatus.FAILED):
            return True
        if not is_over and result is None:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()
        return self._over_since is not None and time.monotonic() - self._over_since >= GRACE_SECONDS

    def _has_result(self) -> bool:
        return self._result.name in self._watch.files(self._result.parent)

    def interrupt(self) -> None:
        """Send TERM, on which the run saves and stops."""
        self._cancel("--signal=TERM")

    def kill(self) -> None:
        """Cancel the job."""
        self._cancel()

    def _cancel(self, *options: str) -> None:
        subprocess.run(("scancel", *options, self.info.job_id), check=True)

    @property
    def was_stopped(self) -> bool:
        """Whether the job was cancelled, was preempted, or exited without a result, as after a signal."""
        return not self._has_result() and self.info.state in ("CANCELLED", "PREEMPTED", "COMPLETED")

    def read_result(self) -> tuple[JobStatus, Any] | None:
        """The result that the first rank wrote."""
        return pickle.loads(self._result.read_bytes()) if self._has_result() else None

    def exit_reason(self) -> str:
        """The job's final state."""
        info = self.info
        if info.state not in ENDED:
            return f"its job {info.job_id} is no longer in Slurm"
        advice = f"; raise {REMEDIES[info.state]}" if info.state in REMEDIES else ""
        return f"its job {info.job_id} ended as {info.state}{advice}"


class SlurmEngine(Engine):
    """A Slurm cluster, on a machine where jobs can be submitted."""

    def __init__(self, settings: SlurmSettings) -> None:
        check_installed()
        self._settings = settings
        self._watch = Watch()
        self._submitted: list[SlurmRun] = []
        self._reported: set[str] = set()
        self._warned = False

    @property
    def description(self) -> str:
        """The partition."""
        return f"Slurm, partition {self._settings.partition or 'by default'}"

    @property
    def max_parallel(self) -> None:
        """Slurm decides."""

    def complete_overrides(self, overrides: list[str]) -> list[str]:
        """Leave them as they are; a job's devices are set when it is submitted."""
        return overrides

    def hardware(self, trainer: DictConfig) -> Hardware:
        """The hardware that a job requests. Raises ConfigError unless its size is known in advance."""
        for key in ("devices", "num_nodes"):
            if trainer[key] == -1:
                raise ConfigError(f"trainer.{key}=-1: hydra/launcher=slurm needs a number per run")
        accelerator = self._accelerator if trainer.accelerator == "auto" else trainer.accelerator
        if accelerator not in ("cpu", "gpu"):
            raise ConfigError(f"trainer.accelerator={accelerator}: hydra/launcher=slurm supports auto, gpu and cpu")
        return hardware_elsewhere(trainer, accelerator)

    @cached_property
    def _accelerator(self) -> str:
        return "gpu" if partition_has_gpus(self._settings.partition) else "cpu"

    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Once all jobs are ready, attach to those that are in Slurm already, and submit an array for each shape.

        Raises ConfigError if squeue fails, sbatch refuses, or a job in Slurm trains something else in a run's folder.
        """
        self._report_reasons()
        if more or not ready:
            return []
        taken = {submitted.job.run.folder.path for submitted in running}
        chosen = {job.run.folder.path: job for job in reversed(ready) if job.run.folder.path not in taken}
        jobs = sorted(chosen.values(), key=lambda job: job.index)
        started = self._attach(jobs)
        attached = {submitted.job.index for submitted in started}
        rest = sorted((job for job in jobs if job.index not in attached), key=shape_of)
        for shape, same in groupby(rest, shape_of):
            started += self._submit(shape, list(same))
        self._submitted += started
        ready[:] = [job for job in ready if all(job is not submitted.job for submitted in started)]
        return list(started)

    def _report_reasons(self) -> None:
        """Print once why jobs wait, unless they wait for their turn."""
        for info in (job.info for job in self._submitted):
            if info.state == "PENDING" and info.reason not in PASSING and info.reason not in self._reported:
                self._reported.add(info.reason)
                print(f"job {info.job_id} waits, Slurm says: {info.reason}", flush=True)

    def _attach(self, jobs: Sequence[Job]) -> list[SlurmRun]:
        """Attach to jobs that another launcher submitted."""
        there: dict[Path, JobInfo] = {}
        for info in self._watch.fresh_jobs().values():
            file = task_file(info)
            output = file.with_suffix(".log")
            is_ours = info.folder.parent.name == ARRAYS and output.is_symlink()
            if is_ours and info.state not in ENDED and not result_file(file).exists():
                there[output.readlink().parent] = info
        attached: list[SlurmRun] = []
        for job in jobs:
            found = there.get(job.run.folder.path.absolute())
            if found is not None:
                check_same(job, found)
                attached.append(SlurmRun(job, found, self._watch))
        if attached:
            print(f"{len(attached)} runs are in Slurm's queue, or at work: waiting for those", flush=True)
        return attached

    def _submit(self, shape: Shape, jobs: Sequence[Job]) -> list[SlurmRun]:
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
        return [SlurmRun(job, info, self._watch) for job, info in zip(jobs, waiting, strict=True)]

    def _warn_if_dirty(self) -> None:
        """Warn once if the source tree is dirty: jobs import it when they start, which may be days from now."""
        git = None if self._warned else environment.git_state(Path(environment.__file__).parent)
        self._warned = True
        if git and git["dirty"]:
            print(
                "warning: the source tree has uncommitted changes, and jobs that wait import it as it is then",
                file=sys.stderr,
            )

    def stop(self, running: Sequence[SubmittedRun]) -> None:
        """Stop waiting; the jobs stay."""
        raise KeyboardInterrupt

    def close(self, running: Sequence[SubmittedRun]) -> None:
        """Print which jobs stay, and delete the folders of arrays that have ended."""
        left = [job for job in self._submitted if job in running]
        if left:
            arrays = " ".join(sorted({job.info.job_id.partition("_")[0] for job in left}, key=int))
            print(
                f"{len(left)} runs stay in Slurm; the same command waits for them, scancel {arrays} ends them",
                flush=True,
            )
        ended = {job.info.job_id for job in self._submitted if job not in left}
        live = [info for info in self._watch.jobs().values() if info.state not in ENDED and info.job_id not in ended]
        for folder in {job.info.folder for job in self._submitted} - {info.folder for info in live}:
            shutil.rmtree(folder)


def shape_of(job: Job) -> Shape:
    """What a job requests."""
    hardware = job.run.hardware
    return Shape(hardware.accelerator, hardware.devices, hardware.num_nodes)


def with_shape(config: DictConfig, shape: Shape) -> DictConfig:
    """A job's config with the devices of `shape` in place of `auto`."""
    config = config.copy()
    config.trainer.accelerator = shape.accelerator
    config.trainer.devices = shape.devices
    config.trainer.num_nodes = shape.nodes
    return config


def task_file(info: JobInfo) -> Path:
    """The task file of one of our jobs."""
    return info.folder / f"{info.job_id.partition('_')[2]}.task"


def check_same(job: Job, info: JobInfo) -> None:
    """Raise ConfigError if the job in Slurm trains with other settings than `job`."""
    theirs, _ = run_config(Task.load(task_file(info)).config.copy(), {})
    changed = changes(settled(theirs), settled(job.run.cfg), CHANGEABLE)
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"{key}={new}: job {info.job_id} trains in {job.run.folder.path} with {key}={old}; give the same settings, "
            f"choose another name, or scancel {info.job_id}"
        )
