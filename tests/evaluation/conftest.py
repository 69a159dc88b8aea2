"""Finished runs of ten steps to evaluate, and copies of them to harm."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_lab.training.command import train_run
from tests.training.tiny import planned


@pytest.fixture(scope="session")
def trained(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train a run of these settings; the same one for the same settings."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in runs:
            planned_run = planned(*tiny, "train.tokens=2560", f"runs_dir={tmp_path_factory.mktemp('runs')}", *overrides)
            assert train_run(planned_run) == "done"
            runs[overrides] = planned_run.folder.path
        return runs[overrides]

    return run


@pytest.fixture(scope="session")
def learned(trained: Callable[..., Path]) -> Path:
    """A run whose positions and whose characters have an end."""
    return trained("position=learned", "tokenizer=char")


@pytest.fixture(scope="session")
def endless(trained: Callable[..., Path]) -> Path:
    """A run whose windows slide: its texts have no end."""
    return trained("attention=gqa", "model.attention.window=5")


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a run, so that it may be written to."""
    return lambda run: shutil.copytree(run, tmp_path / "copies" / "run")
