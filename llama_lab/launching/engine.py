"""The interface between a queue and what runs its jobs: slots of this machine, a Slurm cluster, a Ray cluster."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llama_lab.devices.site import Site
from llama_lab.errors import FAILED, USER_ERROR, ConfigError, RunFailedError
from llama_lab.formatting import duration
from llama_lab.runs.folder import OUTPUT, locked
from llama_lab.runs.stored import Status, StatusName, Summary
from llama_lab.training.run import Run

from .process import STOPPED

LAST_LINES = 5  # of the output, shown when a run crashes
TAIL_BYTES = 16 * 1024


@dataclass(frozen=True)
class Job:
    """A run that can start. index: its position in the queue. overrides: its own; command: its whole command line."""

    index: int
    overrides: list[str]
    run: Run
    command: list[str]

    @property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return self.run.folder.path.absolute()


@dataclass(frozen=True)
class Result:
    """How a job ended. status: done, diverged, interrupted or failed. detail: to print. error: None if it ran."""

    status: str
    detail: str
    error: Exception | None = None


@dataclass(frozen=True)
class Session:
    """A run at work. place: such as `gpu 0`. started_at: a time.time(). seconds: since then."""

    place: str
    started_at: float
    seconds: float


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
    def session(self) -> Session | None:
        """The last session; None while the run waits."""

    @property
    @abstractmethod
    def exit_status(self) -> int | str | None:
        """The exit status, negative for a signal, or why there is none; None until all processes have exited."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the run to save and stop, as Ctrl-C does."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes of the run."""

    @property
    def seconds(self) -> float:
        """Seconds of the last session; 0 while the run waits."""
        return self.session.seconds if self.session else 0.0

    def result(self) -> Result:
        """How the run ended, from its exit status, its record and its output."""
        code, folder = self.exit_status, self.job.run.folder
        if code in STOPPED:
            self._mark("interrupted", "stopped by a signal; run the same command to resume")
            detail = folder.status.message if folder.status else "before it began"
            return Result("interrupted", detail, RunFailedError(detail))
        if code == 0:
            status = folder.status or Status("done")  # a job that measures has none
            if status.status != "done":
                return Result(status.status, status.message)
            found = (folder.path / Summary.FILE).exists()
            loss = Summary.load(folder.path).metrics.get("val/loss") if found else None
            shown = "" if loss is None else f"val loss {loss:.4f}, "
            return Result("done", f"{shown}in {duration(self.seconds)}")
        if code == USER_ERROR:
            error: Exception = ConfigError(self._error())
        else:
            reason = self._error() if code == FAILED else describe(code)
            error = RunFailedError(f"{reason}; its output is in {self.output}")
            if code != FAILED:
                self._mark("failed", reason)
        return Result("failed", str(error), error)

    def _mark(self, status: StatusName, message: str) -> None:
        """Write status.json in place of a process that could not."""
        folder = self.job.run.folder
        with suppress(ConfigError), locked(folder.path):  # locked if another process has resumed the run
            if folder.status and folder.status.status == "running":
                folder.write_status(status, message)

    def _error(self) -> str:
        """The error that the run printed: the program's own line, or the exception of the last traceback."""
        lines = [line for line in self._tail() if line.strip()] or ["it printed nothing"]
        if ours := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
            return ours[-1]
        starts = [number for number, line in enumerate(lines) if line.startswith("Traceback ")]
        trace = lines[starts[-1] + 1 :] if starts else []
        return next((line for line in trace if not line.startswith(" ")), lines[-1])

    def last_lines(self) -> list[str]:
        """The last lines that the run printed."""
        return self._tail()[-LAST_LINES:]

    def _tail(self) -> list[str]:
        if not self.output.exists():
            return []
        with self.output.open("rb") as output:
            output.seek(max(self._output_start, self.output.stat().st_size - TAIL_BYTES))
            return output.read().decode(errors="replace").splitlines()


def describe(exit_status: int | str | None) -> str:
    """An exit status in words."""
    if not isinstance(exit_status, int):
        return str(exit_status)
    if exit_status < 0:
        return f"killed by {signal.Signals(-exit_status).name}"
    return f"its process exited with status {exit_status}"


class Engine(ABC):
    """Runs jobs. Its constructor raises ConfigError for settings that cannot work."""

    @property
    @abstractmethod
    def site(self) -> Site:
        """The machines on which jobs run."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Where jobs run, such as `2 slots: cpu 1, cpu 2`."""

    @property
    @abstractmethod
    def max_parallel(self) -> int | None:
        """How many jobs run at a time; None if a cluster decides."""

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


def startable(ready: Sequence[Job], running: Sequence[SubmittedRun]) -> list[Job]:
    """The jobs of which none has the folder of another, or of one that runs."""
    taken = {submitted.job.folder for submitted in running}
    first = {job.folder: job for job in reversed(ready) if job.folder not in taken}
    return [job for job in ready if first.get(job.folder) is job]
