"""One run in a process of this machine, as an execution of a queue."""

import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.utils import JobStatus

from .child import Child, Origin
from .engine import Execution
from .jobs import Job


class Process(Execution):
    """A run at work on this machine. environment: what its place adds to that of this process, or takes from it."""

    def __init__(self, job: Job, place: str, task_file: Path, environment: Mapping[str, str]) -> None:
        super().__init__(job)
        self._place = place
        self._task_file = task_file
        self._began = time.time()
        self._began_ticking = time.monotonic()  # the other clock may be set
        self._child = Child(task_file, self.output, environment, Origin.here())

    @property
    def place(self) -> str:
        """The slot's name."""
        return self._place

    @property
    def began(self) -> float:
        """When the process was started."""
        return self._began

    @property
    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self._began_ticking

    def has_ended(self) -> bool:
        """Whether the run is over; then its other ranks are, too."""
        return self._child.has_ended()

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._child.interrupt()

    def kill(self) -> None:
        """End it now."""
        self._child.kill()

    @property
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop before its end."""
        return self._child.was_stopped

    def returned(self) -> tuple[JobStatus, Any] | None:
        """What the worker has written for us."""
        result = self._child.end().result
        return None if result is None else pickle.loads(result)

    def how_it_ended(self) -> str:
        """By its exit status."""
        return self._child.end().how
