"""A worker's process on this machine: how it is started, asked to stop, and what it leaves. Quick to import."""

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
class Origin:
    """What a worker takes over from the command that wants it, maybe on another machine.

    arguments: what the user typed. modules: where it finds them. folder: the one that it works in.
    """

    arguments: tuple[str, ...]
    modules: tuple[str, ...]
    folder: Path

    @classmethod
    def here(cls) -> Self:
        """This command's."""
        return cls(tuple(sys.argv[1:]), tuple(str(Path(path).absolute()) for path in sys.path), Path.cwd())


@dataclass(frozen=True)
class End:
    """How a worker has ended.

    result: the pickled status and return value of its job, None if it could not tell. was_stopped: whether somebody
    asked it to stop. how: what became of it otherwise, `killed by SIGKILL`.
    """

    result: bytes | None
    was_stopped: bool
    how: str


class Child:
    """A worker in a process group of its own. It ends when this process does, see `die_with_the_launcher`.

    environment: all of it but what a worker needs. Its output is appended to the file `output`.
    """

    def __init__(self, task_file: Path, output: Path, environment: Mapping[str, str], origin: Origin) -> None:
        self._task_file = task_file
        with output.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "llama_lab.launching.worker", *origin.arguments],
                env={**environment, **worker_variables(task_file, origin)},
                cwd=origin.folder,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

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

    def end(self) -> End:
        """What it leaves, once it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        file = result_file(self._task_file)
        return End(file.read_bytes() if file.exists() else None, self.was_stopped, self._how_it_ended())

    def _how_it_ended(self) -> str:
        """By its exit status."""
        code = self._process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with status {code}"


def worker_variables(task_file: Path, origin: Origin) -> dict[str, str]:
    """What a worker finds in its environment: its task, and the modules that the command finds."""
    return {
        TASK_FILE: str(task_file),
        "PYTHONPATH": os.pathsep.join(origin.modules),
        "PYTHONSAFEPATH": "1",  # and no others
        "PYTHONUNBUFFERED": "1",  # so that a crash loses no line
    }
