"""The interface between a queue and what starts its runs: slots of this machine, a Slurm cluster, a Ray cluster."""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

from llama_lab.devices.site import Site
from llama_lab.runs.folder import OUTPUT, locked
from llama_lab.runs.stored import Status, StatusName
from llama_lab.training.run import Run
from llama_lab.util.errors import FAILED, USER_ERROR, ConfigError, RunFailedError
from llama_lab.util.formatting import duration

from .process import STOPPED

LAST_LINES = 5  # of the output, shown when a run crashes
TAIL_BYTES = 16 * 1024


class QueuedRun:
    """A run on its way through an engine, in which it may wait, and start more than once.

    index: its position in the queue. command: its whole command line. place: where it is at work, such as `gpu 0`; None
    while it waits. started_at: a time.time(), of the last start.
    """

    def __init__(self, index: int, run: Run, command: list[str]) -> None:
        self.index = index
        self.run = run
        self.command = command
        self.place: str | None = None
        self.started_at = self._start_tick = 0.0
        self._output_start = 0

    @cached_property
    def folder(self) -> Path:
        """The run's folder, absolute."""
        return self.run.folder.path.absolute()

    def open_output(self) -> Path:
        """The file in the run's folder to which its processes will append; its last lines are those after this call."""
        self.folder.mkdir(parents=True, exist_ok=True)
        output = self.folder / OUTPUT
        self._output_start = output.stat().st_size if output.exists() else 0
        return output

    def start(self, place: str, started_at: float, seconds: float = 0.0) -> None:
        """Record that the run is at work, and for how many seconds."""
        self.place, self.started_at = place, started_at
        self._start_tick = time.monotonic() - seconds

    @property
    def seconds(self) -> float:
        """Seconds since the last start, by the clock that nobody sets; 0 while the run waits."""
        return time.monotonic() - self._start_tick if self.place else 0.0

    def result(self, exit_status: int | str) -> tuple[str, str, Exception | None]:
        """How the run ended: its status, see `StatusName`; what to print; and its error, None if it ran.

        exit_status: negative for a signal; a sentence if there is none.
        """
        folder = self.run.folder
        if exit_status in STOPPED:
            self._mark("interrupted", "stopped by a signal; run the same command to resume")
            detail = folder.status.message if folder.status else "before it began"
            return "interrupted", detail, RunFailedError(detail)
        if exit_status == 0:
            status = folder.status or Status("done")  # a run that measures has none
            if status.status != "done":
                return status.status, status.message, None
            shown = "" if folder.final_loss is None else f"val loss {folder.final_loss:.4f}, "
            return "done", f"{shown}in {duration(self.seconds)}", None
        # The error that the run printed: the program's own line, or the exception of the last traceback.
        text = "\n".join(line for line in self.last_lines(TAIL_BYTES) if line.strip()) or "it printed nothing"
        own = re.findall(r"^error: (.*)", text, re.MULTILINE)
        raised = re.findall(r"^Traceback .*\n(?: .*\n)*(.*)", text, re.MULTILINE)
        reason = str((own or raised or text.splitlines())[-1])
        if exit_status == USER_ERROR:
            return "failed", reason, ConfigError(reason)
        if exit_status != FAILED:
            reason = f"its process exited with status {exit_status}"
            if isinstance(exit_status, str):
                reason = exit_status
            elif exit_status < 0:
                reason = f"killed by {signal.Signals(-exit_status).name}"
            self._mark("failed", reason)
        detail = f"{reason}; its output is in {folder.path / OUTPUT}"
        return "failed", detail, RunFailedError(detail)

    def _mark(self, status: StatusName, message: str) -> None:
        """Write status.json in place of a process that could not."""
        folder = self.run.folder
        with suppress(ConfigError), locked(folder.path):  # locked if another process has resumed the run
            if folder.status and folder.status.status == "running":
                folder.write_status(status, message)

    def last_lines(self, most: int = LAST_LINES) -> list[str]:
        """The last lines that the run printed, as far as they fit into TAIL_BYTES."""
        file = self.folder / OUTPUT
        if not file.exists():
            return []
        with file.open("rb") as output:
            output.seek(max(self._output_start, file.stat().st_size - TAIL_BYTES))
            return output.read().decode(errors="replace").splitlines()[-most:]


class Engine(Protocol):
    """Starts runs. Its constructor raises ConfigError for settings that cannot work.

    site: the machines on which runs train.
    """

    site: Site

    def open(self) -> str:
        """Acquire what the runs need; return where they train, such as `2 slots: cpu 1, cpu 2`. Raises ConfigError."""

    def start(self, ready: Sequence[QueuedRun], running: Sequence[QueuedRun], more: bool) -> Sequence[QueuedRun]:
        """Start some of the ready runs, each in a folder of its own; return these. more: whether others will follow."""

    def poll(self, queued: QueuedRun) -> int | str | None:
        """Update where a started run is at work; return its exit status, negative for a signal, or why there is none.

        None until all processes of the run have exited.
        """

    def stop(self, running: Sequence[QueuedRun]) -> None:
        """Ask the runs to save and stop, as Ctrl-C does; the queue waits until they have."""

    def close(self, running: Sequence[QueuedRun]) -> None:
        """Release all resources. running: the runs left after an error or a second Ctrl-C."""


def check_alone(launcher: str) -> None:
    """Raise ConfigError if torchrun started this process: our launchers start the processes of a run themselves."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"hydra/launcher={launcher}: starts all processes itself; start the command without torchrun")
