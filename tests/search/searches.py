"""What a search leaves, and what it is refused with."""

import csv
from pathlib import Path

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode

from llama_lab.cli import train_task
from llama_lab.config.grammar import to_hydra
from llama_lab.search.search import search
from tests.conftest import last_of_each
from tests.study.planning import commanding, packaged, refused

SEARCHING = ("hydra/sweeper=optuna", "name=found", "trainer=cpu")
SEARCH = ("--multirun", *SEARCHING)


def trials(cwd: Path, name: str = "found") -> list[dict[str, str]]:
    """The rows of search.csv."""
    with (cwd / "runs" / name / "search.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def search_refusal(*overrides: str) -> str:
    """What the search of `python train.py *overrides` is refused with, in the line after `error: `."""

    def begin() -> None:
        cfg = packaged().load_configuration("config", to_hydra(last_of_each(overrides)), RunMode.MULTIRUN)
        HydraConfig.instance().set_config(cfg)
        context = HydraContext(config_loader=packaged(), callbacks=Callbacks())
        search(cfg, context, train_task, list(cfg.hydra.overrides.task))

    with commanding():
        return refused(begin, overrides)
