"""A side of `peers` in a process of its own, which works only when it is told to."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

from llama_lab.errors import ConfigError

from . import side
from .side import Spec

INSTALL = {
    "transformers": "pip install 'transformers>=5,<6'",
    "x-transformers": "pip install 'x-transformers>=2.31,<3'",
    "litgpt": "pip install litgpt",
}
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # mallopt(3); in effect `keep_freed_memory`


@dataclass(frozen=True)
class Contender:
    """A side, the Python that it runs in, and whether its C library keeps freed memory."""

    spec: Spec
    kept: bool
    python: str = sys.executable

    @property
    def name(self) -> str:
        """What tables call it."""
        return "ours, memory kept" if self.spec.side == "ours" and self.kept else self.spec.side


@dataclass
class Measured:
    """What was found of a contender: tokens per second in every round, and the loss of every step, warm-up included.

    version: of its package. torch: its PyTorch's.
    """

    contender: Contender
    params: int
    version: str
    torch: str
    speeds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class SideProcess:
    """The process of a contender; see `started`. errors: its standard error. missing: the module that it lacks."""

    missing = ""

    def __init__(self, contender: Contender, process: "subprocess.Popen[str]", errors: IO[str]) -> None:
        self.contender = contender
        self._process, self._errors = process, errors

    def ready(self) -> Measured | None:
        """Wait until it is ready; None if it lacks a module. Raises ConfigError if it fails."""
        answer = self._answer()
        self.missing = answer.pop("missing", "")
        return None if self.missing else Measured(self.contender, **answer)

    def work(self, count: int) -> tuple[float, list[float]]:
        """Let it do so many steps or texts: the seconds, and the loss of each step. Raises ConfigError if it fails."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer["seconds"], answer["losses"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            *_, last = self._errors.read().strip().splitlines() or ["without a message"]
            raise ConfigError(f"{self.contender.name}: its process ended, {last.strip()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(contender: Contender) -> Iterator[SideProcess]:
    """Start a contender's process; it ends with the block. Raises ConfigError if its Python is not there."""
    command = [contender.python, "-P", side.__file__, contender.spec.dumps()]  # -P: or neighbours could hide modules
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=errors, text=True, env=environment(contender)
            )
        except OSError as error:
            option = f"--{contender.spec.side}={contender.python}"
            raise ConfigError(f"{option}: {error.strerror}; give the path of a Python") from None
        with process:
            try:
                yield SideProcess(contender, process, errors)
            except BaseException:
                process.kill()
                raise


def environment(contender: Contender) -> dict[str, str]:
    """The environment of a contender's process; ours finds the packages of this checkout."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(contender.spec.threads), "HF_HUB_OFFLINE": "1"}
    if contender.kept:
        variables |= KEEP
    if contender.spec.side == "ours":
        paths = (str(Path(__file__).parents[1]), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


def skipped(process: SideProcess) -> str:
    """What to say of a contender that lacks a module."""
    side, python = process.contender.spec.side, process.contender.python
    where = "" if python == sys.executable else f" for {python}"
    return f"{side} is skipped: {process.missing} is not installed{where}; {INSTALL[side]}"
