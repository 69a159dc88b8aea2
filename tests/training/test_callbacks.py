"""Callbacks of a user's own, and the metrics that they and their modules log."""

import re
from pathlib import Path

import pytest

from llama_lab.runs.metrics import read_metrics
from tests.conftest import Command
from tests.training.tiny import own_options

CALLBACKS = """import lightning as L
from torch import nn


class Counting(L.Callback):
    def __init__(self, name="trial/step", fails=False):
        self.name, self.fails = name, fails

    def on_train_batch_end(self, trainer, pl_module, *others):
        if self.fails:
            raise KeyError("lost")
        self.log(self.name, trainer.global_step)

    def on_validation_end(self, trainer, pl_module):
        self.log("trial/evaluated", 1.0)


class Undefined(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *others):
        self.log_dict({"trial/nan": float("nan"), "trial/one": 1})


class Telling(nn.Module):
    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.down(self.up(x).relu())

    def metrics_to_log(self):
        return {"bias": self.up.bias.norm()}
"""


@pytest.fixture
def mine(tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of a short run of 8 steps that logs every second one, with options of a user's own."""
    counting = "counting: {_target_: callback_lab.own.Counting, name: trial/step, fails: false}"
    options = {"callbacks/counting": counting, "ffn/telling": "_target_: callback_lab.own.Telling\n_partial_: true"}
    conf = own_options(tmp_path, monkeypatch, "callback_lab/own.py", CALLBACKS, options)
    return [conf, *tiny, "arm=a", "train.log_every=2"]


def test_what_a_callback_logs_is_the_mean_since_the_last_row(mine: list[str], command: Command) -> None:
    ran = command(*mine, "callbacks=counting")
    assert ran.code == 0, ran.err
    rows = read_metrics(ran.run / "metrics.csv")
    logged = {row["step"]: row["trial/step"] for row in rows if "trial/step" in row}
    assert logged[1] == 1
    assert logged[2] == 2
    assert logged[4] == 3.5
    assert all("trial/evaluated" in row for row in rows if "val/loss" in row)


def test_what_a_module_logs_has_its_name_and_layer(mine: list[str], command: Command) -> None:
    ran = command(*mine, "ffn=telling")
    assert ran.code == 0, ran.err
    rows = [row for row in read_metrics(ran.run / "metrics.csv") if "train/loss" in row]
    assert rows[0]["blocks.0.ffn.bias"] < rows[-1]["blocks.0.ffn.bias"]


def test_a_number_that_is_none_is_left_out_and_told_once(mine: list[str], command: Command) -> None:
    ran = command(*mine, "callbacks={own: {_target_: callback_lab.own.Undefined}}")
    assert ran.code == 0
    assert ran.err.count("trial/nan: is nan, which is left out of metrics.csv and dashboards") == 1
    rows = read_metrics(ran.run / "metrics.csv")
    assert all("trial/nan" not in row for row in rows)
    assert rows[0]["trial/one"] == 1


FAULTS = {
    "counting.fails=true": r"callback_lab/own\.py:\d+, in on_train_batch_end: .*lost.*",
    "counting.name=val/loss": r"callback_lab/own\.py:\d+, in on_train_batch_end: ValueError: val/loss: is the name .*",
    "counting._target_=torch.nn.Identity": r"callbacks\.counting=torch\.nn\.Identity: builds a Identity; name a .*",
}


@pytest.mark.parametrize("override", FAULTS)
def test_a_callback_that_cannot_work_is_one_line(override: str, mine: list[str], command: Command) -> None:
    ran = command(*mine, "callbacks=counting", f"callbacks.{override}")
    assert ran.code == 2
    assert re.fullmatch(rf"error: {FAULTS[override]}\n", ran.err), ran.err
