"""A study that is killed again and again ends as if it never had been."""

import csv
import random
import signal
from pathlib import Path

import pytest

from tests.conftest import RunTrain
from tests.study.planning import conducted

STUDY = (
    "study=ladder",
    "study.learning_rates=null",
    "study.measure_speed=false",
    "study.axes=[norm]",
    "study.seeds=[1,2]",
    "name=climb",
    "train.tokens=5120",
    "train.checkpoint_every=5",
    "hydra/launcher=basic",
)
STEPS = 80  # of all runs
TIMED = ("seconds", "tokens_per_second", "peak_memory", "mfu")  # parts of the names of columns that differ by chance

# Trains as train.py does, until the kernel kills it some time after so many steps.
MORTAL = """
import itertools, os, signal
from llama_lab.cli import train_command
from llama_lab.training.checkpointing import Checkpointing

after, steps = Checkpointing.on_train_batch_end, itertools.count(1)

def on_train_batch_end(self, *rest):
    after(self, *rest)
    if next(steps) == int(os.environ["STEPS"]):
        signal.setitimer(signal.ITIMER_REAL, float(os.environ["SECONDS"]))

Checkpointing.on_train_batch_end = on_train_batch_end
train_command()
"""


def untimed(table: Path) -> list[dict[str, str]]:
    """summary.csv without what depends on the machine's mood."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not any(part in k for part in TIMED)} for row in rows]


@pytest.mark.slow
def test_kills_at_random_moments_change_no_number_of_the_report(
    run_train: RunTrain, tiny: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    draw = random.Random(1)
    script = tmp_path / "mortal.py"
    script.write_text(MORTAL)
    killed = tmp_path / "killed"
    killed.mkdir()
    for _ in range(2):
        moment = {"STEPS": str(draw.randrange(STEPS // 2)), "SECONDS": str(draw.uniform(0.001, 0.1))}
        assert run_train(*tiny, *STUDY, script=script, cwd=killed, **moment).code == -signal.SIGALRM
    found = []
    for folder in (killed, tmp_path / "whole"):
        folder.mkdir(exist_ok=True)
        assert conducted(folder, environment, *tiny, *STUDY).code == 0
        found.append(untimed(folder / "runs" / "climb" / "summary.csv"))
    assert found[0] == found[1]
    assert len(found[0]) == 2
