"""The process of a worker on this machine: starting it, stopping it, and how it exited. Quick to import."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from llama_lab.errors import INTERRUPTED

from .task import TASK_FILE, result_file


@dataclass(frozen=True)
class LaunchContext:
    """What a worker, maybe on another machine, takes over from the command that launches it.

    arguments: the command line. modules: sys.path. folder: the working directory.
    """

    arguments: tuple[str, ...]
    modules: tuple[str, ...]
    folder: Path

    @classmethod
    def current(cls) -> Self:
        """The context of this process."""
        return cls(tuple(sys.argv[1:]), tuple(str(Path(path).absolute()) for path in sys.path), Path.cwd())


@dataclass(frozen=True)
class WorkerExit:
    """How a worker exited.

    result: the pickled status and return value of its job; None if it wrote none. was_stopped: whether it was asked to
    stop. reason: why there is no result, such as `killed by SIGKILL`.
    """

    result: bytes | None
    was_stopped: bool
    reason: str


class WorkerProcess:
    """A worker in a process group of its own, which exits when this process does, see `exit_with_launcher`.

    environment: that of the worker, except for `worker_variables`. Its output is appended to the file `output`.
    """

    def __init__(self, task_file: Path, output: Path, environment: Mapping[str, str], context: LaunchContext) -> None:
        self._task_file = task_file
        with output.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llama_lab.launching.worker", *context.arguments],
                env={**environment, **worker_variables(task_file, context)},
                cwd=context.folder,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Whether the worker has exited; kills what is left of its process group if so."""
        if self._process.poll() is None:
            return False
        self._send(signal.SIGKILL)
        return True

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._send(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process group and wait for the worker to exit."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def was_stopped(self) -> bool:
        """Whether the worker was asked to stop before its job was done."""
        return self._process.returncode in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)

    def collect(self) -> WorkerExit:
        """The result and exit status of a worker that has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        file, code = result_file(self._task_file), self._process.returncode
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with status {code}"
        return WorkerExit(file.read_bytes() if file.exists() else None, self.was_stopped, reason)


def worker_variables(task_file: Path, context: LaunchContext) -> dict[str, str]:
    """Environment variables that every worker needs: its task, and the module search path of the command."""
    return {
        TASK_FILE: str(task_file),
        "PYTHONPATH": os.pathsep.join(context.modules),
        "PYTHONSAFEPATH": "1",  # nothing else on sys.path
        "PYTHONUNBUFFERED": "1",  # so that a crash loses no line
    }
