"""What a run's folder gives is what was trained, and one that is not whole is refused in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_lab.evaluation.evaluate import check_done
from llama_lab.evaluation.load import load_run
from llama_lab.runs.folder import RunFolder
from llama_lab.util.errors import ConfigError

LAST = Path("checkpoints/last.ckpt")
Copied = Callable[[Path], Path]


def load_finished(run: Path) -> None:
    """What an evaluation does first."""
    check_done(RunFolder(run))
    load_run(run)


def refusal(run: Path) -> str:
    """Why a folder cannot be evaluated."""
    with pytest.raises(ConfigError, match=rf"^[^\n]*{run}[^\n]*$") as caught:
        load_finished(run)
    return str(caught.value)


def test_a_loaded_run_has_the_weights_the_tokenizer_and_the_step_of_its_folder(endless: Path) -> None:
    run = load_run(endless)
    saved = torch.load(endless / LAST, weights_only=True)
    assert run.step == saved["global_step"] == 10
    state = run.model.state_dict()
    assert {f"model.{name}" for name in state} == saved["state_dict"].keys()
    assert all(torch.equal(state[name], saved["state_dict"][f"model.{name}"]) for name in state)
    assert not run.model.training
    assert run.tokenizer.hash == run.environment.tokenizer_hash
    assert run.tokenizer.decode(run.tokenizer.encode("a€")) == "a€"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {}}, "is no checkpoint of ours"),
        ({"state_dict": {1: 2}, "global_step": 1}, "is no checkpoint of ours"),
        ({"state_dict": {"a": torch.ones(2)}, "global_step": 1}, "does not fit the model of its resolved.yaml, "),
    ],
)
def test_another_program_s_checkpoint_is_refused(content: Any, message: str, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    torch.save(content, run / LAST)
    assert message in refusal(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (str(LAST), "does not fit the model"),
        ("tokenizer.json", "tokenizer.json is not the one it was trained with; restore the file"),
        ("resolved.yaml", "does not fit the model"),
    ],
)
def test_a_file_of_another_run_is_refused(
    name: str, message: str, endless: Path, learned: Path, copied: Copied
) -> None:
    run = copied(endless)
    shutil.copy(learned / name, run / name)
    assert message in refusal(run)


@pytest.mark.parametrize("status", ["interrupted", "diverged"])
def test_an_unfinished_run_is_not_evaluated(status: Any, endless: Path, copied: Copied) -> None:
    run = copied(endless)
    RunFolder(run).write_status(status, "because")
    assert f"is {status} (because), and its losses would not be those of its budget" in refusal(run)
    assert load_run(run).step == 10
