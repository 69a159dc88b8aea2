"""Sweeps of tasks that do not train, through the launcher, and launchers that are to be disturbed."""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_lab.cli import hydra_command
from llama_lab.launching import launch
from tests.conftest import TRAIN, Ran, Start, last_of_each
from tests.launching import tasks
from tests.processes import Started

ON_CPU = ("trainer=cpu", "hydra/launcher=local_gpus")
ACTING = (tasks.__file__, "--multirun", "arm=a")
TRAINING = (str(TRAIN), "--multirun", "arm=a")

Sweep = Callable[..., Ran]
Launch = Callable[..., Started]


@pytest.fixture
def sweep(in_process: Sweep, monkeypatch: pytest.MonkeyPatch, tiny: list[str]) -> Sweep:
    """Run `python train.py --multirun *overrides` inside this process, its runs `act` in processes of their own."""
    monkeypatch.setenv("PYTHONPATH", str(TRAIN.parent))
    monkeypatch.setattr(launch, "program", lambda: [sys.executable, "-m", "tests.launching.tasks"])
    acting = partial(hydra_command, tasks.act, "config", "the same command goes on")
    return partial(in_process, acting, "train.py", "--multirun", *tiny, "arm=a")


@pytest.fixture
def launcher(start: Start, tiny: list[str], tmp_path: Path) -> Launch:
    """Start `python *program *overrides`."""

    def begin(*overrides: str, program: tuple[str, ...] = ACTING, **variables: str) -> Started:
        command = [*program, *last_of_each([*tiny, *overrides])]
        return start(*command, cwd=tmp_path, PYTHONPATH=str(TRAIN.parent), **variables)

    return begin


def ended(launcher: Started) -> tuple[int, str]:
    """The exit status of a launcher, and what it printed."""
    return launcher.wait(), launcher.out.read_text() + launcher.err.read_text()


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
