"""Python processes that need not import PyTorch, Lightning and Hydra: forks of a server that has.

The imports take longer than the run of a tiny model. A fork has a pid, a working directory, variables, standard
streams, signals and an exit status of its own, as a new process does; only what libraries read as they are imported
comes from the server's environment. Tests of imports and of start-up need a new process.
"""

import atexit
import gc
import importlib
import io
import marshal
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fcntl import F_DUPFD, fcntl
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from omegaconf import OmegaConf

from llama_lab.config.components import CONF_DIR
from tests.faster import work_faster
from tests.stand_in import READ_BY_IMPORTS, SIZE, receive, request_fork

MODULES = (
    "llama_lab.cli",
    "llama_lab.training.command",
    "llama_lab.study.evaluate_all",
    "llama_lab.report.write",
    "torch.utils.tensorboard",
)
"""What trainings, studies and evaluations import; but for wandb, which makes a folder as it is imported."""

CHECKOUT = Path(__file__).parents[1]
STAND_IN = """#!{python} -IS
import sys
sys.path.insert(0, {checkout!r})
from tests.stand_in import main
main({python!r}, {address!r}, {variables!r})
"""


class PreloadedPython:
    """Starts scripts in forks of a server with these environment variables; a context manager, which ends it.

    executable: a file in `folder` to use in place of `python`: its processes are forks where possible, and so are the
    processes that those start; see `tests.stand_in`. All this needs Linux; elsewhere it starts new processes.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = dict(environment)
        self._address = f"\0llama-lab-{uuid4()}"  # an abstract one, which is no file
        self.executable = sys.executable if sys.platform != "linux" else str(folder / "python")

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            return self
        stand_in = Path(self.executable)
        variables = {name: self._environment.get(name) for name in READ_BY_IMPORTS}
        python, checkout, address = sys.executable, str(CHECKOUT), self._address
        stand_in.write_text(STAND_IN.format(python=python, checkout=checkout, address=address, variables=variables))
        stand_in.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(listener.fileno())],
                cwd=CHECKOUT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        assert self._server.stdout is not None
        assert self._server.stdout.read(1), "the server has died"  # it has imported: tests can measure what they start
        return self

    def __exit__(self, *_: object) -> None:
        if sys.platform == "linux":
            self._server.communicate()  # closes its standard input, which ends it

    def start(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """What `subprocess.Popen([sys.executable, *command], **options)` starts; `command` begins with a script.

        The options are stdin, stdout, stderr, text, cwd, env, start_new_session, and executable, the Python that the
        fork starts in its turn: new processes, unless it is `self.executable`.
        """
        options = {"env": self._environment, "executable": sys.executable, **options}
        if sys.platform != "linux":
            return subprocess.Popen([sys.executable, *command], **options)
        return Fork(self._address, command, **options)


class Fork(subprocess.Popen[Any]):
    """A child of the server at this address, killed when this object is deleted."""

    def __init__(self, address: str, command: Sequence[str], **options: Any) -> None:
        self._address = address
        self._own_session = options.get("start_new_session", False)
        super().__init__(command, **options)

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        executable, cwd, environment, pipes = rest[0], *rest[4:6], rest[9:15]  # of pipes both ends, -1 for none
        streams = [pipe if pipe >= 0 else stream for stream, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = (executable, list(args), os.path.abspath(cwd or "."), environment, self._own_session, [])
        self._connection = request_fork(self._address, request, streams)
        self.pid = receive(self._connection)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen.wait`."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = receive(self._connection)
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def serve(listener: socket.socket) -> list[str]:
    """Fork a child for each request. Returns in the children alone: the command that each is to run.

    A connection brings a request, the arguments of `become`, with three streams; it takes the pid and the exit status.
    """
    forks: dict[int, tuple[int, socket.socket]] = {}  # pid and connection, by what shows that the fork has ended
    while True:
        waiting = {connection: pid for pid, connection in forks.values()}
        for ready in select.select([sys.stdin, listener, *forks, *waiting], [], [])[0]:
            if ready is sys.stdin:  # the tests have ended
                for pid in waiting.values():
                    kill_group(pid)
                os._exit(0)
            elif ready is listener:
                connection, _ = listener.accept()
                size, streams, *_ = socket.recv_fds(connection, SIZE, 5)
                if not size:  # killed before it could ask
                    continue
                request = marshal.loads(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
                pid = os.fork()
                if pid == 0:
                    for _, others in forks.values():
                        others.detach()  # its number may become another file's, which is not to be closed with it
                    return become(*request, streams, connection)
                for stream in streams:
                    os.close(stream)
                forks[os.pidfd_open(pid)] = (pid, connection)
            elif ready in waiting:  # who waits for it has died
                kill_group(waiting[ready])
            else:
                pid, connection = forks.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError), connection:
                    connection.sendall(code.to_bytes(SIZE, signed=True))


def kill_group(leader: int) -> None:
    """Kill a process group, if it is there."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def become(
    executable: str,
    command: list[str],
    cwd: str,
    environment: dict[str, str],
    own_session: bool,
    kept: list[int],
    streams: list[int],
    connection: socket.socket,
) -> list[str]:
    """Make this fork the process that `executable *command` would be, before its imports; the command.

    kept: the numbers of open files after the standard streams.
    """
    if own_session:
        os.setsid()
    else:
        os.setpgid(0, 0)  # so that it can be killed with what it has started
    os.write(connection.detach(), os.getpid().to_bytes(SIZE, signed=True))
    numbers = [0, 1, 2, *sorted(kept)]
    aside = dict(zip([0, 1, 2, *kept], [fcntl(stream, F_DUPFD, max(numbers) + 1) for stream in streams], strict=True))
    for number, stream in aside.items():
        os.dup2(stream, number)
    for number, following in pairwise([*numbers, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(number + 1, following)
    os.chdir(cwd)
    given = {os.fsdecode(line.partition(b"=")[0]) for line in Path("/proc/self/environ").read_bytes().split(b"\0")}
    for name in given & os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)  # imports have set others
    sys.executable = executable
    multiprocessing.set_executable(executable)
    users = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[0] = cwd if command[0] == "-m" else os.path.dirname(command[0])
    sys.path[1:1] = [folder for folder in users if folder and folder not in sys.path]
    sys.argv = command[1:] if command[0] == "-m" else command
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through="PYTHONUNBUFFERED" in environment)
    return command


def main() -> None:
    """Import, serve, and in the forks run the command."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    for module in MODULES:
        importlib.import_module(module)
    del os.environ["JE_ARROW_MALLOC_CONF"]
    work_faster(setattr)
    for file in CONF_DIR.rglob("*.yaml"):  # which no fork has to read again
        OmegaConf.load(file)
    from lightning.fabric.utilities import rank_zero

    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    gc.freeze()  # so that a collection in a fork does not copy what the server has allocated
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.write(1, b"!")
    command = serve(listener)
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # read as Lightning is imported
    status = 0
    try:
        if command[0] == "-c":
            exec(command[1], {"__name__": "__main__"})
        elif command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            raise
        status = stop.code or 0
    except KeyboardInterrupt:
        # As Python does by itself, unless what libraries do at its end makes it forget why it ends.
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)  # as Python does, but for its teardown, which takes two seconds


if __name__ == "__main__":
    main()
