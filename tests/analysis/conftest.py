"""Analyses without what takes most of their time, and few tests look at."""

from functools import partial
from typing import Any

import pytest
from omegaconf import DictConfig

from llama_lab.analysis import analyse, audit
from llama_lab.training import schedule


@pytest.fixture
def with_curves() -> None:
    """Keep the curves of differences."""


@pytest.fixture(autouse=True)
def without_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the curves of differences, which take half of an analysis, unless a test has `with_curves`."""
    if "with_curves" not in request.fixturenames:
        monkeypatch.setattr(analyse, "difference_curves", lambda *_: ())


def our_schedule(node: DictConfig, _: str) -> Any:
    """The schedule of a config. Hydra's would check every call, and each rate of a run is one: half of the rest."""
    settings = {key: value for key, value in node.items() if not str(key).startswith("_")}
    return partial(getattr(schedule, node._target_.rpartition(".")[2]), **settings)


@pytest.fixture(autouse=True)
def schedules_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recompute the learning rates of runs without Hydra."""
    monkeypatch.setattr(audit, "build", our_schedule)
