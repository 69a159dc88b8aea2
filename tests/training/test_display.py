"""What a person sees of a run."""

import shutil
from pathlib import Path

import pytest

from llama_lab.training.display import print_result
from llama_lab.training.folder import RunFolder
from tests.conftest import Ran


def test_a_sample_cannot_steer_the_terminal(finished: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished.run, tmp_path / "run")
    (tmp_path / "run" / "sample.txt").write_text("red \x1b[31m bell \x07 \x7f end")
    print_result(RunFolder(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "red \u241b[31m bell \u2407 \u2421 end" in shown
    assert not {"\x1b", "\x07", "\x7f"} & set(shown)
