"""study=recipes from the command line: all recipes are planned, a few are trained, measured, ranked and advised on."""

import csv
import json
from pathlib import Path

import pytest

from llama_lab.runs.study import StudySpeed
from tests.conftest import Command, RunTrain

ONE_RATE = ("study=recipes", "study.learning_rates=null", "study.extend_rates=false", "name=pick")
MINE = """# @package _global_
defaults:
  - /arch/llama2
  - override /position: alibi
  - override /attention: mqa
"""


@pytest.mark.slow
def test_recipes_are_planned_beside_one_of_the_users(command: Command, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "conf" / "arch").mkdir(parents=True)
    (tmp_path / "conf" / "arch" / "mine.yaml").write_text(MINE)
    conf, names = str(tmp_path / "conf"), ["gpt2", "llama2", "mine", "falcon"]
    ran = command("--config-dir", conf, *tiny, *ONE_RATE, f"study.recipes=[{','.join(names)}]", "study.dry_run=true")
    assert (ran.code, ran.err) == (0, "")
    rows = [line.split() for line in ran.out.splitlines()]
    caches = {row[0]: row[-3] for row in rows if row and row[0] in names}
    assert caches == {"gpt2": "256", "llama2": "128", "mine": "64", "falcon": "64"}
    assert list(caches) == names


@pytest.mark.slow
def test_recipes_are_trained_measured_ranked_and_advised_on(run_train: RunTrain, tiny: list[str]) -> None:
    ran = run_train(
        *tiny,
        *ONE_RATE,
        "study.recipes=[gpt2,bloom,llama2]",
        "study.seeds=[1,2]",
        "study.lengths=[1,2]",
        "train.tokens=5120",
        "train.evaluations=2",
        "train.sample_tokens=0",
        COLUMNS="80",
    )
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "pick"
    measured = StudySpeed.load(folder).arms
    assert list(measured) == ["gpt2", "bloom", "llama2"]
    assert all(len(arm.train) == len(arm.decode) == len(arm.prefill) == 5 for arm in measured.values())
    lengths = {arm: json.loads((folder / arm / "seed=1" / "eval.json").read_text())["lengths"] for arm in measured}
    assert [entry["length"] for entry in lengths["bloom"]] == [32, 64]
    assert lengths["gpt2"][1]["loss"] is None
    rows = {row["arm"]: row for row in csv.DictReader((folder / "summary.csv").open())}
    assert [rows[arm]["cache:rank_from"] for arm in measured] == ["2", "2", "1"]
    assert rows["gpt2"]["longest:rank_from"] == ""
    assert {rows[arm]["rank_to"] for arm in measured} <= {"1", "2", "3"}
    printed = " ".join(ran.out.split())
    assert "- KV cache: llama2, the smallest (4 KiB)." in printed
    assert "Not ranked: gpt2 (learned positions end at 32)." in printed
    page = (folder / "report.html").read_text()
    assert "Which to choose" in page
    assert "learned positions end at 32" in page
