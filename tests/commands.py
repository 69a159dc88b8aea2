"""Commands, inside this process or as new ones, and what they leave."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from llama_lab.config.grammar import override_key


@dataclass(frozen=True)
class Ran:
    """What a command left behind: its exit code, what it printed, and the folder it ran in."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def run(self) -> Path:
        """The folder of its only run."""
        (status,) = (self.cwd / "runs").rglob("status.json")
        return status.parent


def last_of_each(overrides: Iterable[str]) -> list[str]:
    """The overrides, each key once and with its last value: so a test may change what `tiny` sets."""
    return list({override_key(o) if "=" in o else o: o for o in overrides}.values())


def without_keys(environment: dict[str, str], home: Path) -> dict[str, str]:
    """An environment that no W&B setting, key or Hydra setting of this machine reaches."""
    kept = {k: v for k, v in environment.items() if not k.startswith(("WANDB_", "HYDRA_", "LLAMA_LAB_", "COLUMNS"))}
    ours = {"NETRC": str(home / "no_netrc"), "LLAMA_LAB_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    return {**kept, **ours}


def run_new(command: list[str], cwd: Path, environment: Mapping[str, str]) -> Ran:
    """Run `python *command` as a new process, with standard input closed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return Ran(done.returncode, done.stdout, done.stderr, cwd)


def enter(folder: Path, environment: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    """Have commands inside this process start in a folder, with no key of this machine."""
    patch.chdir(folder)
    for name in os.environ.keys() - environment.keys():
        patch.delenv(name)
    for name in ("NETRC", "LLAMA_LAB_CACHE"):
        patch.setenv(name, environment[name])


def exit_code(function: Callable[[], None], argv: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a command of ours inside this process; its exit code."""
    for name in ("HYDRA_FULL_ERROR", "LLAMA_LAB_TRACEBACK"):  # the command sets them
        patch.setenv(name, "0")
    patch.setattr(sys, "argv", argv)
    GlobalHydra.instance().clear()
    try:
        function()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
