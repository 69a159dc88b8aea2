"""A search that has something to prune, on any launcher, and what a search leaves."""

import csv
import json
from pathlib import Path

from tests.conftest import Ran
from tests.training.tiny import rows

SEARCH = ("--multirun", "hydra/sweeper=optuna", "name=found", "trainer=cpu")
STEPS = 195
PRUNING = (
    *SEARCH,
    "train.tokens=50000",
    "optim.lr=5e-3,1e-9",
    "hydra/sweeper/sampler=grid",
    "hydra.sweeper.seed=1",  # which leaves the order of two as it is
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.pruner.n_startup_trials=1",
)


def trials(cwd: Path, name: str = "found") -> list[dict[str, str]]:
    """The rows of search.csv."""
    with (cwd / "runs" / name / "search.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def status(run: Path) -> str:
    """What a run's folder says about it."""
    return str(json.loads((run / "status.json").read_text())["status"])


def pruned(ran: Ran) -> Path:
    """The folder of the second trial of PRUNING, which was pruned, as everything says."""
    assert ran.code == 0, ran.err
    good, bad = trials(ran.cwd)
    assert (good["optim.lr"], good["status"], bad["status"]) == ("0.005", "done", "pruned")
    assert int(good["evaluations"]) == 4 > int(bad["evaluations"])
    assert f"trial 1: optim.lr=1e-09: pruned at evaluation {bad['evaluations']}" in ran.out
    assert "best of 2 trials: 1 done, 1 pruned" in ran.out
    folder = ran.cwd / bad["folder"]
    assert status(folder) == "pruned"
    assert rows(folder)[-1]["step"] < STEPS
    assert not (folder / ".prune").exists()
    return folder
