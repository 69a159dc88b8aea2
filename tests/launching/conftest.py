"""Sweeps of tasks that do not train, through the launcher."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from llama_lab.cli import hydra_command
from llama_lab.launching import launch
from tests.conftest import TRAIN, Ran, last_of_each
from tests.launching.tasks import act
from tests.preloaded import PreloadedPython

ON_CPU = ("trainer=cpu", "hydra/launcher=local_gpus")

Sweep = Callable[..., Ran]


@pytest.fixture
def sweep(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny: list[str],
    environment: dict[str, str],
    preloaded: PreloadedPython,
) -> Sweep:
    """Run `python train.py --multirun *overrides` inside this process, its runs `act` in processes of their own."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(TRAIN.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])  # which imports in `preloaded` have read
    monkeypatch.setattr(launch, "program", lambda: [preloaded.executable, "-m", "tests.launching.tasks"])

    def run(*overrides: str) -> Ran:
        for name in ("HYDRA_FULL_ERROR", "LLAMA_LAB_TRACEBACK"):  # the command sets them
            monkeypatch.setenv(name, "0")
        monkeypatch.setattr(sys, "argv", ["train.py", *last_of_each(["--multirun", *tiny, "arm=a", *overrides])])
        GlobalHydra.instance().clear()
        capsys.readouterr()
        code = 0
        try:
            hydra_command(act, "config", "the same command goes on")
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err, tmp_path)

    return run


def mark(ran: Ran, seed: int) -> dict[str, Any]:
    """What the run of this seed saw."""
    return dict(json.loads((ran.cwd / f"mark{seed}").read_text()))


def status(ran: Ran, seed: int) -> str:
    """How its folder says that it ended."""
    return str(json.loads((folder(ran, seed) / "status.json").read_text())["status"])


def folder(ran: Ran, seed: int) -> Path:
    """The folder of the run of this seed."""
    return ran.cwd / "runs" / "llama" / "a" / f"seed={seed}"
