"""Runs in forks of a server that has imported PyTorch and all else, and so start in no time: those on one CPU.

The server is that of Python's multiprocessing. It computes nothing, so that a fork finds no thread missing and no
device in use; GPUs, whose libraries do not survive a fork, and runs of several processes are for `RunProcess`.
"""

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from .process import send_to_group

FORKS = sys.platform == "linux"  # macOS' libraries do not survive a fork either


def start_server() -> None:
    """Start the server, or do nothing if it is there; it ends with this process."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["llama_lab.launching.preload"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, also while the server imports
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)


class RunFork:
    """As `RunProcess`, in a fork of the server, which replaces the Python that `command` names."""

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path) -> None:
        start_server()
        context = get_context("forkserver")
        ready, leads = context.Pipe(duplex=False)
        arguments = (list(command[1:]), output.absolute(), dict(environment), folder, leads)
        self._process = context.Process(target=become, args=arguments)
        self._process.start()
        leads.close()
        with suppress(EOFError):  # it has been killed
            ready.recv_bytes()

    def poll(self) -> int | None:
        """As `RunProcess.poll`."""
        if self._process.exitcode is not None:
            self.send(signal.SIGKILL)
        return self._process.exitcode

    def kill(self) -> None:
        """As `RunProcess.kill`."""
        self.send(signal.SIGKILL)
        self._process.join()

    def send(self, number: signal.Signals) -> None:
        """As `RunProcess.send`."""
        assert self._process.pid is not None
        send_to_group(self._process.pid, number)


def become(command: list[str], output: Path, environment: dict[str, str], folder: Path, leads: Connection) -> None:
    """Be the process that Python would start with `command`, in a process group of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=end_with_launcher, daemon=True).start()
    leads.send_bytes(b"!")
    stream = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for number in (1, 2):
        os.dup2(stream, number)
    os.environ.clear()
    os.environ.update(environment)
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


def end_with_launcher() -> None:
    """Kill this process group as soon as the launcher has exited, however that happened."""
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)
