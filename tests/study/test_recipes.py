"""study=recipes from the command line: a few recipes are trained, measured, ranked and advised on."""

import csv
import json
from pathlib import Path

import pytest

from llama_lab.runs.study import StudySpeed
from llama_lab.study import measure
from tests.study.planning import conducted

ONE_RATE = ("study=recipes", "study.learning_rates=null", "study.extend_rates=false", "name=pick")


@pytest.mark.slow
def test_recipes_are_trained_measured_ranked_and_advised_on(
    tiny: list[str], environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 2)
    ran = conducted(
        tmp_path,
        environment,
        *tiny,
        *ONE_RATE,
        "study.recipes=[gpt2,bloom,llama2]",
        "study.seeds=[1,2]",
        "study.lengths=[1,2]",
        "train.tokens=2560",
        "train.evaluations=1",
        "train.sample_tokens=0",
    )
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "pick"
    arms = ["gpt2", "bloom", "llama2"]
    measured = StudySpeed.load(folder).arms
    assert list(measured) == arms
    assert all(len(arm.train) == len(arm.decode) == len(arm.prefill) == 2 for arm in measured.values())
    lengths = {arm: json.loads((folder / arm / "seed=1" / "eval.json").read_text())["lengths"] for arm in arms}
    assert [entry["length"] for entry in lengths["bloom"]] == [32, 64]
    assert lengths["gpt2"][1]["loss"] is None
    rows = {row["arm"]: row for row in csv.DictReader((folder / "summary.csv").open())}
    assert [rows[arm]["cache:rank_from"] for arm in arms] == ["2", "2", "1"]
    assert rows["gpt2"]["longest:rank_from"] == ""
    printed = " ".join(ran.out.split())
    assert "- KV cache: llama2, the smallest (4 KiB)." in printed
    assert "Not ranked: gpt2 (learned positions end at 32)." in printed
    assert "Which to choose" in (folder / "report.html").read_text()
