"""A run is evaluated from its folder alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from llama_lab.evaluation.evaluate import evaluate
from llama_lab.runs.evaluation import Evaluation
from llama_lab.util.errors import ConfigError
from tests.composing import eval_settings
from tests.selection import first

LOSS = eval_settings("eval.parts=[loss]")
Copied = Callable[[Path], Path]


def test_an_evaluation_needs_only_the_folder_and_finds_the_loss_of_the_summary(endless: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(endless, tmp_path / "moved")
    summary = json.loads((moved / "summary.json").read_text())
    result = evaluate(moved, LOSS)
    assert Evaluation.load(moved) == result
    assert result.step == 10
    for name in ("val/loss", "val/bits_per_byte"):
        assert result.metrics[name] == pytest.approx(summary[name], rel=1e-6)


def test_an_evaluation_on_other_data_is_refused(endless: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(endless, tmp_path / "moved")
    other = tmp_path / "other.txt"
    other.write_text("".join(f"another line {i}\n\n" for i in range(2000)))
    cfg = OmegaConf.load(moved / "resolved.yaml")
    cfg.data.source.files = [str(other)]
    OmegaConf.save(cfg, moved / "resolved.yaml")
    with pytest.raises(ConfigError, match=r"was trained with data_hash \w{8}, but its source now gives \w{8}; "):
        evaluate(moved, LOSS)
    assert not (moved / "eval.json").exists()


# Parts that are found one after the other


SAMPLE = eval_settings("eval.parts=[sample]")


@pytest.mark.slow
def test_parts_chosen_later_join_those_found_earlier(endless: Path, copied: Copied) -> None:
    run = copied(endless)
    first, second = evaluate(run, LOSS), evaluate(run, SAMPLE)
    assert second == replace(first, sample=second.sample) != first
    for multiple in (2, 4):
        evaluate(run, eval_settings("eval.parts=[length]", f"eval.lengths=[{multiple}]"))
    last = evaluate(run, LOSS)
    assert [entry.length for entry in last.lengths] == [32, 64, 128]
    assert last.sample == second.sample
    assert Evaluation.load(run) == last


@pytest.mark.parametrize("change", [{"step": 5}, {"device": "another"}, b"{", b"null"])
def test_what_was_found_otherwise_or_is_damaged_is_replaced_and_it_is_told(
    change: dict[str, Any] | bytes, endless: Path, copied: Copied, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(endless)
    if isinstance(change, bytes):
        (run / "eval.json").write_bytes(change)
        reason = "is damaged"
    else:
        (run / "eval.json").write_text(json.dumps(evaluate(run, SAMPLE).to_json() | change))
        ((key, value),) = change.items()
        reason = f"was found with {key} {value}"
    capsys.readouterr()
    assert evaluate(run, LOSS).sample is None
    assert capsys.readouterr().err == f"{run}/eval.json: {reason}; replaced\n"


def test_a_precision_of_its_own_may_be_chosen(endless: Path, copied: Copied) -> None:
    run = copied(endless)
    losses = {}
    for precision in ("as_trained", "bf16-mixed", "bf16-true"):
        parts = "[loss,cache,sample]" if precision != "as_trained" else "[loss]"
        found = evaluate(run, eval_settings(f"eval.parts={parts}", f"trainer.precision={precision}"))
        losses[found.precision] = found.metrics["val/loss"]
    assert list(losses) == ["32-true", "bf16-mixed", "bf16-true"]
    assert len(set(losses.values())) == 3
    assert max(losses.values()) - min(losses.values()) < 0.02


def test_a_model_that_has_diverged_has_no_loss_and_no_traceback(endless: Path, copied: Copied) -> None:
    run = copied(endless)
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    checkpoint["state_dict"]["model.norm.weight"].fill_(float("nan"))
    torch.save(checkpoint, run / "checkpoints/last.ckpt")
    with pytest.raises(ConfigError, match=r"^model.max_seq_len=32: no validation loss, the loss is nan$"):
        evaluate(run, LOSS)
    found = evaluate(run, eval_settings("eval.parts=[cache]"))
    assert {entry.loss for entry in found.cache_losses} == {None}


@pytest.mark.parametrize("dtype", first(1, ["int8", "bfloat16"]))
@pytest.mark.slow
def test_speed_and_sample_may_be_had_through_a_smaller_cache(dtype: str, endless: Path, copied: Copied) -> None:
    settings = ("eval.rounds=1", "eval.contexts=[0.3,1]", "eval.batch_sizes=[2]", "eval.parts=[speed,sample]")
    found = evaluate(copied(endless), eval_settings(*settings, f"cache_dtype={dtype}"))
    assert [(speed.batch_size, speed.context) for speed in found.speed] == [(2, 10), (2, 32)]
    assert found.sample
