"""`data.document_mask`, and a prefix, in training and evaluation: what a run reports is what its documents cost."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_lab.config.components import build_model
from llama_lab.data.open import open_dataset
from llama_lab.estimate.activations import Footprint
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.evaluation.load import TrainedRun, load_run
from llama_lab.model import Decoder
from llama_lab.runs.evaluation import Evaluation
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, eval_settings
from tests.training.tiny import pieces

PREFIX = 5


@pytest.fixture(scope="module")
def masked(trained: Callable[..., Path]) -> Path:
    """A run whose documents are shorter than a window, and evaluated at two lengths."""
    return trained("data.document_mask=true", "data.document_chars=20", "train.eval_lengths=[2]")


@pytest.fixture(scope="module")
def prefixed(trained: Callable[..., Path]) -> Path:
    """A run with a prefix."""
    return trained(f"model.attention.prefix={PREFIX}", "train.eval_lengths=[2]")


def document_nll(model: Decoder, inputs: Tensor, targets: Tensor, document_start_id: int) -> Tensor:
    """What each target costs if every document in a window is read by itself."""
    starts = [0, *(t for t in range(1, len(inputs)) if inputs[t] == document_start_id)]
    sizes = [b - a for a, b in zip(starts, [*starts[1:], len(inputs)], strict=True)]
    pairs = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    return torch.cat([F.cross_entropy(model(x[None])[0], y, reduction="none") for x, y in pairs])


def windows(run: TrainedRun, length: int) -> list[tuple[Tensor, Tensor]]:
    pairs = [map(torch.from_numpy, window) for window in run.open_dataset().val_windows(length)]
    return [(inputs[targets >= 0], targets[targets >= 0]) for inputs, targets in pairs]


@pytest.mark.slow
@torch.no_grad()
def test_a_run_within_documents_reports_what_each_document_costs_by_itself(masked: Path) -> None:
    run = load_run(masked)
    document_start_id, run.model.document_start_id = run.model.document_start_id, None
    assert document_start_id == run.tokenizer.eot_id
    for found in Evaluation.load(masked).lengths:
        paid = torch.cat([document_nll(run.model, *window, document_start_id) for window in windows(run, found.length)])
        assert found.loss == pytest.approx(paid.mean().item(), abs=1e-5)
        assert sum(found.tokens) == len(paid) == run.open_dataset().index.val.tokens
        across = torch.cat([document_nll(run.model, *window, -1) for window in windows(run, found.length)])
        assert abs(across.mean() - paid.mean()) > 1e-3, "the model would notice"
    summary = Summary.load(masked).metrics
    assert summary["val/loss"] == pytest.approx(Evaluation.load(masked).lengths[0].loss, abs=1e-5)


@pytest.mark.slow
def test_a_cache_costs_a_run_within_documents_its_rounding_alone(masked: Path) -> None:
    found = evaluate(masked, eval_settings("eval.parts=[cache]", "trainer.accelerator=cpu"))
    losses = {entry.dtype: entry.loss for entry in found.cache_losses}
    assert losses["bfloat16"] == pytest.approx(Summary.load(masked).metrics["val/loss"], abs=0.01)


def test_a_run_trains_on_the_loss_within_documents(tiny: list[str], tmp_path: Path) -> None:
    parts = pieces(*tiny, f"runs_dir={tmp_path}", "data.document_mask=true", "data.document_chars=20")
    model = parts.module.model
    examples = parts.data.train_windows.examples(0, 8)
    inputs, targets = map(torch.from_numpy, examples)
    loss, _ = parts.module.loss(inputs, targets)
    document_start_id, model.document_start_id = model.document_start_id, None
    assert (inputs[:, 1:] == document_start_id).any(1).all(), "all windows hold borders"
    paid = torch.cat([document_nll(model, *window, document_start_id) for window in zip(inputs, targets, strict=True)])
    assert loss.item() == pytest.approx(paid.mean().item(), abs=1e-5)


@torch.no_grad()
def test_a_run_with_a_prefix_reports_the_loss_behind_it(prefixed: Path) -> None:
    run = load_run(prefixed)
    for found in Evaluation.load(prefixed).lengths:
        paid = torch.cat([document_nll(run.model, *window, -1)[PREFIX - 1 :] for window in windows(run, found.length)])
        assert found.loss == pytest.approx(paid.mean().item(), abs=1e-5)
        assert sum(found.tokens) == len(paid)
    summary, bytes_per_token = Summary.load(prefixed).metrics, run.open_dataset().bytes_per_token
    assert summary["val/loss"] == pytest.approx(Evaluation.load(prefixed).lengths[0].loss, abs=1e-5)
    assert summary["val/bits_per_byte"] == pytest.approx(summary["val/loss"] / math.log(2) / bytes_per_token)


def test_a_text_of_one_document_has_no_borders(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.txt" for name in ("train", "validation")}
    for name, file in files.items():
        file.write_text(f"one document to {name} on")
    data_files = ", ".join(f"{name}: {file}" for name, file in files.items())
    text = ["data=hub", "data.path=text", f"data.data_files={{{data_files}}}", "data.val_split=validation"]
    cfg = compose_config(*text, "tokenizer=byte", f"data.cache_dir={tmp_path}", "data.document_mask=true")
    with pytest.raises(ConfigError, match=r"^data.document_mask=true: the training text is one document; leave it out"):
        open_dataset(cfg)


def test_a_mixer_that_cannot_tell_documents_apart_is_refused() -> None:
    cfg = compose_config("size=pico", "position=none", "data.document_mask=true")
    cfg.model.attention = {"_target_": "tests.model.test_mixer.Average", "_partial_": True}
    with pytest.raises(ConfigError, match=r"^model.attention=tests.model.test_mixer.Average: tokens see other"):
        build_model(cfg, 97, 0)


def test_an_estimate_counts_the_masks_of_documents() -> None:
    plain, apart = (
        Footprint(compose_config("size=pico", f"data.document_mask={on}"), 97, 1, torch.float32, False)
        for on in ("false", "true")
    )
    masks = 4 * 8 * 32 * 32
    added = apart.activation_bytes(8) - plain.activation_bytes(8)
    assert masks <= added <= 4 * masks
