"""What a person sees of a run."""

import io
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

from llama_lab.runs.folder import RunFolder
from llama_lab.runs.result_table import print_result
from llama_lab.runs.stored import PROGRESS
from llama_lab.util.display import Display
from llama_lab.util.formatting import break_name
from tests.conftest import Ran


def test_a_sample_cannot_steer_the_terminal(finished: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished.run, tmp_path / "run")
    (tmp_path / "run" / "sample.txt").write_text("red \x1b[31m bell \x07 \x7f end")
    print_result(RunFolder(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "red \u241b[31m bell \u2407 \u2421 end" in shown
    assert not {"\x1b", "\x07", "\x7f"} & set(shown)


def test_lines_on_the_data_include_the_time_left_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    display = Display(Console(file=file), steps=1, shown=PROGRESS)
    for phase, seconds in (("reading", 20), ("tokenising", 40)):
        display.prepare(0, 300_000_000, phase)
        for done in (100_000_000, 200_000_000, 300_000_000):
            now += seconds
            display.prepare(done, 300_000_000, phase)
    assert file.getvalue().splitlines() == [
        "reading: 0.0 of 300.0 MB",
        "reading: 100.0 of 300.0 MB, 40 s left",
        "reading: 200.0 of 300.0 MB, 20 s left",
        "reading: 300.0 of 300.0 MB",
        "tokenising: 0.0 of 300.0 MB",
        "tokenising: 100.0 of 300.0 MB, 80 s left",
        "tokenising: 200.0 of 300.0 MB, 40 s left",
        "tokenising: 300.0 of 300.0 MB",
    ]


def test_lines_on_training_have_the_time_left_and_a_validation_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    file = io.StringIO()
    display = Display(Console(file=file), steps=40, shown=PROGRESS)
    for step in (11, 20, 30, 40):  # of a run that goes on after 10
        display.update(step, {"train/loss": 4.0})
        if step == 20:
            display.update(step, {"val/loss": 5.0})
        now += 20
    assert file.getvalue().splitlines() == [
        "step 11/40  loss 4.000",
        "step 20/40  loss 4.000  44 s left",
        "step 20/40  loss 4.000  val 5.000  44 s left",
        "step 30/40  loss 4.000  21 s left",
        "step 40/40  loss 4.000",
    ]


def test_a_name_is_broken_after_its_signs() -> None:
    assert break_name("swiglu-small-20", 15) == ["swiglu-small-20"]
    assert break_name("swiglu-small-20", 12) == ["swiglu-", "small-20"]
    assert break_name("model.attention.qk_norm=head", 16) == ["model.attention.", "qk_norm=head"]
    assert break_name("norm=rmsnorm, size=nano", 14) == ["norm=rmsnorm,", "size=nano"]
    assert break_name("optim.lr=0.00123,1e-3", 12) == ["optim.lr=", "0.00123,1e-3"]
    assert break_name("rmsnorm", 4) == ["rmsn", "orm"]
