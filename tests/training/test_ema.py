"""The moving average of the weights: what it is, that it is evaluated beside them, and that it may be loaded.

That it survives kills, and is the same on several devices, in shards, compiled and recomputed: `test_resume.py`,
`test_world_size.py`, `test_recompute.py` and `tests/devices/test_strategy.py` train with one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llama_lab
from llama_lab.evaluation.load import load_run
from llama_lab.model import Decoder
from llama_lab.runs.stored import Summary
from llama_lab.training.module import LanguageModel
from llama_lab.util.errors import ConfigError
from tests.conftest import Command
from tests.training.tiny import identical, nll_by_hand, pieces, repeatable, rows, trained, trained_state

RUN = ["embedding=tied", "train.tokens=5120", "train.micro_batch_size=4", "train.evaluations=2", "train.log_every=5"]
DECAY = 0.9


@pytest.fixture(scope="module")
def averaged(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 20 steps of two micro-batches that keeps an average."""
    return trained(*tiny, *RUN, f"train.ema={DECAY}", f"runs_dir={tmp_path_factory.mktemp('averaged')}")


class Watched(LanguageModel):
    """A model that notes its weights before the first optimizer step and after each, which a buffer of it counts."""

    def __init__(self, model: Decoder, **others: Any) -> None:
        model.norm.register_buffer("steps", torch.zeros(1))  # type: ignore[union-attr]
        super().__init__(model, **others)

    def training_step(self, *batch: Any) -> None:
        self.seen = getattr(self, "seen", None) or [copied(self.model.state_dict())]
        self.model.get_buffer("norm.steps").add_(1)
        super().training_step(*batch)
        self.seen.append(copied(self.model.state_dict()))


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in state.items()}


def test_it_is_the_exponential_average_from_the_initial_weights_on(tiny: list[str], tmp_path: Path) -> None:
    parts = pieces(*tiny, *RUN, f"train.ema={DECAY}", f"runs_dir={tmp_path}", kind=Watched)
    assert parts.fit() == "done"
    expected, *later = parts.module.seen  # type: ignore[union-attr]
    assert len(later) == 20, "micro-batches were counted"
    for weights in later:
        expected = {name: DECAY * expected[name] + (1 - DECAY) * weights[name] for name in expected}
    expected["norm.steps"] = torch.tensor([20.0]).double()  # which is as it was last
    ema = parts.module.ema
    torch.testing.assert_close(copied(ema.state_dict()), expected, atol=1e-6, rtol=1e-5)
    assert identical(dict(ema.named_buffers()), dict(parts.module.model.named_buffers()))
    assert ema.embedding.head.weight is ema.embedding.tokens.weight
    assert parts.rows[-1]["val/ema_loss"] == pytest.approx(mean_by_hand(ema, parts.dataset), rel=1e-5)
    assert parts.rows[-1]["val/loss"] == pytest.approx(mean_by_hand(parts.module.model, parts.dataset), rel=1e-5)


def mean_by_hand(model: Any, dataset: Any) -> float:
    return sum(nll_by_hand(model, dataset.val.tolist())) / dataset.index.val.tokens


@pytest.mark.slow
def test_the_run_is_the_one_without_an_average(averaged: Path, tiny: list[str], tmp_path: Path) -> None:
    plain = trained(*tiny, *RUN, f"runs_dir={tmp_path}")
    found = repeatable(averaged)
    beside = [row.pop("val/ema_loss", None) for row in found]
    assert found == repeatable(plain)
    assert [loss is not None for loss in beside] == ["val/loss" in row for row in found]
    assert identical(load_run(averaged).model.state_dict(), load_run(plain).model.state_dict())
    assert trained_state(plain)["state_dict"].keys() < trained_state(averaged)["state_dict"].keys()
    assert "val/ema_loss" in Summary.load(averaged).metrics
    with pytest.raises(ConfigError, match=r"^weights=ema: .* kept no average of its weights; train with train\.ema="):
        llama_lab.load(plain, weights="ema")


@pytest.mark.slow
def test_an_evaluation_finds_the_loss_of_either_weights(averaged: Path, evaluating: Command) -> None:
    for weights, file, metric in (("last", "eval", "val/loss"), ("ema", "eval_ema", "val/ema_loss")):
        ran = evaluating(f"run={averaged}", f"weights={weights}", "eval.parts=[loss]")
        assert (ran.code, ran.err) == (0, "")
        assert f"{file}.json and {file}.png" in ran.out.replace("\n", "")
        found = json.loads((averaged / f"{file}.json").read_text())
        assert found["val/loss"] == pytest.approx(rows(averaged)[-1][metric], rel=1e-6)
        assert (averaged / f"{file}.png").exists()


@pytest.mark.slow
def test_exports_are_of_the_weights_that_were_asked_for(averaged: Path, tmp_path: Path) -> None:
    from llama_lab.hf.convert import export_model

    last, ema = (llama_lab.load(averaged, weights=weights) for weights in ("last", "ema"))
    assert not torch.equal(last.model.embedding.tokens.weight, ema.model.embedding.tokens.weight)
    for weights, loaded in (("last", last), ("ema", ema)):
        export_model(averaged, tmp_path / weights, weights=weights)
        again = llama_lab.load(tmp_path / weights)
        assert identical(again.model.state_dict(), loaded.model.state_dict())
    with pytest.raises(ConfigError, match=r"^weights=ema: .* is no run, and has one kind of weights; leave it out$"):
        llama_lab.load(tmp_path / "ema", weights="ema")


def test_a_run_from_another_begins_at_its_last_weights(averaged: Path, tiny: list[str], tmp_path: Path) -> None:
    first = rows(trained(*tiny, *RUN, "train.ema=0.5", f"init_from='{averaged}'", f"runs_dir={tmp_path}"))[0]
    assert first["val/loss"] == first["val/ema_loss"] == rows(averaged)[-1]["val/loss"]
