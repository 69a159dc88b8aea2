"""The engine of `hydra/launcher=slurm`: the runs of a sweep as arrays of Slurm jobs, which outlive the launcher.

Every array has a folder, `<runs_dir>/.slurm/<name>/`, made before it is submitted. It holds the batch script and, for
job i, `i.yaml` (the run's config), `i.log` (a link to the output in the run's folder) and finally `i.exit`, see
`slurm_script.py`. Since squeue prints the script's path, the same command finds its jobs again after the first launcher
is gone.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import mkdtemp

from llama_lab.config.schema import CHANGEABLE
from llama_lab.config.trust import stored_settings
from llama_lab.devices.site import Site
from llama_lab.runs import environment
from llama_lab.runs.folder import OUTPUT, changes, resolved, write_yaml
from llama_lab.util.errors import INTERRUPTED, ConfigError

from .engine import Engine, Job, Session, SubmittedRun
from .settings import SlurmSettings
from .slurm_cluster import ENDED, JobInfo, Watch, check_installed, partition_has_gpus
from .slurm_script import submit

ARRAYS = ".slurm"  # below runs_dir
GRACE_SECONDS = 10.0  # for a file to appear on a shared file system
REMEDIES = {"TIMEOUT": "hydra.launcher.time or signal_seconds", "OUT_OF_MEMORY": "hydra.launcher.memory"}
PASSING = {"", "None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit"}  # reasons to wait that end by itself


class SlurmRun(SubmittedRun):
    """A run as a job of a Slurm array, waiting or running. info: the job as squeue shows it, or showed it last."""

    def __init__(self, job: Job, info: JobInfo, watch: Watch) -> None:
        super().__init__(job)
        self.info = info
        self._watch = watch
        self._over_since: float | None = None

    def poll(self) -> int | str | None:
        """The exit status that the batch script wrote; without one, the final state of the job."""
        jobs = self._watch.jobs()
        info = self.info = jobs.get(self.info.job_id, self.info)
        self.session = None
        if info.started_at is not None:
            seconds = max(0.0, (info.ended_at or time.time()) - info.started_at)
            place = f"{info.nodes} (job {info.job_id})"  # with the id for scancel
            self.session = Session(place, info.started_at, time.monotonic() - seconds)
        if self._watch.exists(exit_file := info.file(".exit")):
            return int(exit_file.read_text())
        is_over = info.state in ENDED or info.job_id not in jobs
        self._over_since = (self._over_since or time.monotonic()) if is_over else None
        if self._over_since is None or time.monotonic() - self._over_since < GRACE_SECONDS:
            return None
        if info.state in ("CANCELLED", "PREEMPTED", "COMPLETED"):
            return INTERRUPTED
        if info.state not in ENDED:
            return f"its job {info.job_id} is no longer in Slurm"
        advice = f"; raise {REMEDIES[info.state]}" if info.state in REMEDIES else ""
        return f"its job {info.job_id} ended as {info.state}{advice}"


class SlurmEngine(Engine[SlurmRun]):
    """A Slurm cluster, on a machine where jobs can be submitted."""

    def __init__(self, settings: SlurmSettings) -> None:
        check_installed()
        # The first is for `auto`.
        accelerators = ("gpu", "cpu") if partition_has_gpus(settings.partition) else ("cpu", "gpu")
        self.site = Site("slurm", accelerators, elsewhere=True)
        self._settings = settings
        self._watch = Watch()
        self._started: list[SlurmRun] = []
        self._reported: set[str] = set()
        self._warned = False

    def open(self) -> str:
        """The partition; nothing needs to be acquired."""
        return f"Slurm, partition {self._settings.partition or 'by default'}"

    def start(self, jobs: Sequence[Job], running: Sequence[SlurmRun], more: bool) -> list[SlurmRun]:
        """Once all jobs are ready, attach to those that are in Slurm already, and submit an array for each shape.

        Raises ConfigError if squeue fails, sbatch refuses, or a job in Slurm trains something else in a run's folder.
        """
        self._report_reasons(running)
        if more or not jobs:
            return []
        started = self._attach(jobs)
        attached = [run.job for run in started]
        rest = sorted((job for job in jobs if job not in attached), key=shape_of)
        for _, same in groupby(rest, shape_of):
            started += self._submit(list(same))
        self._started += started
        return started

    def _report_reasons(self, running: Sequence[SlurmRun]) -> None:
        """Print once why jobs wait, unless they wait for their turn."""
        for info in (run.info for run in running):
            if info.state == "PENDING" and info.reason not in PASSING and info.reason not in self._reported:
                self._reported.add(info.reason)
                print(f"job {info.job_id} waits, Slurm says: {info.reason}", flush=True)

    def _attach(self, jobs: Sequence[Job]) -> list[SlurmRun]:
        """Attach to jobs that another launcher submitted."""
        there: dict[Path, JobInfo] = {}
        for info in self._watch.jobs(fresh=True).values():
            output = info.file(".log")
            is_ours = info.folder.parent.name == ARRAYS and output.is_symlink()
            if is_ours and info.state not in ENDED and not info.file(".exit").exists():
                there[output.readlink().parent] = info
        attached = [SlurmRun(job, there[job.folder], self._watch) for job in jobs if job.folder in there]
        for run in attached:
            check_same(run.job, run.info)
        if attached:
            print(f"{len(attached)} runs are in Slurm's queue, or at work: waiting for those", flush=True)
        return attached

    def _submit(self, jobs: Sequence[Job]) -> list[SlurmRun]:
        """Submit jobs of one shape as an array."""
        self._warn_if_dirty()
        arrays = Path(jobs[0].run.cfg.runs_dir).absolute() / ARRAYS
        arrays.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=time.strftime("%m%d-%H%M-"), dir=arrays))
        for number, job in enumerate(jobs):
            write_yaml(resolved(job.run.cfg), folder / f"{number}.yaml")
            job.folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.log").symlink_to(job.folder / OUTPUT)
        try:
            array = submit(folder, jobs, self._settings)
        except ConfigError:
            shutil.rmtree(folder)
            raise
        accelerator, devices, nodes = shape_of(jobs[0])
        print(
            f"submitted job {array}: {len(jobs)} runs, each on {nodes} x {devices} {accelerator}; "
            f"scancel {array} would end it",
            flush=True,
        )
        waiting = [self._watch.expect(f"{array}_{number}", folder) for number in range(len(jobs))]
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

    def stop(self, running: Sequence[SlurmRun]) -> None:
        """Stop waiting; the jobs stay."""
        raise KeyboardInterrupt

    def close(self, running: Sequence[SlurmRun]) -> None:
        """Print which jobs stay, and delete the folders of arrays that have ended."""
        if running:
            arrays = " ".join(sorted({run.info.array for run in running}, key=int))
            stay = f"{len(running)} runs stay in Slurm; the same command waits for them, scancel {arrays} ends them"
            print(stay, flush=True)
        ended = {run.info.job_id for run in self._started if run not in running}
        live = [info for info in self._watch.jobs().values() if info.state not in ENDED and info.job_id not in ended]
        for folder in {run.info.folder for run in self._started} - {info.folder for info in live}:
            shutil.rmtree(folder)


def shape_of(job: Job) -> tuple[str, int, int]:
    """What a job requests: its accelerator, devices per node, and nodes."""
    hardware = job.run.hardware
    return hardware.accelerator, hardware.devices, hardware.num_nodes


def check_same(job: Job, info: JobInfo) -> None:
    """Raise ConfigError if the job in Slurm trains with other settings than `job`."""
    theirs = stored_settings(info.file(".yaml"))
    changed = changes(theirs, resolved(job.run.cfg), CHANGEABLE)
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"{key}={new}: job {info.job_id} trains in {job.run.folder.path} with {key}={old}; give the same settings, "
            f"choose another name, or scancel {info.job_id}"
        )
