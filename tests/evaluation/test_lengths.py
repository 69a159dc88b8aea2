"""Train short, evaluate long: every position encoding at longer contexts, by position, and what cannot be had."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_lab.data.dataset import Tokens
from llama_lab.data.objectives import Objective
from llama_lab.data.tokenizer import ByteTokenizer
from llama_lab.data.windows import ValWindows
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.evaluation.lengths import evaluating_on, losses_at_lengths, sums_by_position
from llama_lab.model import Decoder
from llama_lab.runs.evaluation import Evaluation, LengthLoss
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Summary
from llama_lab.util.errors import ConfigError
from tests.composing import decoder, eval_settings, options
from tests.conftest import Command
from tests.selection import first
from tests.training.tiny import planned

CPU = torch.device("cpu")
LENGTHS = ["train.tokens=2560", "train.eval_lengths=[1,2]"]
CONTEXT = 32  # of size=pico
NEXT_TOKENS = Objective(ByteTokenizer().train(iter(())))
ENDLESS = [position for position in options("position") if position != "learned"]
ATTENTION = {
    "plain": ["attention=gqa"],
    "window": ["attention=gqa", "model.attention.window=5", "pattern=global_every_2nd"],
    "soft-capped": ["attention=gqa_gemma2", "model.attention.window=16"],  # its own follows the model's context
}


def lively(*overrides: str) -> Decoder:
    """A model whose attention is far from uniform, and whose loss depends on the position."""
    model = decoder(*overrides)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    return model


def stream(length: int) -> Tokens:
    """Random tokens."""
    return np.random.default_rng(0).integers(0, 97, length).astype(np.uint16)


def at_lengths(model: Decoder, tokens: Tokens, *multiples: float, batch_tokens: int = 4 * CONTEXT) -> list[LengthLoss]:
    """The losses on the CPU."""
    with evaluating_on(model, CPU):
        return losses_at_lengths(
            model, lambda length: [ValWindows(tokens, length)], multiples, batch_tokens, NEXT_TOKENS
        )


@torch.no_grad()
def paid_by_hand(
    model: Decoder, tokens: Tokens, length: int, dtype: torch.dtype | None = None, chunk: int = 7
) -> list[list[float]]:
    """For each position, what its targets cost in nats: one window after the other, read in chunks through a cache."""
    paid: list[list[float]] = [[] for _ in range(length)]
    for start in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        cache = model.new_state(1, length, dtype)
        logits = torch.cat([model(part[None], cache)[0] for part in window[:-1].split(chunk)])
        for position, nll in enumerate(F.cross_entropy(logits.double(), window[1:], reduction="none").tolist()):
            paid[position].append(nll)
    return paid


COVER = ["alibi plain", "none window", "relative soft-capped", "rope window", "rope_yarn plain"]
PAIRS = [f"{position} {attention}" for position in ENDLESS for attention in ATTENTION]


@pytest.mark.parametrize("pair", first(len(COVER), dict.fromkeys(COVER + PAIRS)))
def test_a_longer_context_costs_what_a_model_built_for_it_pays_through_its_cache(pair: str) -> None:
    position, attention = pair.split()
    settings = [f"position={position}", *ATTENTION[attention]]
    if position in ("rope_yarn", "rope_long"):
        settings.append(f"model.position.scaling.original_max_seq_len={CONTEXT}")
    if position == "rope_long":
        settings.append(f"model.position.scaling.max_seq_len={CONTEXT}")
    model, tokens = lively(*settings), stream(225)  # three windows of 64, and half of one
    built_for_it = decoder(*settings, f"model.max_seq_len={2 * CONTEXT}").eval()
    built_for_it.load_state_dict(model.state_dict())
    paid = paid_by_hand(built_for_it.double(), tokens, 64)
    _, long = at_lengths(model, tokens, 2)
    assert long.loss == pytest.approx(sum(map(sum, paid)) / 224, abs=1e-4)
    assert long.losses == pytest.approx([sum(costs) / len(costs) for costs in paid], abs=1e-3)


@pytest.mark.parametrize("precision", first(1, ["bf16-mixed", "32-true", "bf16-true"]))
def test_a_run_is_evaluated_in_its_precision(precision: str, trained: Callable[..., Path]) -> None:
    run = trained(f"trainer.precision={precision}", "trainer.accelerator=cpu", "train.eval_lengths=[1]")
    summary, result = Summary.load(run), Evaluation.load(run)
    for name in ("val/loss", "val/bits_per_byte"):
        assert result.metrics[name] == pytest.approx(summary.metrics[name], abs=1e-6)
    assert evaluate(run, eval_settings("eval.parts=[loss]", "trainer.accelerator=cpu")) == result


def test_the_trained_length_comes_first_and_once_and_then_the_others_from_the_shortest() -> None:
    model, tokens = lively(), stream(300)
    for multiples in ([4, 1.5, 2], [1, 2, 1.5, 4, 2], [1.49, 2.01, 4, 1]):  # rounded to whole tokens
        assert [found.length for found in at_lengths(model, tokens, *multiples)] == [32, 48, 64, 128]


@pytest.mark.parametrize("multiple", [1.5, 4.7])
def test_buckets_of_positions_weighted_by_their_tokens_give_back_the_loss(multiple: float) -> None:
    model, tokens = lively().eval(), stream(500)
    found = at_lengths(model, tokens, multiple)[-1]
    assert len(found.losses) == len(found.positions) == len(found.tokens) <= 64
    assert sum(found.tokens) == 499
    weighted = sum(loss * count for loss, count in zip(found.losses, found.tokens, strict=True))
    assert weighted / 499 == pytest.approx(found.loss, rel=1e-12)
    width = -(-found.length // 64)
    paid = paid_by_hand(model, tokens, found.length)
    starts = range(0, found.length, width)
    expected = [list(chain(*paid[start : start + width])) for start in starts]
    assert found.losses == pytest.approx([sum(costs) / len(costs) for costs in expected], abs=1e-4)
    ends = [min(start + width, found.length) for start in starts]
    assert found.positions == [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_every_token_is_read_once_in_batches_no_larger_than_asked_for_or_of_one_window(batch_tokens: int) -> None:
    model, tokens = lively("attention=gqa"), stream(300)
    batches: list[Tensor] = []
    with model.register_forward_pre_hook(lambda _, inputs: batches.append(inputs[0])):
        at_lengths(model, tokens, 2.5, batch_tokens=batch_tokens)
    for length in (32, 80):
        mine = [batch for batch in batches if batch.shape[1] == length]
        assert torch.cat([batch.flatten() for batch in mine])[:299].tolist() == tokens[:-1].tolist()
        assert all(len(batch) == 1 or batch.numel() <= batch_tokens for batch in mine)


def test_learned_positions_are_told_that_they_cannot_go_further() -> None:
    trained, longer = at_lengths(lively("position=learned"), stream(300), 2)
    assert trained.loss is not None
    assert longer == LengthLoss(64, note="cannot: learned positions end at 32")


def test_a_text_shorter_than_a_window_is_not_read() -> None:
    note = "cannot: the validation text has 63 tokens, less than one window"
    assert at_lengths(lively(), stream(64), 2, 1e6)[1:] == [LengthLoss(n, note=note) for n in (64, 32_000_000)]
    assert at_lengths(lively(), stream(65), 2)[1].tokens == [1] * 64


@pytest.mark.parametrize(
    ("fault", "note"),
    [(None, "cannot: the loss is nan"), (torch.OutOfMemoryError("no room"), "cannot: out of memory")],
)
def test_a_failing_length_leaves_the_others(
    fault: Exception | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed(x: Tensor, positions: Tensor) -> Tensor:
        if len(positions) == 64 and fault:
            raise fault
        return x * torch.nan if len(positions) == 64 else x

    model = lively()
    monkeypatch.setattr(model.position, "embed", embed)
    trained, double, triple = at_lengths(model, stream(300), 2, 3)
    assert double == LengthLoss(64, note=note)
    assert trained.loss is not None
    assert triple.loss is not None


def test_the_model_is_evaluated_without_dropout_and_left_as_it_was() -> None:
    model = lively("model.dropout=0.5").train()
    assert at_lengths(model, stream(100), 2) == at_lengths(model, stream(100), 2)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("value", ["0.5", "nan", "two", "[2]"])
def test_a_multiple_that_is_no_number_from_1_up_is_refused(value: str, tiny: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^train\.eval_lengths=\[1, .*\]: "):
        planned(*tiny, f"train.eval_lengths=[1,{value}]")


def test_a_run_and_an_evaluation_of_its_folder_find_the_same_at_all_lengths(command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, *LENGTHS)
    assert (ran.code, ran.err) == (0, "")
    assert "evaluating at 1, 2 x 32 tokens\n" in ran.out
    found = Evaluation.load(ran.run)
    assert (found.step, [entry.length for entry in found.lengths]) == (10, [32, 64])
    assert found.lengths[0].loss == pytest.approx(Summary.load(ran.run).metrics["val/loss"], abs=1e-6)
    (ran.run / "eval.json").unlink()
    assert evaluate(ran.run, eval_settings("eval.parts=[length]", "eval.lengths=[1,2]")) == found
    assert Evaluation.load(ran.run) == found


@pytest.mark.slow
def test_a_run_killed_while_evaluating_goes_on(
    command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("llama_lab.training.recording.evaluation", Mock(side_effect=KeyboardInterrupt))
        stopped = command(*tiny, *LENGTHS)
    status = RunFolder(stopped.run).status
    assert status.status != "done"
    assert command(*tiny, *LENGTHS).code == 0
    assert (stopped.run / "eval.json").exists()


@torch.no_grad()
def test_losses_of_an_encoder_decoder_stand_where_their_tokens_do() -> None:
    """Of each window, those of the second half; the last of its targets begins the next window."""
    model, tokens = lively("family=encoder_decoder").eval(), stream(5 * CONTEXT + 1)
    nll, counts, _ = sums_by_position(model, [ValWindows(tokens, CONTEXT)], CONTEXT, 2 * CONTEXT, NEXT_TOKENS)
    half = CONTEXT // 2
    assert counts.tolist() == [0] * (half - 1) + [5] * half + [0]
    windows = torch.from_numpy(tokens[: 5 * CONTEXT].astype(np.int64)).view(5, CONTEXT)
    logits = model(windows[:, half - 1 : -1], None, windows[:, :half])
    losses = F.cross_entropy(logits.flatten(0, 1), windows[:, half:].flatten(), reduction="none").view(5, half)
    torch.testing.assert_close(nll[half - 1 : -1], losses.sum(0).double())


@pytest.mark.slow
def test_an_encoder_decoder_is_evaluated_in_all_parts_but_the_one_without_a_source(
    trained: Callable[..., Path], copied: Callable[[Path], Path], evaluating: Command
) -> None:
    run = copied(trained("family=encoder_decoder"))
    refused = evaluating(f"run={run}", "eval.parts=[lm_eval]", "eval.tasks=[any]")
    assert refused.err.startswith("error: eval.parts: ")
    quick = ("eval.lengths=[2]", "eval.contexts=[0.01,1]", "eval.batch_sizes=[1]", "eval.rounds=1", "max_new_tokens=3")
    shown = evaluating(f"run={run}", *quick)
    assert (shown.code, shown.err) == (0, "")
    assert "of as long a source" in shown.out
    found = Evaluation.load(run)
    assert found.metrics["val/loss"] == pytest.approx(Summary.load(run).metrics["val/loss"])
    assert [speed.context for speed in found.speed] == [2, 32]
    assert found.cache
