"""Python processes that need not import PyTorch, Lightning and Hydra: forks of a server that has.

The imports take longer than the run of a tiny model. A fork has a pid, a working directory, standard streams, signals
and an exit status of its own, as a new process does; only its environment variables, which libraries read as they are
imported, are those of the server. What is about imports, start-up or other variables needs a new process.
"""

import atexit
import gc
import importlib
import io
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

MODULES = (
    "llama_lab.cli",
    "llama_lab.training.train",
    "llama_lab.study.evaluate",
    "llama_lab.study.report.write",
    "torch.utils.tensorboard",
)
"""What trainings, studies and evaluations import; but for wandb, which makes a folder as it is imported."""

SIZE = 4  # bytes of an integer between the processes


class PreloadedPython:
    """Starts scripts in forks of a server with these environment variables; a context manager, which ends it.

    It needs Linux; elsewhere it starts new processes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._requests, theirs = socket.socketpair()
        if sys.platform != "linux":
            return self
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                cwd=Path(__file__).parents[1],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._requests.recv(1), "the server has died"  # it has imported, and tests can measure what they start
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        if sys.platform == "linux":
            self._server.wait()

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """What `subprocess.Popen([sys.executable, *command], **options)` starts; `command` begins with a script.

        The options are stdin, stdout, stderr, text, cwd and start_new_session.
        """
        assert options.keys() <= {"stdin", "stdout", "stderr", "text", "cwd", "start_new_session"}
        if sys.platform != "linux":
            return subprocess.Popen([sys.executable, *command], env=self._environment, **options)
        return Fork(self.send, command, **options)

    def send(self, request: object, streams: Sequence[int]) -> None:
        """Ask the server for a fork."""
        content = pickle.dumps(request)
        with self._lock:
            socket.send_fds(self._requests, [len(content).to_bytes(SIZE)], streams)
            self._requests.sendall(content)


class Fork(subprocess.Popen[Any]):
    """A child of the server, which reports first its pid and then its exit status through a pipe."""

    def __init__(self, send: Callable[[object, Sequence[int]], None], command: Sequence[str], **options: Any) -> None:
        self._send = send
        self._own_session = options.get("start_new_session", False)
        super().__init__(command, **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        cwd, pipes = rest[4], rest[9:15]  # the ends of pipes, ours and the child's; -1 where it inherits a stream
        streams = [pipe if pipe >= 0 else stream for stream, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._status, theirs = os.pipe()
        self._send((args, os.path.abspath(cwd or "."), self._own_session), [*streams, theirs])
        os.close(theirs)
        self.pid = self._receive()
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _receive(self) -> int:
        received = os.read(self._status, SIZE)
        assert received, "the server has died"
        return int.from_bytes(received, signed=True)

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen.wait`."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._receive()
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def serve(requests: socket.socket) -> str:
    """Fork a child for each request. Returns in the children alone: the script that each is to run."""
    children: dict[int, tuple[int, int]] = {}  # pid and status pipe, by what shows that the child has ended
    while True:
        for ready in select.select([requests, *children], [], [])[0]:
            if ready is requests:
                size, streams, *_ = socket.recv_fds(requests, SIZE, 4)
                if not size:  # the tests have ended
                    os.killpg(0, signal.SIGKILL)
                request = pickle.loads(requests.recv(int.from_bytes(size), socket.MSG_WAITALL))
                pid = os.fork()
                if pid == 0:
                    return become(*request, streams)
                for stream in streams[:3]:
                    os.close(stream)
                children[os.pidfd_open(pid)] = (pid, streams[3])
            else:
                pid, status = children.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # nobody waits for it
                    os.write(status, code.to_bytes(SIZE, signed=True))
                os.close(status)


def become(command: list[str], cwd: str, own_session: bool, streams: list[int]) -> str:
    """Make this fork the process that `python *command` would be, before its imports; the script."""
    if own_session:
        os.setsid()
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
    os.write(streams[3], os.getpid().to_bytes(SIZE, signed=True))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(cwd)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    return command[0]


def main() -> None:
    """Import, serve, and in the forks run the script."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for module in MODULES:
        importlib.import_module(module)
    del os.environ["JE_ARROW_MALLOC_CONF"]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    gc.freeze()  # so that a collection in a fork does not copy what the server has allocated
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.sendall(b"!")
    script = serve(requests)
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            raise
        status = stop.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as Python does, but for its teardown, which takes two seconds


if __name__ == "__main__":
    main()
