"""A search that has something to prune, on any launcher, and what a search leaves."""

import csv
import json
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode

from llama_lab.cli import train_task
from llama_lab.config.grammar import to_hydra
from llama_lab.search.search import search
from tests.conftest import Ran, last_of_each
from tests.study.planning import Loader, commanding, refused
from tests.training.tiny import rows

SEARCHING = ("hydra/sweeper=optuna", "name=found", "trainer=cpu")
SEARCH = ("--multirun", *SEARCHING)
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


def search_refusal(*overrides: str) -> str:
    """What the search of `python train.py *overrides` is refused with, in the line after `error: `."""

    def begin() -> None:
        cfg = Loader().load_configuration("config", to_hydra(last_of_each(overrides)), RunMode.MULTIRUN)
        HydraConfig.instance().set_config(cfg)
        context = HydraContext(config_loader=Loader(), callbacks=Callbacks())
        search(cfg, context, train_task, list(cfg.hydra.overrides.task))

    with commanding():
        return refused(begin, overrides)
