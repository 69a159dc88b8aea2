"""What no change of the code may change: runs and studies of version 0.4.0, plans, estimates and refusals."""

import csv
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import llama_lab
from llama_lab.cli import compare_command
from llama_lab.training.monitor import Monitor
from tests.conftest import Command, Ran
from tests.golden import files
from tests.golden.files import FINISHED, RUNS, SMALL, check, numbers, read
from tests.training.stopping import at, stop

WRITTEN_BY = "0.4.0"
PROBE = [*SMALL, "data=recall", "train.tokens=7680", "train.log_every=3"]
INTERRUPTED = [*PROBE, "name=interrupted", "arm=base"]
STUDY = [
    *PROBE,
    "study=options",
    "study.axis=norm",
    "study.options=[rmsnorm,layernorm]",
    "study.seeds=[1,2]",
    "study.measure_speed=false",
    "name=study",
]
LOSSES = ("train/loss", "val/loss", "val/accuracy")

ANY = ["train.tokens=5120", "study.seeds=[1,2]", "study.dry_run=true"]
PLANS = {
    **{name: [] for name in ("ladder", "add_one", "leave_one_out", "kv_heads", "depth", "context", "learning_rate")},
    "recipes": [],
    "families": [],
    "factorial": ["study.axes=[norm,ffn]"],
    "options": ["study.axis=ffn", "study.options=[relu,swiglu]"],
    "scaling": ["study.axis=ffn", "study.options=[relu,swiglu]", "study.sizes=[pico,nano]"],
    "uptrain": ["study.share=0.5", "model.dim=16", "init_from=runs/finished/base/seed=1"],
    "extend": ["study.share=0.5", "model.dim=16", "init_from=runs/finished/base/seed=1"],
}

QUICK = "options"
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


def test_the_runs_are_written(command: Command, tmp_path: Path) -> None:
    """By version 0.4.0 alone: later ones read what that has written."""
    if files.writing and llama_lab.__version__ == WRITTEN_BY:
        for arguments in (FINISHED, STUDY):
            assert command(*arguments).code == 0
        with at(Monitor, "on_train_batch_end", 17)(lambda: stop(signal.SIGINT)):
            assert command(*INTERRUPTED).code == 130
        shutil.rmtree(RUNS, ignore_errors=True)
        shutil.copytree(tmp_path / "runs", RUNS, ignore=shutil.ignore_patterns("report.html", "*.lock", "output.log"))
    text = "".join(file.read_text() for file in RUNS.rglob("*.*") if file.suffix in (".yaml", ".json", ".csv"))
    assert f'"llama-lab": "{WRITTEN_BY}"' in text
    assert str(tmp_path.parent) not in text
    assert sum(file.stat().st_size for file in RUNS.rglob("*") if file.is_file()) < 3e6


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


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in PLANS if one != QUICK)])
def test_a_study_has_its_plan(
    name: str, runs: Path, command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # the estimated times are of any width
    own = {"scaling": ("train.tokens=", "size="), "uptrain": ("train.tokens=",), "extend": ("train.tokens=",)}.get(
        name, ()
    )
    shared = [one for one in (*tiny, *ANY, "name=plan") if not one.startswith(own)]
    ran = command(*shared, f"study={name}", *PLANS[name])
    assert ran.code == 0, ran.err
    lines = [line.strip() for line in ran.out[ran.out.index("plan: ") :].splitlines()]
    begin = next(i for i, line in enumerate(lines) if line and not line.strip("─")) + 1
    end = lines.index("", begin)
    arms = [re.split(r" {2,}", line)[:-1] for line in lines[begin:end]]  # without the time
    notes = [line for line in lines[end:] if ", one run after the other" not in line and "more than a day" not in line]
    check(f"plan_{name}", {"arms": arms, "notes": numbers([lines[0], *notes])})


@pytest.mark.slow
def test_an_estimate_has_its_numbers(command: Command) -> None:
    ran = command("estimate=true", "device=h100", "arch=llama2", "size=llama2_70b", "trainer.devices=64")
    assert (ran.code, ran.err) == (0, "")
    check("estimate", numbers(ran.out.splitlines()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_refusal_has_its_exit_code_and_key(
    runs: Path, bad_files: Path, command: Command, evaluating: Command, compare: Command, tiny: list[str]
) -> None:
    """In one line with the fix, before a run begins. The golden file has the arguments; TINY are those of `tiny`."""
    commands = {"train": command, "eval": evaluating, "compare": compare}
    found: list[dict[str, Any]] = []
    before = sorted(bad_files.rglob("*.json"))
    for case in read("refusals"):
        arguments = [one for given in case["arguments"] for one in (tiny if given == "TINY" else [given])]
        ran = commands[case["command"]](*arguments)
        assert TOLD.fullmatch(ran.err), ran.err
        found.append(case | {"code": ran.code, "key": re.split("[:=]", ran.err.removeprefix("error: "), maxsplit=1)[0]})
    assert len(found) > 140
    assert sorted(bad_files.rglob("*.json")) == before
    check("refusals", found)
