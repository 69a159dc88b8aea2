"""The process of a run: its command and environment, and how it is started, stopped and polled. Quick to import."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_lab.config.grammar import TYPED, is_launched, override_key
from llama_lab.util.errors import INTERRUPTED

LIFELINE = "LLAMA_LAB_LIFELINE"  # set where standard input is a pipe that closes when the launcher exits
LAST_WORDS_SECONDS = 5.0
STOPPED = (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)  # exit statuses of a run that was asked to stop
# Variables that make a process a rank of a larger one. A launched run starts without them.
RANKS = r"((LOCAL|GROUP|NODE)_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"


def program() -> list[str]:
    """The command of this process, without arguments."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return [sys.executable, str(Path(sys.argv[0]).absolute())]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__")]


def starts_over(word: str) -> bool:
    """Whether this word of a command has it delete its run: one that goes on is without it."""
    return override_key(word) == "overwrite"


def run_variables() -> dict[str, str]:
    """Environment variables for every launched run."""
    typed = [argument for argument in sys.argv if not argument.startswith("study.dry_run=")]  # which prints a script
    return {TYPED: json.dumps(typed), "PYTHONUNBUFFERED": "1"}  # so that a crash loses no line


def without_ranks(environ: Mapping[str, str], slurm: str) -> dict[str, str]:
    """The environment without the variables `RANKS`, and those of Slurm's that match the pattern `slurm`."""
    return {name: value for name, value in environ.items() if not re.fullmatch(f"{RANKS}|{slurm}", name)}


def follow_launcher() -> None:
    """In a run with a lifeline: kill its process group as soon as its launcher has exited, however that happened.

    A run without its launcher would train on unseen, and keep the same command out of its folder.
    """
    if LIFELINE in os.environ:

        def wait_and_kill() -> None:
            while os.read(0, 1):
                pass
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=wait_and_kill, daemon=True).start()


@contextmanager
def first_rank_first() -> Iterator[None]:
    """In a launched run, hold back the errors of all ranks but the first, which reports and records them.

    srun kills the others as soon as one exits.
    """
    try:
        yield
    except Exception:
        if is_launched() and os.environ.get("SLURM_PROCID", "0") != "0":
            time.sleep(LAST_WORDS_SECONDS)
        raise


class RunProcess:
    """A run in a process group of its own, with a lifeline. Its output is appended to the file `output`."""

    def __init__(self, command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path) -> None:
        with output.open("ab") as stream:
            self._process = subprocess.Popen(
                command,
                env={**environment, LIFELINE: "1"},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid = self._process.pid

    def _exit_status(self) -> int | None:
        return self._process.poll()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs. Kills what is left of an ended process group."""
        exit_status = self._exit_status()
        if exit_status is not None:
            self.send(signal.SIGKILL)
        return exit_status

    def kill(self) -> None:
        """Kill the process group and wait for the process to exit."""
        self.send(signal.SIGKILL)
        while self._exit_status() is None:
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process group, if any of it is left, such as SIGINT, as Ctrl-C does."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, number)
