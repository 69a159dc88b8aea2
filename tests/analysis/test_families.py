"""Families and objectives side by side: the loss that compares them, and what none does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.data.dataset import Examples
from llama_lab.data.objectives import Prefix
from llama_lab.model.loss import IGNORE
from llama_lab.report.summary import summary_rows
from llama_lab.runs.study import Study
from tests.analysis.synthetic import change_metrics, planted_warnings, run_folder, write_study
from tests.composing import compose_config
from tests.data.test_objectives import BYTE

PREFIX = {
    "model._target_": "llama_lab.model.prefix_decoder.PrefixDecoder",
    "objective._target_": "llama_lab.data.objectives.Prefix",
    "objective.least": 2,
}
AXES = {
    "decoder": {"family": "decoder", "objective": "next_token"},
    "prefix_decoder": {"family": "decoder", "objective": "prefix"},
    "encoder_decoder": {"family": "encoder_decoder", "objective": "next_token"},
}
LOSSES = {"decoder": 0.0, "prefix_decoder": 0.01, "encoder_decoder": -0.4}  # of all that each predicts
BETTER = 0.5  # by which a decoder predicts second halves better than whole windows


def encoder_decoder() -> dict[str, Any]:
    own: Any = OmegaConf.to_container(compose_config("family=encoder_decoder").model, resolve=True)
    return {f"model.{key}": own[key] for key in ("_target_", "encoder_layers", "cross_attention")}


def written(folder: Path, **settings: Any) -> Study:
    """A study whose arms log the loss of second halves."""
    config = {"prefix_decoder": PREFIX, "encoder_decoder": encoder_decoder()}
    study = write_study(folder, LOSSES, design="families", axes=AXES, config=config, **settings)
    for arm in LOSSES:
        better = BETTER if arm == "decoder" else 0.0
        for seed in (1, 2, 3):
            run = run_folder(folder, study, arm, seed)
            change_metrics(run, second_half(better))
    return study


def second_half(better: float) -> Callable[[dict[str, float]], dict[str, float]]:
    return lambda row: {"val/second_half_loss": row["val/loss"] - better} if "val/loss" in row else {}


def differences(result: Result) -> list[float]:
    return [arm.to_baseline.change.mean for arm in result.arms if arm.to_baseline]


@pytest.mark.usefixtures("with_curves")
def test_families_are_judged_by_second_halves(tmp_path: Path) -> None:
    study = written(tmp_path)
    result = analyse(study, tmp_path)
    assert (result.metric, result.unit) == ("val/second_half_loss", "nats per token of second halves")
    assert differences(result) == pytest.approx([0.51, 0.1], abs=0.02), "by val/loss these are 0.01 and -0.4"
    assert all(arm.to_baseline.bits is None for arm in result.arms[1:] if arm.to_baseline)
    decoder = result.arms[0]
    assert decoder.loss is not None
    assert decoder.loss.mean == pytest.approx(3.7 - BETTER, abs=0.1)
    assert {curve.metric for curve in result.curves} == {"val/second_half_loss", "train/loss"}
    assert [curve.mean[-1] for curve in result.difference_curves] == pytest.approx(differences(result))
    row = summary_rows(result)[0]
    assert row["val_second_half_loss_mean"] == decoder.loss.mean
    assert "val_loss_mean" not in row
    assert row["val_bits_per_byte_mean"] is None


def test_targets_are_counted_where_they_differ(tmp_path: Path) -> None:
    (warning,) = planted_warnings(analyse(written(tmp_path), tmp_path))
    assert warning == (
        "Losses are of second halves; arms are equal in tokens read, and not in targets predicted: "
        "1,597,440 of 1,597,440 in decoder; 801,840 of 1,597,440 in prefix_decoder; 798,720 of 1,597,440 in "
        "encoder_decoder."
    )


def test_the_mean_prefix_is_counted_as_it_is_drawn(tmp_path: Path) -> None:
    """By drawing: what the warning above calls 801,840 of 1,597,440."""
    windows = np.zeros((20_000, 256), dtype=np.int64)
    _, targets = Prefix(BYTE, 2).examples(Examples(windows, windows), 1, 0, 20_000, range(20_000))
    assert (targets != IGNORE).mean() == pytest.approx(801_840 / 1_597_440, rel=0.01)


def test_runs_that_do_not_log_it_are_compared_with_a_warning(tmp_path: Path) -> None:
    study = written(tmp_path)
    run = run_folder(tmp_path, study, "decoder", 2)
    (run / "summary.json").write_text((run / "summary.json").read_text().replace("val/second_half_loss", "val/other"))
    result = analyse(study, tmp_path)
    assert result.metric == "val/loss"
    assert any(one.startswith("Losses are of different tokens") for one in result.warnings)


def test_pairs_are_compared_by_their_targets(tmp_path: Path) -> None:
    """Which all families predict; no second halves are logged."""
    pairs = {"data.pair_files._target_": "llama_lab.data.pairs.PairFiles"}
    config = {"decoder": pairs, "prefix_decoder": PREFIX | pairs, "encoder_decoder": encoder_decoder() | pairs}
    result = analyse(write_study(tmp_path, LOSSES, axes=AXES, design="families", config=config), tmp_path)
    assert result.metric == "val/loss"
    assert planted_warnings(result) == []


def test_other_tokenizers_leave_bits(tmp_path: Path) -> None:
    study = written(tmp_path, facts={"encoder_decoder": {"tokenizer_hash": "1" * 32}})
    result = analyse(study, tmp_path)
    assert result.metric == "val/bits_per_byte"
    (warning,) = (one for one in result.warnings if one.startswith("Losses are of different tokens"))
    assert warning.endswith("; the second half of each window in prefix_decoder, encoder_decoder.")


def test_unlike_targets_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefix, "targets", "masked tokens")
    result = analyse(replace(written(tmp_path), compare="all"), tmp_path)
    reason = "losses of masked tokens and next tokens do not compare"
    masked, encoder_decoder = result.arms[1:]
    assert masked.to_baseline is not None
    assert encoder_decoder.to_baseline is not None
    assert not masked.to_baseline.change.is_tested
    assert encoder_decoder.to_baseline.change.is_tested
    assert f"prefix_decoder is not tested against decoder: {reason}." in result.answer
    assert {(one.ranks, one.reason) for one in result.rankings[0].standings} == {(None, reason)}


def without_bits(folder: Path, **settings: Any) -> Result:
    """The analysis of a study whose runs log no bits per byte, as of spans."""
    study = write_study(folder, LOSSES, axes=AXES, **settings)
    for arm in LOSSES:
        for seed in (1, 2, 3):
            for file in ("summary.json", "metrics.csv"):
                path = run_folder(folder, study, arm, seed) / file
                path.write_text(path.read_text().replace("val/bits_per_byte", "other"))
    return analyse(study, folder)


@pytest.mark.usefixtures("with_curves")
def test_losses_that_have_no_bits_are_compared_in_nats(tmp_path: Path) -> None:
    result = without_bits(tmp_path)
    assert result.metric == "val/loss"
    assert differences(result) == pytest.approx([0.01, -0.4], abs=0.02)
    assert {arm.bits for arm in result.arms} == {None}


def test_and_not_at_all_where_tokenizers_differ(tmp_path: Path) -> None:
    result = without_bits(tmp_path, facts={"encoder_decoder": {"tokenizer_hash": "1" * 32}})
    assert [arm.to_baseline for arm in result.arms] == [None, None, None]
    assert result.verdict.endswith("their losses are of different texts or tokenizers, and not all have bits per byte.")


def test_nor_without_another_arm(tmp_path: Path) -> None:
    result = analyse(write_study(tmp_path, {"alone": 0.0}), tmp_path)
    assert result.verdict == "Nothing can be compared: there is one arm."
