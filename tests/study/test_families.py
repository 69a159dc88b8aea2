"""A study of families from its command to its report: each arm's loss of second halves, and its differences."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.runs.study import Study
from tests.study.planning import conducted

STUDY = ("study=families", "study.seeds=[1,2]", "name=f", "study.measure_speed=false", "train.tokens=1280")


@pytest.mark.slow
def test_a_trained_study_reports_all_families_by_second_halves(
    tiny: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    ran = conducted(tmp_path, environment, *tiny, *STUDY)
    assert (ran.code, ran.err) == (0, "")
    folder = tmp_path / "runs" / "f"
    result = analyse(Study.load(folder), folder)
    assert [arm.name for arm in result.arms] == ["decoder", "prefix_decoder", "encoder_decoder"]
    for arm in result.arms:
        runs = [json.loads((folder / arm.name / f"seed={n}" / "summary.json").read_text()) for n in (1, 2)]
        assert arm.loss is not None
        assert arm.loss.mean == pytest.approx(fmean(run["val/second_half_loss"] for run in runs))
    assert "arms are equal in tokens read, and not in targets predicted" in (folder / "report.html").read_text()
