"""Sweeps of tasks that do not train, through the launcher, and launchers that are to be disturbed."""

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_lab.cli import hydra_command
from llama_lab.launching import launch
from tests.conftest import TRAIN, Ran, last_of_each
from tests.launching.tasks import act
from tests.preloaded import PreloadedPython

ON_CPU = ("trainer=cpu", "hydra/launcher=local_gpus")
ACTING = ("-m", "tests.launching.tasks", "--multirun", "arm=a")
TRAINING = (str(TRAIN), "--multirun", "arm=a")

Sweep = Callable[..., Ran]
Launcher = subprocess.Popen[str]


@pytest.fixture
def sweep(
    in_process: Sweep,
    monkeypatch: pytest.MonkeyPatch,
    tiny: list[str],
    environment: dict[str, str],
    preloaded: PreloadedPython,
) -> Sweep:
    """Run `python train.py --multirun *overrides` inside this process, its runs `act` in processes of their own."""
    monkeypatch.setenv("PYTHONPATH", str(TRAIN.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])  # which imports in `preloaded` have read
    monkeypatch.setattr(launch, "program", lambda: [preloaded.executable, "-m", "tests.launching.tasks"])
    acting = partial(hydra_command, act, "config", "the same command goes on")
    return partial(in_process, acting, "train.py", "--multirun", *tiny, "arm=a")


@pytest.fixture
def start(
    preloaded: PreloadedPython, environment: dict[str, str], tiny: list[str], tmp_path: Path
) -> Iterator[Callable[..., Launcher]]:
    """Start `python *program *overrides` in a session of its own. It and its runs are forks, see `PreloadedPython`."""
    started: list[Launcher] = []

    def launcher(*overrides: str, program: tuple[str, ...] = ACTING, **variables: str) -> Launcher:
        process = preloaded.start(
            [*program, *last_of_each([*tiny, *overrides])],
            executable=preloaded.executable,
            env={**environment, "PYTHONPATH": str(TRAIN.parent), **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield launcher
    for process in started:
        process.kill()
        process.wait()


def ended(launcher: Launcher) -> tuple[int, str]:
    """The exit status of a launcher, and what it printed."""
    printed, _ = launcher.communicate()
    return launcher.returncode, printed


def mark(cwd: Path, seed: int) -> dict[str, Any]:
    """What the run of this seed saw."""
    return dict(json.loads((cwd / f"mark{seed}").read_text()))


def folder(cwd: Path, seed: int) -> Path:
    """The folder of the run of this seed."""
    return cwd / "runs" / "llama" / "a" / f"seed={seed}"


def status(cwd: Path, seed: int) -> str:
    """How its folder says that it ended."""
    return str(json.loads((folder(cwd, seed) / "status.json").read_text())["status"])


def saved(runs: Iterable[Path], since: float) -> int:
    """How many of these runs have written a checkpoint since then."""
    found = 0
    for run in runs:
        with suppress(FileNotFoundError):  # replaced just now
            found += (run / "checkpoints" / "last.ckpt").stat().st_mtime > since
    return found


def sessions(run: Path) -> int:
    """How often a run was interrupted and went on."""
    return len(json.loads((run / "environment.json").read_text())["earlier_sessions"])
