"""What a study tells of its progress, from the files of its runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from llama_lab.study.task import StudyProgress
from tests.analysis.synthetic import remove_run, run_folder, write_study
from tests.training.tiny import planned


@pytest.mark.parametrize(("factor", "left"), [(1, "about 4 min"), (100, "about 7.4 h")])
def test_the_time_left_counts_runs_by_their_flops(
    factor: int, left: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, {"small": 0.0, "large": 0.0}, seeds=(1, 2))  # a run takes 133 s
    small, large = study.arms
    study = replace(study, arms=(replace(small, flops=1e9), replace(large, flops=factor * 1e9)))
    for seed in (1, 2):
        remove_run(run_folder(tmp_path, study, "large", seed))
    StudyProgress(study, tmp_path).run_started(planned(*tiny, f"runs_dir={tmp_path}"))
    shown = " ".join(capsys.readouterr().out.split())
    assert "run 3 of 4: " in shown
    assert f", {left} of training left" in shown
