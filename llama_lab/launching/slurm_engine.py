"""The engine of `hydra/launcher=slurm`: the runs of a sweep as arrays of Slurm jobs, which outlive the launcher.

Every array has a folder, `<runs_dir>/.slurm/<name>/`, made before it is submitted. It holds the batch script and, for
job i, `i.yaml` (the run's config), `i.log` (a link to the output in the run's folder) and finally `i.exit`, see
`slurm_script.py`. Since squeue prints the script's path, the same command finds its jobs again after the first launcher
is gone.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp

from omegaconf import OmegaConf

from llama_lab.config.trust import stored_config
from llama_lab.devices.site import Site
from llama_lab.errors import INTERRUPTED, ConfigError
from llama_lab.runs import environment
from llama_lab.runs.folder import CHANGEABLE, OUTPUT, changes, resolved, write_yaml

from .engine import Engine, Job, Session, SubmittedRun, startable
from .slurm_cluster import ENDED, PASSING, JobInfo, SlurmSettings, Watch, check_installed, partition_has_gpus
from .slurm_script import ScriptedRun, Shape, submit

ARRAYS = ".slurm"  # below runs_dir
GRACE_SECONDS = 10.0  # for a file to appear on a shared file system
REMEDIES = {"TIMEOUT": "hydra.launcher.time or signal_seconds", "OUT_OF_MEMORY": "hydra.launcher.memory"}


class SlurmRun(SubmittedRun):
    """A run as a job of a Slurm array, waiting or running."""

    def __init__(self, job: Job, info: JobInfo, watch: Watch) -> None:
        super().__init__(job)
        self._exit_file = files(info).with_suffix(".exit")
        self._watch = watch
        self._info = info
        self._over_since: float | None = None

    @property
    def info(self) -> JobInfo:
        """The job as squeue shows it, or showed it last."""
        self._info = self._watch.jobs().get(self._info.job_id, self._info)
        return self._info

    @property
    def session(self) -> Session | None:
        """As Slurm shows it; the place has the job's id, for scancel."""
        info = self.info
        if info.started_at is None:
            return None
        seconds = max(0.0, (info.ended_at or time.time()) - info.started_at)
        return Session(f"{info.nodes} (job {info.job_id})", info.started_at, seconds)

    @property
    def exit_status(self) -> int | str | None:
        """The exit status that the batch script wrote; without one, the final state of the job."""
        info = self.info
        if self._exit_file.name in self._watch.files(self._exit_file.parent):
            return int(self._exit_file.read_text())
        is_over = info.state in ENDED or info.job_id not in self._watch.jobs()
        self._over_since = (self._over_since or time.monotonic()) if is_over else None
        if self._over_since is None or time.monotonic() - self._over_since < GRACE_SECONDS:
            return None
        if info.state in ("CANCELLED", "PREEMPTED", "COMPLETED"):
            return INTERRUPTED
        if info.state not in ENDED:
            return f"its job {info.job_id} is no longer in Slurm"
        advice = f"; raise {REMEDIES[info.state]}" if info.state in REMEDIES else ""
        return f"its job {info.job_id} ended as {info.state}{advice}"

    def interrupt(self) -> None:
        """Send TERM, on which the run saves and stops."""
        self._cancel("--signal=TERM")

    def kill(self) -> None:
        """Cancel the job."""
        self._cancel()

    def _cancel(self, *options: str) -> None:
        subprocess.run(("scancel", *options, self.info.job_id), check=True)


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

    @cached_property
    def site(self) -> Site:
        """The cluster; `auto` takes GPUs where the partition has them."""
        accelerators = ("gpu", "cpu") if partition_has_gpus(self._settings.partition) else ("cpu", "gpu")
        return Site("slurm", accelerators, elsewhere=True)

    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Once all jobs are ready, attach to those that are in Slurm already, and submit an array for each shape.

        Raises ConfigError if squeue fails, sbatch refuses, or a job in Slurm trains something else in a run's folder.
        """
        self._report_reasons()
        if more or not ready:
            return []
        jobs = startable(ready, running)
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
            output = files(info).with_suffix(".log")
            is_ours = info.folder.parent.name == ARRAYS and output.is_symlink()
            if is_ours and info.state not in ENDED and not output.with_suffix(".exit").exists():
                there[output.readlink().parent] = info
        attached: list[SlurmRun] = []
        for job in jobs:
            found = there.get(job.folder)
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
            write_yaml(resolved(job.run.cfg), folder / f"{number}.yaml")
            job.folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.log").symlink_to(job.folder / OUTPUT)
        runs = [ScriptedRun(job.command, job.folder) for job in jobs]
        try:
            array = submit(folder, runs, shape, self._settings)
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
        if git and git.dirty:
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


def files(info: JobInfo) -> Path:
    """The path of the files of one of our jobs, without their suffixes."""
    return info.folder / info.job_id.partition("_")[2]


def check_same(job: Job, info: JobInfo) -> None:
    """Raise ConfigError if the job in Slurm trains with other settings than `job`."""
    theirs = OmegaConf.to_container(stored_config(files(info).with_suffix(".yaml")), resolve=True)
    changed = changes(theirs, resolved(job.run.cfg), CHANGEABLE)
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"{key}={new}: job {info.job_id} trains in {job.run.folder.path} with {key}={old}; give the same settings, "
            f"choose another name, or scancel {info.job_id}"
        )
