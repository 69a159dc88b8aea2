"""What a queue asks of that which runs its jobs: slots of this machine, a Slurm cluster, a Ray cluster."""

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

from .jobs import Job

LAST_LINES = 5  # of its output, shown when a run crashes
TAIL_BYTES = 4096


class Execution(ABC):
    """A job that an engine has taken, until it ends. Its output goes to the run's folder."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.output = job.run.folder.path / OUTPUT
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._output_start = self.output.stat().st_size if self.output.exists() else 0

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it runs, for people: `gpu 0`."""

    @property
    @abstractmethod
    def began(self) -> float | None:
        """When it began to run, as a time.time(); None while it waits."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long it has run; 0 while it waits."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the run is over, with all of its processes."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the run to save and stop, as Ctrl-C does."""

    @abstractmethod
    def kill(self) -> None:
        """End it now."""

    @property
    @abstractmethod
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop before its end."""

    @abstractmethod
    def returned(self) -> tuple[JobStatus, Any] | None:
        """What the job's function has returned or raised; None if its process could not tell."""

    @abstractmethod
    def how_it_ended(self) -> str:
        """What became of processes that left no result, in words: `killed by SIGKILL`."""

    def result(self) -> JobReturn:
        """What an ended run leaves, which is an error with its name on it if that is all."""
        returned = self.returned()
        if returned is None:
            how = "stopped by a signal; the same command goes on" if self.was_stopped else self.how_it_ended()
            returned = JobStatus.FAILED, RunFailedError(how)
            self._record(how)
        status, value = returned
        if isinstance(value, RunFailedError):
            value = RunFailedError(f"{value}; its output is in {self.output}")
        return JobReturn(self.job.overrides, self.job.config, status=status, _return_value=value)

    def _record(self, message: str) -> None:
        """Write the status of a process that could not."""
        folder = self.job.run.folder
        with suppress(ConfigError), held(folder.path):  # or else another process has gone on with it
            status = folder.read_status()
            if status is not None and status["status"] == "running":
                folder.write_status("failed", message)

    def last_lines(self) -> list[str]:
        """The end of what it has printed."""
        if not self.output.exists():
            return []
        with self.output.open("rb") as output:
            output.seek(max(self._output_start, self.output.stat().st_size - TAIL_BYTES))
            return output.read().decode(errors="replace").splitlines()[-LAST_LINES:]


class Engine(ABC):
    """Runs jobs. Raises ConfigError, when it is made, for what cannot be."""

    @property
    @abstractmethod
    def places(self) -> str:
        """Where its jobs run, for people: `2 slots: cpu 1, cpu 2`."""

    @property
    @abstractmethod
    def width(self) -> int | None:
        """How many jobs it runs at a time; None if that is not ours to say."""

    @abstractmethod
    def settle(self, overrides: list[str]) -> list[str]:
        """A job's overrides, and those of this engine. Raises ConfigError for devices that it cannot give."""

    @abstractmethod
    def hardware(self, trainer: DictConfig) -> Hardware:
        """What a job with this group `trainer` will have. Raises ConfigError for what it will not."""

    @abstractmethod
    def start(self, ready: list[Job], running: Sequence[Execution], more: bool) -> list[Execution]:
        """Take what it can of `ready`, which stay there otherwise. more: whether others will follow soon.

        No two jobs with one folder run at the same time.
        """

    def stop(self, running: Sequence[Execution]) -> None:
        """The user wants to stop: have the runs save. The queue waits for their end."""
        for execution in running:
            execution.interrupt()

    def close(self, running: Sequence[Execution]) -> None:
        """The queue ends, and these are left: after a stop in a hurry, or an error."""
        for execution in running:
            execution.kill()


def with_devices(overrides: list[str], size: int, launcher: str) -> list[str]:
    """A job's overrides on `size` GPUs, as the key gpus_per_run of `launcher` sets. Raises ConfigError for others."""
    for devices in (o.partition("=")[2] for o in overrides if override_key(o) == "trainer.devices"):
        if devices not in ("auto", "-1", str(size)):
            raise ConfigError(
                f"trainer.devices={devices}: hydra/launcher={launcher} gives each run "
                f"hydra.launcher.gpus_per_run={size}; set that, and leave trainer.devices out"
            )
    return [*overrides, f"trainer.devices={size}"]
