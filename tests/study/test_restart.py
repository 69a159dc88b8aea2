"""A study that is killed again and again ends as if it never had been."""

import csv
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import TRAIN, RunTrain, last_of_each
from tests.preloaded import PreloadedPython

STUDY = (
    "study=ladder",
    "study.learning_rates=null",
    "study.measure_speed=false",
    "study.axes=[norm]",
    "study.seeds=[1,2]",
    "name=climb",
    "train.tokens=10240",
    "train.checkpoint_every=5",
)
TIMED = ("seconds", "tokens_per_second", "peak_memory", "mfu")  # parts of the names of columns that differ by chance


def untimed(table: Path) -> list[dict[str, str]]:
    """summary.csv without what depends on the machine's mood."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not any(part in k for part in TIMED)} for row in rows]


def conduct(preloaded: PreloadedPython, command: list[str], cwd: Path, patience: float) -> bool:
    """Start a study, kill it with its process group after `patience` seconds; whether it came to its end before."""
    process = preloaded.start(
        command, executable=preloaded.executable, cwd=cwd, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert process.wait(timeout=patience) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_at_random_moments_change_no_number_of_the_report(
    run_train: RunTrain, preloaded: PreloadedPython, tiny: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    began = time.monotonic()
    uninterrupted = run_train(*tiny, *STUDY)
    took = time.monotonic() - began
    assert uninterrupted.code == 0, uninterrupted.err
    expected = untimed(uninterrupted.cwd / "runs" / "climb" / "summary.csv")
    assert len(expected) == 2

    command = [str(TRAIN), *last_of_each([*tiny, *STUDY])]
    draw = random.Random(1)
    kills = 0
    while kills < 10:
        cwd = tmp_path_factory.mktemp("killed")
        while not conduct(preloaded, command, cwd, draw.uniform(0.2, 0.9) * took):
            kills += 1
        assert untimed(cwd / "runs" / "climb" / "summary.csv") == expected
