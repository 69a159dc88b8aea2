"""One run in a process group of its own: how it is started, asked to stop, and what it leaves."""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus

from llama_lab.errors import INTERRUPTED, ConfigError, RunFailedError
from llama_lab.training.folder import OUTPUT, held

from .jobs import Job
from .slots import Slot, slot_environment
from .task import TASK_FILE, result_file

LAST_LINES = 5  # of its output, shown when a process dies


class Process:
    """A run at work in a slot. Its output goes to its folder."""

    def __init__(self, job: Job, slot: Slot, task_file: Path) -> None:
        self.job = job
        self.slot = slot
        self._task_file = task_file
        self.began = time.time()
        self._output = job.run.folder.path / OUTPUT
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            self._output_start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llama_lab.launching.worker", *sys.argv[1:]],
                env=worker_environment(job, slot, task_file),
                stdin=subprocess.PIPE,  # ends when we do, see `die_with_the_launcher`
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.time() - self.began

    def has_ended(self) -> bool:
        """Whether the run is over; then its other ranks are, too."""
        if self._process.poll() is None:
            return False
        self.send(signal.SIGKILL)
        return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it now."""
        self.send(signal.SIGKILL)
        self._process.wait()

    @property
    def was_stopped(self) -> bool:
        """Whether somebody asked it to stop before its end."""
        return self._process.returncode in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)

    def result(self) -> JobReturn:
        """What an ended run leaves, which is an error with its name on it if that is all."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        file = result_file(self._task_file)
        if file.exists():
            status, value = pickle.loads(file.read_bytes())
        else:
            status, value = JobStatus.FAILED, RunFailedError(self._how_it_ended())
            self._record(str(value))
        if isinstance(value, RunFailedError):
            value = RunFailedError(f"{value}; its output is in {self._output}")
        return JobReturn(self.job.overrides, self.job.config, status=status, _return_value=value)

    def _record(self, message: str) -> None:
        """Write the status of a process that could not."""
        folder = self.job.run.folder
        with suppress(ConfigError), held(folder.path):  # or else another process has gone on with it
            status = folder.read_status()
            if status is not None and status["status"] == "running":
                folder.write_status("failed", message)

    def _how_it_ended(self) -> str:
        """The exit status of a process that left no result, in words."""
        code = self._process.returncode
        if self.was_stopped:
            return "stopped by a signal; the same command goes on"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with status {code}"

    def last_lines(self) -> list[str]:
        """The end of what it has printed."""
        with self._output.open("rb") as output:
            output.seek(max(self._output_start, self._output.stat().st_size - 4096))
            return output.read().decode(errors="replace").splitlines()[-LAST_LINES:]


def worker_environment(job: Job, slot: Slot, task_file: Path) -> dict[str, str]:
    """The environment of a worker: its slot's, and the modules that this process finds."""
    return slot_environment(slot, job.run.hardware.devices, os.environ) | {
        TASK_FILE: str(task_file),
        "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path),
        "PYTHONSAFEPATH": "1",  # and no others
        "PYTHONUNBUFFERED": "1",  # so that a crash loses no line
    }
