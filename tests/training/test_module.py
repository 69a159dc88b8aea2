"""The loss that is trained on, the loss that is reported, and the gradient between them."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from llama_lab.data.windows import ValWindows
from llama_lab.model import Decoder
from llama_lab.training.assemble import build_module
from llama_lab.training.module import LanguageModel, second_half
from tests.composing import decoder
from tests.selection import first
from tests.training.tiny import Pieces, logged, nll_by_hand, pieces, planned, trained, trained_state

STEP = 8 * 32  # tokens


@pytest.fixture
def settings(tiny: list[str], tmp_path: Path) -> list[str]:
    """A run's overrides, for a folder of its own."""
    return [*tiny, f"runs_dir={tmp_path}"]


def sgd(lr: float) -> Callable[[nn.Module], SGD]:
    """An optimizer whose step is the gradient times `lr`, so that weights show gradients."""
    return lambda model: SGD(model.parameters(), lr)


def weights(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# Validation


@pytest.fixture(scope="module")
def validated(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Pieces, list[float]]:
    """A trained model, and what each validation token costs it by a loop in float64."""
    parts = pieces(*tiny, f"runs_dir={tmp_path_factory.mktemp('runs')}", f"train.tokens={20 * STEP}")
    assert parts.fit() == "done"
    model = copy.deepcopy(parts.module.model)
    return parts, nll_by_hand(model, parts.dataset.val.tolist())


def test_validation_loss_is_the_sum_over_all_tokens_over_their_number(
    validated: tuple[Pieces, list[float]],
) -> None:
    parts, paid = validated
    windows = ValWindows(parts.dataset.val, 32)
    assert len(windows) % 8, "the last batch is as large as the others"
    assert len(paid) % 32, "the last window is full"
    exact = sum(paid) / parts.dataset.index.val.tokens
    assert parts.rows[-1]["val/loss"] == pytest.approx(exact, rel=1e-5)
    batches = [paid[start : start + STEP] for start in range(0, len(paid), STEP)]
    mean_of_batches = sum(sum(batch) / len(batch) for batch in batches) / len(batches)
    assert mean_of_batches != pytest.approx(exact, rel=1e-5), "the wrong mean would pass too"


def test_the_loss_of_second_halves_is_that_of_their_tokens(validated: tuple[Pieces, list[float]]) -> None:
    parts, paid = validated
    second = [loss for i, loss in enumerate(paid) if 15 <= i % 32 < 31]  # tokens 16 to 31 of windows of 32
    assert parts.rows[-1]["val/second_half_loss"] == pytest.approx(sum(second) / len(second), rel=1e-5)


@pytest.mark.parametrize("length", [8, 9])
def test_the_second_half_of_a_window_is_the_same_tokens_in_all_families(length: int) -> None:
    window, found = torch.arange(length + 1)[None], []
    for family in ("family=decoder", "objective=prefix", "family=encoder_decoder"):
        model = decoder("size=pico", family)
        _, targets, *_ = model.cut(window[:, :-1], window[:, 1:])
        found.append(second_half(targets, length).tolist())
    assert found == [[[*range(length // 2, length)]]] * 3


def test_bits_per_byte_are_the_sum_over_ln_2_and_the_bytes_of_the_text(validated: tuple[Pieces, list[float]]) -> None:
    parts, paid = validated
    ids = parts.dataset.val.tolist()
    text_bytes = sum(token != parts.dataset.tokenizer.eot_id for token in ids)  # tokenizer=byte: a token is a byte
    assert text_bytes < len(paid)
    assert parts.rows[-1]["val/bits_per_byte"] == pytest.approx(sum(paid) / math.log(2) / text_bytes, rel=1e-5)


# Training


def language_model(model: Decoder, **weights: float) -> LanguageModel:
    return LanguageModel(model, sgd(1.0), lambda step, steps: 1.0, steps=1, bytes_per_token=1, **weights)


def test_z_loss_adds_its_weight_times_the_mean_squared_log_partition() -> None:
    model = decoder()
    for p in model.parameters():
        p.data.mul_(5)  # else all positions have the same log-partition
    tokens = torch.randint(97, (3, 33), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1], tokens[:, 1:]
    plain, with_z = (language_model(model, z_loss=z_loss).loss(*batch)[1] for z_loss in (0.0, 0.25))
    logits = model(batch[0]).double()
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    z = logits.exp().sum(-1).log().square().mean()
    assert plain.item() == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert (with_z - plain).item() == pytest.approx(0.25 * z.item(), rel=1e-5)


def test_label_smoothing_of_a_run_is_in_what_it_minimises_and_not_in_its_loss(settings: list[str]) -> None:
    model, tokens = decoder(), torch.arange(33)[None]
    batch = tokens[:, :-1], tokens[:, 1:]
    loss, objective = build_module(planned(*settings, "train.label_smoothing=0.1"), model, 1.0).loss(*batch)
    logits = model(batch[0]).flatten(0, 1)
    plain, smooth = (F.cross_entropy(logits, batch[1].flatten(), label_smoothing=share) for share in (0.0, 0.1))
    assert (loss.item(), objective.item()) == pytest.approx((plain.item(), smooth.item()), rel=1e-6)
    assert loss.item() != pytest.approx(objective.item(), rel=1e-5)


def test_the_logged_training_loss_is_the_plain_mean_since_the_last_row(
    settings: list[str],
) -> None:
    def losses(*overrides: str) -> list[float]:
        parts = pieces(*settings, f"train.tokens={6 * STEP}", *overrides, optimizer=sgd(0.0))
        parts.fit()
        return [row["train/loss"] for row in parts.rows if "train/loss" in row]

    each = losses("train.log_every=1")
    assert len(set(each)) == 6
    means = [each[0], sum(each[1:3]) / 2, sum(each[3:]) / 3]  # the first step has a row of its own
    assert losses("train.log_every=3", "overwrite=true") == pytest.approx(means, rel=1e-6)
    micro = ["train.log_every=3", "train.micro_batch_size=2", "train.z_loss=0.5", "train.label_smoothing=0.1"]
    assert losses(*micro, "overwrite=true") == pytest.approx(means, rel=1e-6)


def test_losses_of_a_checkpoint_follow_the_module_to_its_device() -> None:
    module = language_model(decoder())
    for checkpoint in ({"train_metrics": {"loss": [torch.tensor(1.0)]}}, {"train_losses": [torch.tensor(1.0)]}):
        module.on_load_checkpoint(checkpoint)
        module.to("meta").on_train_start()  # Lightning reads checkpoints before it moves the module
        assert [loss.device.type for loss in module.auxiliary.values["loss"]] == ["meta"]


@pytest.mark.parametrize("objective", ["next_token", "prefix"])  # with which micro-batches have unequal targets
def test_micro_batches_leave_gradients_and_weights_as_one_batch_makes_them(objective: str, settings: list[str]) -> None:
    runs = []
    for micro_batch_size in ("null", "2"):
        overrides = [f"train.micro_batch_size={micro_batch_size}", "train.log_every=1", "overwrite=true"]
        overrides += [f"objective={objective}", f"train.tokens={5 * STEP}"]
        parts = pieces(*settings, *overrides, optimizer=sgd(0.3), grad_clip=None)
        parts.fit()
        norms = [row[key] for row in parts.rows for key in ("optim/grad_norm", "train/loss") if key in row]
        runs.append((weights(parts.module.model), norms, parts.data))
    (whole, whole_norms, one), (split, split_norms, four) = runs
    assert [len(next(iter(data.train_dataloader()))) for data in (one, four)] == [1, 4]
    assert len(whole_norms) == 2 * 5
    assert split_norms == pytest.approx(whole_norms, rel=1e-4)
    moved = (whole - weights(decoder(vocab_size=257))).norm()
    assert (split - whole).norm() < 1e-5 * moved


@pytest.mark.parametrize("limit", [0.01, None])
def test_clipping_limits_the_gradient_and_logs_its_norm_before(limit: float | None, settings: list[str]) -> None:
    parts = pieces(
        *settings,
        f"train.tokens={STEP}",
        "train.log_every=1",
        "schedule=constant",
        "schedule.warmup=0",
        optimizer=sgd(1.0),
        grad_clip=limit,
    )
    model = copy.deepcopy(parts.module.model)
    batch = map(torch.from_numpy, parts.data.train_windows.examples(0, parts.data.batch_size))
    language_model(model).loss(*batch)[1].backward()
    unclipped = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
    before = weights(parts.module.model)
    parts.fit()
    assert unclipped > 0.1
    assert (weights(parts.module.model) - before).norm().item() == pytest.approx(limit or unclipped, rel=1e-4)
    assert parts.rows[0]["optim/grad_norm"] == pytest.approx(unclipped, rel=1e-4)


PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}


@pytest.mark.parametrize("precision", first(1, reversed(PRECISIONS)))
def test_every_precision_trains_on_a_cpu(precision: str, settings: list[str]) -> None:
    folder = trained(*settings, "trainer=cpu", f"trainer.precision={precision}", f"train.tokens={24 * STEP}")
    first, *_, last = logged(folder, "val/loss")
    assert last < first - 0.2
    assert {weight.dtype for weight in trained_state(folder)["state_dict"].values()} == {PRECISIONS[precision]}


def test_bf16_mixed_computes_in_another_precision_than_float32(settings: list[str]) -> None:
    first_losses = []
    for precision in ("32-true", "bf16-mixed"):
        overrides = [f"trainer.precision={precision}", f"train.tokens={STEP}", "train.log_every=1", "overwrite=true"]
        parts = pieces(*settings, *overrides)
        parts.fit()
        first_losses.append(parts.rows[0]["train/loss"])
    assert first_losses[0] != first_losses[1]
    assert first_losses[0] == pytest.approx(first_losses[1], rel=1e-2)
