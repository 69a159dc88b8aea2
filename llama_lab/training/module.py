"""The decoder as a LightningModule: loss, training step, optimizer, exact validation."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from llama_lab.model.auxiliary import Auxiliary
from llama_lab.model.decoder import Decoder
from llama_lab.model.loss import IGNORE, plain_loss


class LanguageModel(L.LightningModule):
    """Trains `model` on next-token prediction.

    optimizer: factory that takes the model. schedule: maps step and number of steps to a factor of the learning rate.
    grad_clip: maximum gradient norm; None: no clipping. z_loss, label_smoothing: see `head_loss`. bytes_per_token: of
    the validation text, for bits per byte; None: these mean nothing. seed: of dropout. with_accuracy: validation
    reports the share of targets with the largest logit, and that of windows all of whose targets have it, in place of
    second halves. ema: decay per optimizer step of an exponential moving average of the weights (Polyak & Juditsky
    1992), which starts at the initial weights and is validated, too; None: no average.

    A training batch is the list of micro-batches of one optimizer step, each `(inputs, targets)`, both int64 `(B, T)`;
    `Decoder.cut` makes the arguments of the loss of them. Losses are divided by the mean number of targets of all
    micro-batches and ranks, so that their mean is the mean over tokens. Validation accumulates sums instead.

    Modules may add terms and metrics (`model/auxiliary.py`). Those with a method `after_step()` have it called after
    every optimizer step, on all ranks, for updates that are no gradients.
    """

    automatic_optimization = False

    def __init__(
        self,
        model: Decoder,
        optimizer: Callable[[nn.Module], Optimizer],
        schedule: Callable[[int, int], float],
        steps: int,
        bytes_per_token: float | None,
        grad_clip: float | None = None,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        seed: int = 0,
        with_accuracy: bool = False,
        ema: float | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        # A submodule, which is moved, sharded, saved and restored as the model is. Lightning's WeightAveraging would
        # evaluate the average alone, and save it as the weights.
        self.ema = None if ema is None else copy.deepcopy(model).requires_grad_(False)
        self._update_ema = get_ema_multi_avg_fn(ema or 0.0)  # type: ignore[no-untyped-call]
        self.steps = steps
        self.grad_clip = grad_clip
        self.z_loss, self.label_smoothing = z_loss, label_smoothing
        self.bytes_per_token = bytes_per_token
        self.seed = seed
        self.with_accuracy = with_accuracy
        self.grad_norm: Tensor | None = None
        self._make_optimizer, self._schedule = optimizer, schedule
        self.auxiliary = Auxiliary()
        self._val_sums: list[list[float]] = []  # of each part, see `validation_step`

    def training_step(self, micro_batches: Sequence[Sequence[Tensor]], step: int) -> None:
        """One optimizer step on the clipped mean gradient of all micro-batches and devices."""
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        strategy: Any = self.trainer.strategy
        count = len(micro_batches)
        counts = torch.stack([(self.model.cut(*batch)[1] != IGNORE).sum() for batch in micro_batches])
        predicted = strategy.reduce(counts.float().mean(), reduce_op="mean")
        losses = []
        for i, batch in enumerate(micro_batches):
            # Dropout depends on seed, micro-batch and rank alone, so that a resumed run repeats it.
            torch.manual_seed((self.seed << 32) + ((step * count + i) << 12) + self.global_rank)
            nll, objective = self.loss(*batch, predicted=predicted)
            losses.append(nll.detach())
            # DDP, whose forward pass is all of this method, averages gradients in the last backward pass alone; FSDP
            # in each (see `FullySharded`).
            waits = i < count - 1 and isinstance(strategy, ParallelStrategy)
            between = strategy.block_backward_sync() if waits else nullcontext()
            # Lightning runs all of this under autocast, and PyTorch advises against a backward pass under it.
            with between, torch.autocast(self.device.type, enabled=False):
                self.manual_backward(objective / count)
            self.auxiliary.check()
        limit = math.inf if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        with self.auxiliary.collecting():
            for part in self.model.modules():
                update: Any = getattr(part, "after_step", None)
                if update is not None:
                    update()
        if self.ema is not None:
            self._update_ema([*self.ema.parameters()], [*self.model.parameters()], None)
            for ours, copied in zip(self.model.buffers(), self.ema.buffers(), strict=True):  # of users' components
                copied.copy_(ours)
        optimizer.zero_grad()
        schedule.step()
        self.auxiliary.add("loss", torch.stack(losses).mean())

    def loss(self, *batch: Tensor, predicted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss of a micro-batch in nats per token, and the objective, with smoothing and z-loss.

        The objective has the gradients of the terms that modules add, not their values. predicted: what sums over
        tokens are divided by; default: the number of targets.
        """
        inputs, targets, *given = self.model.cut(*batch)
        weights = {"z_loss": self.z_loss, "label_smoothing": self.label_smoothing}
        with self.auxiliary.collecting():
            nll, objective, _ = self.model.loss(inputs, targets, *given, **weights)
        if predicted is None:
            predicted = (targets != IGNORE).sum()
        return nll / predicted, self.auxiliary.join(objective / predicted)

    def pop_train_metrics(self) -> dict[str, float]:
        """Means since the last call, over all ranks: the loss, plain, and what modules have added.

        Synchronizes with the device. Raises ValueError if ranks have added different metrics.
        """
        strategy, means = self.trainer.strategy, self.auxiliary.take()
        if [*means] != (others := strategy.broadcast([*means])):
            raise ValueError(f"{', '.join(means)}: rank 0 has {', '.join(others)}; add the same metrics on all ranks")
        values = strategy.reduce(torch.stack([*means.values()]), reduce_op="mean").tolist()
        return {f"train/{name}": value for name, value in zip(means, values, strict=True)}

    def validation_step(self, batch: Sequence[Tensor], batch_index: int, dataloader_idx: int = 0) -> None:
        """Accumulate the sums of a batch on this rank, for the mixture's part with this index."""
        inputs, targets, *given = self.model.cut(*batch)
        # Eager, since the last batch is smaller, and compiling for it would take longer than it saves.
        with torch.compiler.set_stance("force_eager"):
            if self.with_accuracy:
                logits = self.model(inputs, None, *given)
                losses, is_right = plain_loss(logits, targets), logits.argmax(-1) == targets
            else:
                losses, is_right = self.model.loss(inputs, targets, *given), targets == IGNORE
            ema_nll = self.ema.loss(inputs, targets, *given)[0].item() if self.ema is not None else 0.0
        second_nll, second = (second_half(x, batch[0].shape[1]) for x in (losses[-1], targets))
        is_given = targets == IGNORE
        has_targets = ~is_given.all(-1)
        masks = (~is_given, is_right, second != IGNORE, (is_right | is_given).all(-1) & has_targets, has_targets)
        counts = [int(mask.sum()) for mask in masks]
        found = (losses[0].item(), counts[0], counts[1], ema_nll, second_nll.sum().item(), *counts[2:])
        self._val_sums += [[0.0] * len(found) for _ in range(len(self._val_sums), dataloader_idx + 1)]
        self._val_sums[dataloader_idx] = [a + b for a, b in zip(self._val_sums[dataloader_idx], found, strict=True)]

    def on_validation_epoch_end(self) -> None:
        """Reshard the averaged model, as a backward pass does for the trained one."""
        if isinstance(self.ema, FSDPModule):
            self.ema.reshard()

    def pop_val_metrics(self, parts: Iterable[str] = ()) -> dict[str, float]:
        """Metrics of the whole validation set over all ranks, and reset the sums.

        Loss, bits per byte, that of second halves or accuracy and exact match, the average's loss if there is one, and
        the loss of each of `parts`.
        """
        sums = torch.tensor(self._val_sums, dtype=torch.float64)
        if self.trainer.world_size > 1:  # on the device only then, since Apple's have no float64
            sums = self.trainer.strategy.reduce(sums.to(self.device), reduce_op="sum")
        self._val_sums = []
        nll, tokens, correct, ema_nll, second_nll, second_tokens, exact, rows = sums.sum(0).tolist()
        loss = nll / tokens
        metrics = {"val/loss": loss}
        if self.bytes_per_token is not None:
            metrics["val/bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        if self.with_accuracy:
            metrics |= {"val/accuracy": correct / tokens, "val/exact_match": exact / rows}
        else:
            metrics["val/second_half_loss"] = second_nll / second_tokens
        if self.ema is not None:
            metrics["val/ema_loss"] = ema_nll / tokens
        of_parts = zip(parts, sums.tolist(), strict=False)  # the only part of other text than a mixture has no name
        return metrics | {f"val/loss/{name}": nll / tokens for name, (nll, tokens, *_) in of_parts if tokens}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the metrics not yet logged, averaged over all ranks, so that a resumed run logs the same means."""
        reduce = self.trainer.strategy.reduce
        checkpoint["train_metrics"] = {
            name: list(reduce(torch.stack(values), reduce_op="mean").cpu())
            for name, values in self.auxiliary.values.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the metrics not yet logged; a checkpoint of 0.4.0 has the losses alone."""
        losses = checkpoint.get("train_losses")
        self.auxiliary.values = {"loss": list(losses)} if losses else checkpoint.get("train_metrics", {})

    def on_train_start(self) -> None:
        """Move restored metrics to the module's device, which is known only now."""
        for values in self.auxiliary.values.values():
            values[:] = [value.to(self.device) for value in values]

    def configure_optimizers(self) -> Any:
        """The optimizer, and its schedule over steps."""
        optimizer = self._make_optimizer(self.model)
        # A function, not an object: LambdaLR saves an object's attributes, and an old budget would come back on resume.
        scheduler = LambdaLR(optimizer, lambda step: self._schedule(step, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def second_half(x: Tensor, length: int) -> Tensor:
    """What `x`, by targets `(B, T)`, holds for the second half of windows of `length` tokens, given the first half.

    So of the same tokens in all models, those whose `cut` leaves only these too.
    """
    half = length // 2
    return x[:, half - 1 - length :][:, : length - half]
