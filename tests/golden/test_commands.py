"""What no change of the code may change: runs and studies of version 0.4.0, estimates, and what is refused."""

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import llama_lab
from llama_lab.cli import compare_command
from tests.conftest import Command, Ran
from tests.golden.files import RUNS, SMALL, check, numbers, read

PROBE = [*SMALL, "data=recall", "train.tokens=7680", "train.log_every=3"]
BEFORE = ("model.init.std=0.02", "model.embedding.std=0.02", "optim.lr=2e-3")  # what defaults were then
INTERRUPTED = [*PROBE, *BEFORE, "name=interrupted", "arm=base"]
STUDY = [
    *PROBE,
    *BEFORE,
    "study=options",
    "study.axis=norm",
    "study.options=[rmsnorm,layernorm]",
    "study.seeds=[1,2]",
    "study.measure_speed=false",
    "name=study",
]
LOSSES = ("train/loss", "val/loss", "val/accuracy")

TOLD = re.compile(r"error: .*(; |must |did you mean|such as|needs a|leaves room|are study\.seeds|too large).*\n")


@pytest.fixture
def compare(in_process: Callable[..., Ran]) -> Command:
    """Run `llama-lab-compare` inside this process."""
    return lambda *arguments: in_process(compare_command, "llama-lab-compare", *arguments)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of the runs, in the folder of the command."""
    return Path(shutil.copytree(RUNS, tmp_path / "runs"))


def rows(file: Path, *columns: str) -> list[dict[str, str]]:
    """The rows of a CSV file, or those columns of it, without empty cells."""
    with file.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    return [{key: row[key] for key in columns or row if row.get(key)} for row in found]


def floats(table: list[dict[str, str]]) -> list[dict[str, float]]:
    """The cells as numbers; texts are left out."""
    number = re.compile(r"[-\d.]+(e[-+]\d+)?")
    return [{key: float(cell) for key, cell in row.items() if number.fullmatch(cell)} for row in table]


@torch.no_grad()
def test_a_finished_run_is_loaded_and_writes_its_text(runs: Path) -> None:
    loaded = llama_lab.load(runs / "finished" / "base" / "seed=1")
    (row,) = llama_lab.read_runs(runs / "finished").to_dict("records")
    found = {"logits": loaded.model(torch.arange(20)[None])[0, ::19, :9].tolist()}
    found |= {"cfg": OmegaConf.to_container(loaded.cfg.model), "text": llama_lab.generate(loaded, "def f", 20)}
    check(
        "finished", found | {"row": {key: row[key] for key in ("seed", "status", "val/loss", "params", "step")}}, 1e-5
    )


def test_runs_and_studies_are_compared(runs: Path, compare: Command) -> None:
    assert compare("runs/study").code == 0
    assert compare("runs/finished", "runs/study", "--group-by", "norm,data", "--out", "both").code == 0
    check("compared", [floats(rows(folder / "summary.csv")) for folder in (runs / "study", runs.parent / "both")])


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_losses_of_one_that_was_not(runs: Path, command: Command) -> None:
    """To rounding: its first half was trained on another machine, whose processor may sum in another order."""
    for name in ("interrupted", "whole"):
        ran = command(*INTERRUPTED, f"name={name}")
        assert (ran.code, ran.err) == (0, "")
        check("gone_on", floats(rows(runs / name / "base" / "seed=1" / "metrics.csv", "step", *LOSSES)), 1e-5)


@pytest.mark.slow
def test_a_study_given_again_trains_nothing(runs: Path, command: Command) -> None:
    checkpoints = {file: file.stat().st_mtime_ns for file in runs.rglob("last.ckpt")}
    assert command(*STUDY).code == 0
    assert {file: file.stat().st_mtime_ns for file in runs.rglob("last.ckpt")} == checkpoints
    assert (runs / "study" / "report.html").exists()


@pytest.mark.slow
def test_an_estimate_has_its_numbers(command: Command) -> None:
    ran = command("estimate=true", "device=h100", "arch=llama2", "size=llama2_70b", "trainer.devices=64")
    assert (ran.code, ran.err) == (0, "")
    check("estimate", numbers(ran.out.splitlines()))


@pytest.mark.matrix
@pytest.mark.parametrize("case", read("refusals"), ids=lambda case: f"{case['command']} {case['key'][:40]}")
def test_a_refusal_has_its_exit_code_and_key(
    case: dict[str, Any],
    runs: Path,
    bad_files: Path,
    command: Command,
    evaluating: Command,
    compare: Command,
    tiny: list[str],
) -> None:
    """In one line with the fix, before a run begins. The golden file has the arguments; TINY are those of `tiny`."""
    commands = {"train": command, "eval": evaluating, "compare": compare}
    before = sorted(bad_files.rglob("*.json"))
    given: list[str] = []
    for argument in case["arguments"]:
        given += tiny if argument == "TINY" else [argument]
    ran = commands[case["command"]](*given)
    assert TOLD.fullmatch(ran.err), ran.err
    key = re.split("[:=]", ran.err.removeprefix("error: "), maxsplit=1)[0]
    assert (ran.code, key) == (case["code"], case["key"])
    assert sorted(bad_files.rglob("*.json")) == before
