"""What a component of the user's raises is reported in one line, with the place in the user's code."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Command, Ran
from tests.training.tiny import own_options

NORM = """import os

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.fail_at("building")

    def reset_parameters(self):
        nn.init.ones_(self.scale)

    def forward(self, x):
        self.fail_at("training" if torch.is_grad_enabled() else "writing" if x.shape[1] == 1 else "reading")
        return x * self.scale

    def fail_at(self, moment):
        if os.environ["FAIL_AT"] == moment:
            torch.ones(2, 3) @ torch.ones(2, 3)
"""
LINE = 1 + NORM.splitlines().index("            torch.ones(2, 3) @ torch.ones(2, 3)")
PLACE = f"users_lab/norm.py:{LINE}, in fail_at"


@pytest.fixture
def norm(tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of a run with a norm of the user's, which fails at the moment that FAIL_AT names."""
    option = {"norm/mine": "_target_: users_lab.norm.Norm\n_partial_: true"}
    conf = own_options(tmp_path, monkeypatch, "users_lab/norm.py", NORM, option)
    return [conf, *tiny, "norm=mine", "train.tokens=256", "arm=a"]


def assert_reported(ran: Ran) -> None:
    """One line, which names the place, and status 2."""
    assert ran.code == 2
    assert re.fullmatch(rf"error: .*{re.escape(PLACE)}.*HYDRA_FULL_ERROR=1 shows .*\n", ran.err), ran.err
    assert "RuntimeError: " in ran.err


@pytest.mark.parametrize("moment", ["building", "training", "writing"])
def test_what_fails_in_a_run_is_reported_with_its_place_and_the_status_says_failed(
    moment: str, norm: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_AT", moment)
    ran = command(*norm)
    assert_reported(ran)
    if moment != "building":  # which is before there is a folder
        status = json.loads((ran.run / "status.json").read_text())
        assert (status["status"], status["message"][:14]) == ("failed", "RuntimeError: ")


@pytest.mark.slow
def test_what_fails_in_an_estimate_or_in_an_evaluation_is_reported(
    norm: list[str], command: Command, evaluating: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_AT", "training")
    assert_reported(command(*norm, "estimate=true", "device=h100"))
    monkeypatch.setenv("FAIL_AT", "")
    run = command(*norm).run
    monkeypatch.setenv("FAIL_AT", "reading")
    assert_reported(evaluating(f"run={run}", "eval.parts=[loss]", "trust=[users_lab]"))


def test_a_bug_of_ours_keeps_its_traceback(norm: list[str], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT", "")
    monkeypatch.setattr("llama_lab.training.recording.sample_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command(*norm)


def test_hydra_full_error_shows_the_error(norm: list[str], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT", "training")
    setenv = monkeypatch.setenv
    monkeypatch.setattr(monkeypatch, "setenv", lambda name, _: setenv(name, "1"))
    with pytest.raises(ValueError, match=re.escape(PLACE)) as raised:
        command(*norm)
    assert isinstance(raised.value.__cause__, RuntimeError)
