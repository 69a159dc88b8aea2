"""A stand-in for `python` that asks the preloaded Python for a fork to run a script of ours, or a server of forks.

It passes signals on to the fork and exits as the fork exits; when it is killed, the fork is killed a moment later. The
fork has a session of its own. Anything else is run by a new Python process, and so are scripts whose environment
differs in a variable that libraries read as they are imported. It imports little, so that it starts at once.
"""

import marshal
import os
import signal
import socket
import sys
from contextlib import suppress

SIZE = 4  # bytes of an integer between the processes
MODULES = ("tests.launching.tasks", "torch.distributed.run")  # of those that `-m` may name
READ_BY_IMPORTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


FORKSERVER = "from multiprocessing.forkserver import main; main("  # the code of `-c`; numbers of two open files follow

Request = tuple[str, list[str], str, dict[str, str], bool, list[int]]  # the first arguments of `tests.preloaded.become`


def request_fork(address: str, request: Request, streams: list[int]) -> socket.socket:
    """Ask the server for a fork with these open files, see `tests.preloaded.serve`. It sends the pid,
    and later the exit status.
    """
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    content = marshal.dumps(request)
    socket.send_fds(server, [len(content).to_bytes(SIZE), content], streams)
    return server


def receive(server: socket.socket) -> int:
    """An integer that the server sends."""
    received = server.recv(SIZE)
    assert received, "the server has died"
    return int.from_bytes(received, signed=True)


def main(python: str, address: str, variables: dict[str, str | None]) -> None:
    """Run the arguments as `python` would. address, variables: of the server, those that imports read."""
    command = sys.argv[1:]
    flags = {command.pop(0) for _ in range(2) if command[:1] in (["-u"], ["-B"])}  # -B is the server's, too
    script, module = [*command, "", ""][:2]
    is_ours = (script.endswith(".py") and "site-packages" not in script) or (script == "-m" and module in MODULES)
    is_server = script == "-c" and module.startswith(FORKSERVER)
    kept = [int(number) for number in module.removeprefix(FORKSERVER).split(", ")[:2]] if is_server else []
    if not (is_ours or is_server) or variables != {name: os.environ.get(name) for name in READ_BY_IMPORTS}:
        os.execv(python, [python, *sys.argv[1:]])
    environment = dict(os.environ) | ({"PYTHONUNBUFFERED": "1"} if "-u" in flags else {})
    server = request_fork(address, (sys.argv[0], command, os.getcwd(), environment, True, kept), [0, 1, 2, *kept])
    fork = receive(server)

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(fork, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    status = receive(server)
    if status < 0:
        if -status in SIGNALS:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
