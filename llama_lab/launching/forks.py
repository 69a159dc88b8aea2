"""Start single-CPU runs as forks of a server that has already imported PyTorch, in no time.

The server is multiprocessing's forkserver. It computes nothing, so it has no threads or devices that a fork would lose.
CUDA does not survive a fork: runs on GPUs, or of several processes, use `RunProcess`.
"""

import atexit
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from .process import LIFELINE, RunProcess

FORKS = sys.platform == "linux"  # macOS' libraries do not survive a fork either


class RunFork(RunProcess):
    """As `RunProcess`, in a fork of the server, which replaces the Python that `command` names.

    The server starts with the first one, and ends with this process.
    """

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["llama_lab.launching.preload"])
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for us, also while the server imports
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, before)
        ready, leads = context.Pipe(duplex=False)
        arguments = (list(command[1:]), output.absolute(), dict(environment), folder, leads)
        self._fork = context.Process(target=become, args=arguments)
        self._fork.start()
        leads.close()
        with suppress(EOFError):  # it has been killed
            ready.recv_bytes()
        assert self._fork.pid is not None
        self._pid = self._fork.pid

    def _exit_status(self) -> int | None:
        return self._fork.exitcode


def become(command: list[str], output: Path, environment: dict[str, str], folder: Path, leads: Connection) -> None:
    """Be the process that Python would start with `command`, in a process group of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    launcher = parent_process()
    assert launcher is not None
    assert isinstance(launcher.sentinel, int)
    os.dup2(launcher.sentinel, 0)  # a pipe that closes when the launcher exits
    os.environ.clear()
    os.environ.update({**environment, LIFELINE: "1"})
    leads.send_bytes(b"!")
    stream = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number in (1, 2):
        os.dup2(stream, number)
    os.chdir(folder)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which it read as it was imported
    sys.argv = command
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
