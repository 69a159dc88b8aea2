"""The interface between a queue and what runs its jobs: slots of this machine, a Slurm cluster, a Ray cluster."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from llama_lab.config.components import override_key
from llama_lab.devices.hardware import Hardware
from llama_lab.errors import ConfigError, RunFailedError
from llama_lab.runs.folder import OUTPUT, held

from .sweep import Job

LAST_LINES = 5  # of the output, shown when a run crashes
TAIL_BYTES = 4096


class SubmittedRun(ABC):
    """A job from when an engine accepts it until it ends. It may wait before it starts, and start more than once.

    output: the file in the run's folder to which its processes print.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.output = job.run.folder.path / OUTPUT
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._output_start = self.output.stat().st_size if self.output.exists() else 0

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it runs, such as `gpu 0`."""

    @property
    @abstractmethod
    def started_at(self) -> float | None:
        """When it started, as a time.time(); None while it waits."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Seconds since it started; 0 while it waits."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether all processes of the run have exited."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the run to save and stop, as Ctrl-C does."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes of the run."""

    @property
    @abstractmethod
    def was_stopped(self) -> bool:
        """Whether the run was asked to stop before it was done."""

    @abstractmethod
    def read_result(self) -> tuple[JobStatus, Any] | None:
        """The job's status and its return value or error; None if its process wrote none."""

    @abstractmethod
    def exit_reason(self) -> str:
        """Why the processes wrote no result, such as `killed by SIGKILL`."""

    def job_return(self) -> JobReturn:
        """The result of a run that has ended, as Hydra expects it; a RunFailedError if its process wrote none."""
        result = self.read_result()
        if result is None:
            reason = "stopped by a signal; run the same command to resume" if self.was_stopped else self.exit_reason()
            result = JobStatus.FAILED, RunFailedError(reason)
            self._mark_failed(reason)
        status, value = result
        if isinstance(value, RunFailedError):
            value = RunFailedError(f"{value}; its output is in {self.output}")
        return JobReturn(self.job.overrides, self.job.config, status=status, _return_value=value)

    def _mark_failed(self, message: str) -> None:
        """Write status.json in place of a process that could not."""
        folder = self.job.run.folder
        with suppress(ConfigError), held(folder.path):  # locked if another process has resumed the run
            status = folder.read_status()
            if status is not None and status["status"] == "running":
                folder.write_status("failed", message)

    def last_lines(self) -> list[str]:
        """The last lines that the run printed."""
        if not self.output.exists():
            return []
        with self.output.open("rb") as output:
            output.seek(max(self._output_start, self.output.stat().st_size - TAIL_BYTES))
            return output.read().decode(errors="replace").splitlines()[-LAST_LINES:]


class Engine(ABC):
    """Runs jobs. Its constructor raises ConfigError for settings that cannot work."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Where jobs run, such as `2 slots: cpu 1, cpu 2`."""

    @property
    @abstractmethod
    def max_parallel(self) -> int | None:
        """How many jobs run at a time; None if a cluster decides."""

    @abstractmethod
    def complete_overrides(self, overrides: list[str]) -> list[str]:
        """Add this engine's overrides to a job's. Raises ConfigError for devices that it cannot provide."""

    @abstractmethod
    def hardware(self, trainer: DictConfig) -> Hardware:
        """The hardware of a job with this group `trainer`. Raises ConfigError if the engine does not have it."""

    @abstractmethod
    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Start jobs and remove them from `ready`; jobs that must wait stay there. more: whether others will follow.

        No two jobs with the same folder run at the same time.
        """

    def stop(self, running: Sequence[SubmittedRun]) -> None:
        """Ask the runs to save and stop; the queue waits until they have."""
        for submitted in running:
            submitted.interrupt()

    def close(self, running: Sequence[SubmittedRun]) -> None:
        """Release all resources. running: the runs left after an error or a second Ctrl-C."""
        for submitted in running:
            submitted.kill()


def with_devices(overrides: list[str], size: int, launcher: str) -> list[str]:
    """Add `trainer.devices` for the key gpus_per_run of `launcher`. Raises ConfigError if a job sets another number."""
    for devices in (o.partition("=")[2] for o in overrides if override_key(o) == "trainer.devices"):
        if devices not in ("auto", "-1", str(size)):
            raise ConfigError(
                f"trainer.devices={devices}: hydra/launcher={launcher} gives each run "
                f"hydra.launcher.gpus_per_run={size}; set that, and leave trainer.devices out"
            )
    return [*overrides, f"trainer.devices={size}"]
