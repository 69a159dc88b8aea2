"""A study of families from its command to its report: each arm's loss of second halves, and its differences."""

import json
import re
from pathlib import Path

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.runs.study import Study
from tests.study.planning import conducted

STUDY = ("study=families", "study.seeds=[1,2]", "name=f", "study.measure_speed=false", "train.tokens=2560")


@pytest.mark.slow
def test_a_trained_study_reports_all_families_by_second_halves(
    tiny: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    ran = conducted(tmp_path, environment, *tiny, *STUDY)
    assert (ran.code, ran.err) == (0, "")
    folder = tmp_path / "runs" / "f"
    result = analyse(Study.load(folder), folder)
    assert [arm.name for arm in result.arms] == ["decoder", "prefix_decoder", "encoder_decoder"]
    summaries = {
        arm.name: [json.loads((folder / arm.name / f"seed={n}" / "summary.json").read_text()) for n in (1, 2)]
        for arm in result.arms
    }
    halves = {name: [one["val/second_half_loss"] for one in found] for name, found in summaries.items()}
    for arm in result.arms:
        assert arm.loss is not None
        assert arm.loss.mean == pytest.approx(sum(halves[arm.name]) / 2)
        if arm.name == "decoder":
            continue
        assert arm.to_baseline is not None
        expected = sum(ours - theirs for ours, theirs in zip(halves[arm.name], halves["decoder"], strict=True)) / 2
        assert arm.to_baseline.change.mean == pytest.approx(expected)
    whole = [one["val/loss"] for one in summaries["encoder_decoder"]]
    assert halves["encoder_decoder"] == pytest.approx(whole), "all that it predicts"
    assert "nats per token of second halves" in result.verdict
    page = (folder / "report.html").read_text()
    assert re.search(r"arms are equal in tokens read, and not in targets predicted", page)
