"""Commands as processes of their own; to wait for them, and what the machine knows of them.

The imports of a new process take longer than the run of a tiny model. So a command that a test starts is a fork of a
server, as a launcher's runs are (`llama_lab/launching/forks.py`). What it starts in its turn are new processes.
"""

import atexit
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from threading import Lock

import psutil

from llama_lab.launching.forks import FORKS

PATIENCE = 240  # seconds, on a busy machine
CONTEXT = get_context("forkserver" if FORKS else "spawn")
CONTEXT.set_forkserver_preload(["llama_lab.launching.preload"])
ONE_AT_A_TIME = Lock()  # starting a process polls all others, which two threads must not do at once


class Started:
    """`python *command` at work in the folder `cwd`, in a session of its own; `command` begins with a script.

    out, err: the files of its standard streams, in the fresh folder `kept`. Standard input is closed.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str], kept: Path) -> None:
        self.out, self.err = kept / "out", kept / "err"
        arguments = (list(command), cwd, dict(environment), self.out, self.err)
        self._process = CONTEXT.Process(target=become, args=arguments)
        with ONE_AT_A_TIME:
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        wait_until(lambda: self.out.exists() or self.poll() is not None)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with ONE_AT_A_TIME:
            return self._process.exitcode

    def wait(self) -> int:
        """The exit status, once it has ended."""
        wait_until(lambda: self.poll() is not None)
        return self._process.exitcode or 0

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, and not to what it has started."""
        os.kill(self.pid, number)

    def kill_session(self) -> None:
        """Kill this process, and what it has started in its session."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def become(command: list[str], cwd: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    """Be the process that Python would start with a script and its arguments."""
    os.setsid()
    for number, file in ((2, err), (1, out)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, os.path.dirname(command[0]))
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def wait_until(holds: Callable[[], object], pause: float = 0.01) -> None:
    """Ask again and again, until it does."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "never"
        time.sleep(pause)


def at_work_in(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is a folder; those that have ended have none."""
    return [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """The addresses at which processes wait for TCP connections."""
    found: set[str] = set()
    for process in processes:
        with suppress(psutil.Error):
            connections = process.net_connections("tcp")
            found |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}
