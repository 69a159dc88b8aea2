"""An encoder's run: its losses are of masked tokens, the same in training and in an evaluation; what it cannot do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llama_lab.data.data_module import open_objective
from llama_lab.data.dataset import Examples
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.evaluation.load import load_run
from llama_lab.model.loss import IGNORE
from llama_lab.runs.evaluation import Evaluation
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError
from tests.composing import eval_settings


@pytest.fixture(scope="module")
def encoder(trained: Callable[..., Path]) -> Path:
    """An encoder's run, which has seen a few tokens."""
    return trained("family=encoder", "objective=masked", "train.sample_tokens=0", "train.eval_lengths=[2]")


@torch.no_grad()
def test_its_losses_are_of_the_masked_tokens_of_each_window(encoder: Path) -> None:
    run, summary = load_run(encoder), Summary.load(encoder).metrics
    dataset = run.open_dataset()
    objective = open_objective(run.cfg, dataset)
    evaluation = Evaluation.load(encoder)
    for found in evaluation.lengths:
        windows, losses, right = dataset.val_windows(found.length), [], 0
        for i in range(len(windows)):
            whole = Examples(*(side[None] for side in windows[i]))
            tokens, targets, *lengths = map(torch.from_numpy, objective.val_examples(whole, [i]))
            tokens, targets = (x[:, : int(lengths[0]) if lengths else None] for x in (tokens, targets))
            logits = run.model(tokens)[targets != IGNORE].double()
            losses.append(F.cross_entropy(logits, targets[targets != IGNORE], reduction="none"))
            right += int((logits.argmax(-1) == targets[targets != IGNORE]).sum())
        paid = torch.cat(losses)
        assert found.loss == pytest.approx(paid.mean().item(), abs=1e-5)
        assert sum(found.tokens) == len(paid)
        assert found.accuracy == pytest.approx(right / len(paid))
        if found.length == run.model.max_seq_len:
            assert summary["val/loss"] == pytest.approx(found.loss, abs=1e-5)
            assert summary["val/accuracy"] == pytest.approx(found.accuracy)
    assert summary.keys().isdisjoint({"val/second_half_loss", "val/bits_per_byte"})
    assert "kv_cache/bytes" not in summary


@pytest.mark.parametrize("part", ["sample", "cache", "lm_eval"])
def test_it_is_asked_for_no_next_token(part: str, encoder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^eval\.parts"):
        evaluate(encoder, eval_settings(f"eval.parts=[{part}]", "eval.tasks=[lambada_openai]"))
