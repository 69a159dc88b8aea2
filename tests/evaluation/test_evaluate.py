"""A run is evaluated from its folder alone."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from llama_lab.errors import ConfigError
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.training.folder import RunFolder
from tests.composing import eval_settings
from tests.conftest import Ran

LOSS = eval_settings("eval.parts=[loss]")


def test_an_evaluation_needs_only_the_folder_and_finds_the_loss_of_the_summary(finished: Ran, tmp_path: Path) -> None:
    moved = shutil.copytree(finished.run, tmp_path / "moved")
    summary = json.loads((moved / "summary.json").read_text())
    result = evaluate(moved, LOSS)
    assert json.loads((moved / "eval.json").read_text()) == result
    assert result["step"] == 78
    for name in ("val/loss", "val/bits_per_byte"):
        assert result[name] == pytest.approx(summary[name], rel=1e-6)


def test_an_evaluation_on_other_data_is_refused(finished: Ran, tmp_path: Path) -> None:
    moved = shutil.copytree(finished.run, tmp_path / "moved")
    other = tmp_path / "other.txt"
    other.write_text("".join(f"another line {i}\n\n" for i in range(2000)))
    cfg = OmegaConf.load(moved / "resolved.yaml")
    cfg.data.source.files = [str(other)]
    OmegaConf.save(cfg, moved / "resolved.yaml")
    with pytest.raises(ConfigError, match=r"was trained with data_hash \w{8}, but its source now gives \w{8}; "):
        evaluate(moved, LOSS)
    assert not (moved / "eval.json").exists()


def test_a_folder_without_a_run_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run; name a run's folder"):
        evaluate(tmp_path, LOSS)
    assert RunFolder(tmp_path).read_status() is None
