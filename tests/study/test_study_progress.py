"""What a study tells of its progress, from the files of its runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from llama_lab.study.task import StudyProgress
from tests.analysis.synthetic import change_metrics, remove_run, run_folder, write_study
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


def test_families_are_told_by_second_halves(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, {"decoder": 0.0, "prefix_decoder": -0.1}, seeds=(1,))
    for arm in study.arms:
        run = run_folder(tmp_path, study, arm.name, 1)
        change_metrics(run, lambda row: {"val/second_half_loss": 3.0} if "val/loss" in row else {})
    families = tuple(replace(arm, settings={"model._target_": arm.name}) for arm in study.arms)
    run = planned(*tiny, f"runs_dir={tmp_path}")
    run = replace(run, label="prefix_decoder")
    for arms, difference in ((study.arms, "-0.0961"), (families, "+0.0000")):
        StudyProgress(replace(study, arms=arms), tmp_path).run_ended(run, "done")
        assert f"({difference}" in capsys.readouterr().out
