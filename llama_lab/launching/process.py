"""One run in a process group of its own: how it is started, asked to stop, and what it leaves."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobStatus

from llama_lab.errors import INTERRUPTED

from .engine import Execution
from .jobs import Job
from .task import TASK_FILE, result_file


class Process(Execution):
    """A run at work on this machine. environment: what its place adds to that of this process, or takes from it."""

    def __init__(self, job: Job, place: str, task_file: Path, environment: Mapping[str, str]) -> None:
        super().__init__(job)
        self._place = place
        self._task_file = task_file
        self._began = time.time()
        self._began_ticking = time.monotonic()  # the other clock may be set
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llama_lab.launching.worker", *sys.argv[1:]],
                env={**environment, **worker_variables(task_file)},
                stdin=subprocess.PIPE,  # ends when we do, see `die_with_the_launcher`
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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
        if self._process.poll() is None:
            return False
        self._send(signal.SIGKILL)
        return True

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._send(signal.SIGINT)

    def kill(self) -> None:
        """End it now."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop before its end."""
        return self._process.returncode in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)

    def returned(self) -> tuple[JobStatus, Any] | None:
        """What the worker has written for us."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        file = result_file(self._task_file)
        return pickle.loads(file.read_bytes()) if file.exists() else None

    def how_it_ended(self) -> str:
        """By its exit status."""
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with status {code}"


def worker_variables(task_file: Path) -> dict[str, str]:
    """What a worker finds in its environment: its task, and the modules that this process finds."""
    return {
        TASK_FILE: str(task_file),
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path),
        "PYTHONSAFEPATH": "1",  # and no others
        "PYTHONUNBUFFERED": "1",  # so that a crash loses no line
    }
