"""Trained runs, as the evaluations have them, a model that transformers saved, and the command."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llama_lab.cli import convert_command
from tests.conftest import Command, Ran
from tests.evaluation.conftest import copied, trained
from tests.hf.theirs import their_model

__all__ = ["copied", "trained"]


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA that transformers saved in two shards."""
    folder = tmp_path_factory.mktemp("llama")
    their_model("llama").save_pretrained(folder, max_shard_size="150KB")
    return folder


@pytest.fixture
def llama(saved_llama: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    return shutil.copytree(saved_llama, tmp_path / "llama")


@pytest.fixture
def converting(in_process: Callable[..., Ran]) -> Command:
    """Run `llama-lab-convert` inside this process."""
    return lambda *arguments: partial(in_process, convert_command, "llama-lab-convert")(*map(str, arguments))
