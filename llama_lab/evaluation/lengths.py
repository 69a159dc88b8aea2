"""The loss at context lengths beyond the trained one, and by position."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from llama_lab.config.schema import is_kind
from llama_lab.data.dataset import Dataset, Validation
from llama_lab.data.objectives import Objective, open_objective, predicts_text
from llama_lab.data.open import has_answers
from llama_lab.devices.hardware import Hardware
from llama_lab.model import Decoder
from llama_lab.model.loss import IGNORE
from llama_lab.runs.evaluation import Evaluation, LengthLoss
from llama_lab.util.errors import ConfigError

MAX_BUCKETS = 64


def check_multiples(key: str, multiples: Collection[Any]) -> None:
    """Raise ConfigError unless every multiple of the context in setting `key` is a number from 1 to 1e6."""
    for multiple in multiples:
        if not is_kind(multiple, float) or not 1 <= multiple <= 1e6:
            reason = f"{multiple} is no multiple of the context; give numbers from 1 to 1e6"
            raise ConfigError(f"{key}={list(multiples)}: {reason}")


def evaluation(
    cfg: DictConfig, dataset: Dataset, model: Decoder, hardware: Hardware, step: int | None, multiples: Sequence[float]
) -> Evaluation:
    """The losses of a run's `model` after `step` steps, on one device.

    The validation loss is that of the first of `lengths`, the trained one; `multiples` of it follow. `model` is left in
    the precision of `hardware`. Raises ConfigError if the loss is no number.
    """
    if multiples:
        times = ", ".join(f"{multiple:g}" for multiple in multiples)
        print(f"evaluating at {times} x {model.max_seq_len:,} tokens", flush=True)
    if hardware.precision == "bf16-true":
        model.bfloat16()
    with hardware.autocast(), evaluating_on(model, hardware.torch_device):
        objective, parts = open_objective(cfg, dataset), lambda length: dataset.val_parts(length).values()
        lengths = losses_at_lengths(model, parts, multiples, batch_tokens(cfg), objective)
    if predicts_text(cfg) and not has_answers(cfg):
        lengths = [replace(entry, accuracy=None) for entry in lengths]  # says little of text
    trained = lengths[0]
    if trained.loss is None:
        why = trained.note.removeprefix("cannot: ")
        raise ConfigError(f"model.max_seq_len={model.max_seq_len}: no validation loss, {why}")
    metrics = {"val/loss": trained.loss, "val_tokens": sum(trained.tokens)}
    if predicts_text(cfg):
        metrics["val/bits_per_byte"] = trained.loss / math.log(2) / dataset.bytes_per_token
    if trained.accuracy is not None:
        metrics["val/accuracy"] = trained.accuracy
    if trained.loss < 700:  # beyond, no float holds it
        metrics["val/perplexity"] = math.exp(trained.loss)
    unit = None if dataset.entropy_floor is None else "answer"
    return replace(surroundings(hardware, step), metrics=metrics, lengths=lengths, unit=unit)


def batch_tokens(cfg: DictConfig) -> int:
    """Number of tokens in a forward pass of the run's training."""
    return int((cfg.train.micro_batch_size or cfg.train.batch_size) * cfg.model.max_seq_len)


def surroundings(hardware: Hardware, step: int | None) -> Evaluation:
    """An empty evaluation with its step, device and precision."""
    return Evaluation(
        step=step,
        device=hardware.device_name,
        precision=hardware.precision,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


def losses_at_lengths(
    model: Decoder,
    parts: Callable[[int], Collection[Validation]],
    multiples: Sequence[float],
    batch_tokens: int,
    objective: Objective,
) -> list[LengthLoss]:
    """The losses at the trained length, then at `multiples` of it, in ascending order, of a model `evaluating_on`.

    Lengths are rounded to whole tokens. parts: makes the validation windows of a length, of each part of a mixture.
    A batch holds about `batch_tokens` tokens, and at least one window. objective: what is predicted of them.
    """
    longer = {round(multiple * model.max_seq_len) for multiple in multiples} - {model.max_seq_len}
    lengths = (model.max_seq_len, *sorted(longer))
    return [loss_at_length(model, parts(length), length, batch_tokens, objective) for length in lengths]


@contextmanager
def evaluating_on(model: Decoder, device: torch.device) -> Iterator[None]:
    """Put `model` on `device` in eval mode, without gradients, and restore it afterwards."""
    home, training = model.embedding.tokens.weight.device, model.training
    model.to(device).eval()
    try:
        # Eager, since a compiled model would be compiled again for every length.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.to(home).train(training)


def loss_at_length(
    model: Decoder, parts: Collection[Validation], length: int, batch_tokens: int, objective: Objective
) -> LengthLoss:
    """The loss and the accuracy in windows of `length` tokens, or why there is none."""
    if ended := model.length_error(length):
        return LengthLoss(length, note=f"cannot: {ended}")
    if (tokens := sum(windows.tokens for windows in parts)) < length:  # the last positions would have no loss
        return LengthLoss(length, note=f"cannot: the validation text has {tokens} tokens, less than one window")
    try:
        objective.require_room(length)
        nll, counts, correct = sums_by_position(model, parts, length, batch_tokens, objective)
    except ConfigError as error:  # of an objective, whose tokens may not suffice
        return LengthLoss(length, note=f"cannot: {error}")
    except torch.OutOfMemoryError:  # must not fail a run for a length that it was not trained at
        return LengthLoss(length, note="cannot: out of memory")
    loss = float(nll.sum() / counts.sum())
    if not math.isfinite(loss):
        return LengthLoss(length, note=f"cannot: the loss is {loss}")
    width = math.ceil(length / MAX_BUCKETS)
    buckets = list(zip(*(torch.split(x, width) for x in (nll, counts, torch.arange(length))), strict=True))
    buckets = [bucket for bucket in buckets if bucket[1].any()]  # a probe asks nothing in others
    return LengthLoss(
        length,
        loss,
        positions=[float(positions.double().mean()) for _, _, positions in buckets],
        losses=[float(nll.sum() / counts.sum()) for nll, counts, _ in buckets],
        tokens=[int(counts.sum()) for _, counts, _ in buckets],
        accuracy=float(correct / counts.sum()),
    )


def sums_by_position(
    model: Decoder,
    parts: Iterable[Validation],
    length: int,
    batch_tokens: int,
    objective: Objective,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Sum of nats at each position over windows of `length` tokens, in float64, and number of tokens: `(length,)`.

    And the number of targets that got the largest logit.
    cache_dtype: read keys and values from a KV cache of this dtype, with its rounding; default: no cache.
    """
    size, device = max(1, batch_tokens // length), model.embedding.tokens.weight.device
    nll, counts = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64)
    correct = 0
    for windows, start in ((part, start) for part in parts for start in range(0, len(part), size)):
        examples = objective.val_batch(windows, range(start, min(start + size, len(windows))))
        inputs, targets, *given = model.cut(*(torch.from_numpy(ids) for ids in examples))
        cache = None if cache_dtype is None else model.new_state(len(inputs), length, cache_dtype)
        logits = model(inputs.to(device), cache, *(x.to(device) for x in given)).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORE, reduction="none"
        )
        # Of a window whose first half is a source; positions after a source of any length are those in its target.
        first = max(0, length - targets.shape[1] - 1) if len(given) < 2 else 0
        predicted = slice(first, first + targets.shape[1])
        nll[predicted] += losses.view_as(targets).cpu().double().sum(0)  # Apple's devices have no float64
        counts[predicted] += (targets != IGNORE).sum(0)
        correct += int((logits.argmax(-1).cpu() == targets).sum())
    return nll, counts, correct
