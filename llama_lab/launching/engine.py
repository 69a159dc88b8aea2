"""The interface between a queue and what runs its jobs: slots of this machine, a Slurm cluster, a Ray cluster."""

import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from llama_lab.devices.site import Site
from llama_lab.runs.folder import OUTPUT, locked
from llama_lab.runs.stored import Status, StatusName, Summary
from llama_lab.training.run import Run
from llama_lab.util.errors import FAILED, USER_ERROR, ConfigError, RunFailedError
from llama_lab.util.formatting import duration

from .process import STOPPED

LAST_LINES = 5  # of the output, shown when a run crashes
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, eq=False)
class Job:
    """A run that can start. index: its position in the queue. command: its whole command line."""

    index: int
    run: Run
    command: list[str]

    @cached_property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return self.run.folder.path.absolute()


@dataclass(frozen=True)
class Session:
    """A run at work. place: such as `gpu 0`. started_at: a time.time(). start_tick: time.monotonic() at the start."""

    place: str
    started_at: float
    start_tick: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start, by the clock that nobody sets."""
        return time.monotonic() - self.start_tick


@dataclass(frozen=True)
class Result:
    """How a job ended. status: see `StatusName`, but for running. detail: to print. error: None if it ran."""

    status: str
    detail: str
    error: Exception | None = None


class SubmittedRun(ABC):
    """A job from when an engine accepts it until it ends. It may wait before it starts, and start more than once.

    session: the last one; None while the run waits. output: the file in the run's folder to which its processes print.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.session: Session | None = None
        self.output = job.run.folder.path / OUTPUT
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._output_start = self.output.stat().st_size if self.output.exists() else 0

    @abstractmethod
    def poll(self) -> int | str | None:
        """Update `session`, and return the exit status, negative for a signal, or why there is none.

        None until all processes of the run have exited.
        """

    @property
    def seconds(self) -> float:
        """Seconds of the last session; 0 while the run waits."""
        return self.session.seconds if self.session else 0.0

    def result(self, exit_status: int | str) -> Result:
        """How the run ended, from its exit status, its record and its output."""
        folder = self.job.run.folder
        if exit_status in STOPPED:
            self._mark("interrupted", "stopped by a signal; run the same command to resume")
            detail = folder.status.message if folder.status else "before it began"
            return Result("interrupted", detail, RunFailedError(detail))
        if exit_status == 0:
            status = folder.status or Status("done")  # a job that measures has none
            if status.status != "done":
                return Result(status.status, status.message)
            found = (folder.path / Summary.FILE).exists()
            loss = Summary.load(folder.path).metrics.get("val/loss") if found else None
            shown = "" if loss is None else f"val loss {loss:.4f}, "
            return Result("done", f"{shown}in {duration(self.seconds)}")
        if exit_status == USER_ERROR:
            return Result("failed", self._error(), ConfigError(self._error()))
        if exit_status == FAILED:
            reason = self._error()
        elif isinstance(exit_status, str):
            reason = exit_status
        elif exit_status < 0:
            reason = f"killed by {signal.Signals(-exit_status).name}"
        else:
            reason = f"its process exited with status {exit_status}"
        if exit_status != FAILED:
            self._mark("failed", reason)
        detail = f"{reason}; its output is in {self.output}"
        return Result("failed", detail, RunFailedError(detail))

    def _mark(self, status: StatusName, message: str) -> None:
        """Write status.json in place of a process that could not."""
        folder = self.job.run.folder
        with suppress(ConfigError), locked(folder.path):  # locked if another process has resumed the run
            if folder.status and folder.status.status == "running":
                folder.write_status(status, message)

    def _error(self) -> str:
        """The error that the run printed: the program's own line, or the exception of the last traceback."""
        text = "\n".join(line for line in self._tail() if line.strip()) or "it printed nothing"
        own = re.findall(r"^error: (.*)", text, re.MULTILINE)
        raised = re.findall(r"^Traceback .*\n(?: .*\n)*(.*)", text, re.MULTILINE)
        return str((own or raised or text.splitlines())[-1])

    def last_lines(self) -> list[str]:
        """The last lines that the run printed."""
        return self._tail()[-LAST_LINES:]

    def _tail(self) -> list[str]:
        if not self.output.exists():
            return []
        with self.output.open("rb") as output:
            output.seek(max(self._output_start, self.output.stat().st_size - TAIL_BYTES))
            return output.read().decode(errors="replace").splitlines()


R = TypeVar("R", bound=SubmittedRun)


class Engine(ABC, Generic[R]):
    """Runs jobs. Its constructor raises ConfigError for settings that cannot work.

    site: the machines on which jobs run. max_parallel: how many jobs run at a time; None if a cluster decides.
    """

    site: Site
    max_parallel: int | None = None

    @abstractmethod
    def open(self) -> str:
        """Acquire what the jobs need; return where they run, such as `2 slots: cpu 1, cpu 2`. Raises ConfigError."""

    @abstractmethod
    def start(self, jobs: Sequence[Job], running: Sequence[R], more: bool) -> list[R]:
        """Start some of the jobs, each in a folder of its own. more: whether others will follow."""

    @abstractmethod
    def stop(self, running: Sequence[R]) -> None:
        """Ask the runs to save and stop, as Ctrl-C does; the queue waits until they have."""

    @abstractmethod
    def close(self, running: Sequence[R]) -> None:
        """Release all resources. running: the runs left after an error or a second Ctrl-C."""


def check_alone(launcher: str) -> None:
    """Raise ConfigError if torchrun started this process: our launchers start the processes of a run themselves."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"hydra/launcher={launcher}: starts all processes itself; start the command without torchrun")
