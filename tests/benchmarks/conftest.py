"""The command of the benchmarks, as a process."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import Command, Ran
from tests.preloaded import PreloadedPython

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def bench(preloaded: PreloadedPython, environment: dict[str, str], tmp_path: Path) -> Command:
    """Run the command as a process in a fresh folder, 80 columns wide."""

    def run(*arguments: str) -> Ran:
        done = subprocess.run(
            [preloaded.executable, "-m", "benchmarks", *arguments],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return Ran(done.returncode, done.stdout, done.stderr, tmp_path)

    return run
