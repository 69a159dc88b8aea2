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

from llama_lab.model.decoder import Decoder
from llama_lab.model.loss import IGNORE, plain_loss


class LanguageModel(L.LightningModule):
    """Trains `model` on next-token prediction.

    optimizer: factory that takes the model. schedule: maps step and number of steps to a factor of the learning rate.
    grad_clip: maximum gradient norm; None: no clipping. z_loss: weight of the squared log-partition. bytes_per_token:
    of the validation text, for bits per byte. seed: of dropout. with_accuracy: validation also reports the share of
    targets with the largest logit. ema: decay per optimizer step of an exponential moving average of the weights
    (Polyak & Juditsky 1992), which starts at the initial weights and is validated, too; None: no average.

    A training batch is the list of micro-batches of one optimizer step, each `(inputs, targets)`, both int64 `(B, T)`.
    All have the same number of targets other than `IGNORE`, so the mean over micro-batches and ranks is the mean over
    tokens. Validation accumulates sums instead, since its last batch is smaller.
    """

    automatic_optimization = False

    def __init__(
        self,
        model: Decoder,
        optimizer: Callable[[nn.Module], Optimizer],
        schedule: Callable[[int, int], float],
        steps: int,
        bytes_per_token: float,
        grad_clip: float | None = None,
        z_loss: float = 0.0,
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
        self.z_loss = z_loss
        self.bytes_per_token = bytes_per_token
        self.seed = seed
        self.with_accuracy = with_accuracy
        self.grad_norm: Tensor | None = None
        self._make_optimizer, self._schedule = optimizer, schedule
        self._losses: list[Tensor] = []  # of the steps since they were logged
        self._val_sums: list[list[float]] = []  # nats, tokens, right ones and the average's nats of each part

    def training_step(self, micro_batches: Sequence[tuple[Tensor, Tensor]], step: int) -> None:
        """One optimizer step on the clipped mean gradient of all micro-batches and devices."""
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        strategy: Any = self.trainer.strategy
        count = len(micro_batches)
        losses = []
        for i, (inputs, targets) in enumerate(micro_batches):
            # Dropout depends on seed, micro-batch and rank alone, so that a resumed run repeats it.
            torch.manual_seed((self.seed << 32) + ((step * count + i) << 12) + self.global_rank)
            nll, objective = self.loss(inputs, targets)
            losses.append(nll.detach())
            # DDP, whose forward pass is all of this method, averages gradients in the last backward pass alone; FSDP
            # in each (see `FullySharded`).
            waits = i < count - 1 and isinstance(strategy, ParallelStrategy)
            between = strategy.block_backward_sync() if waits else nullcontext()
            # Lightning runs all of this under autocast, and PyTorch advises against a backward pass under it.
            with between, torch.autocast(self.device.type, enabled=False):
                self.manual_backward(objective / count)
        limit = math.inf if self.grad_clip is None else self.grad_clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        if self.ema is not None:
            self._update_ema([*self.ema.parameters()], [*self.model.parameters()], None)
            for ours, copied in zip(self.model.buffers(), self.ema.buffers(), strict=True):  # of users' components
                copied.copy_(ours)
        optimizer.zero_grad()
        schedule.step()
        self._losses.append(torch.stack(losses).mean())

    def loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of a micro-batch in nats per token, and the objective: the loss plus the z-loss."""
        targets = self.model.mask_prefix_targets(targets)
        nll, objective = self.model.loss(inputs, targets, self.z_loss)
        predicted = (targets != IGNORE).sum()
        return nll / predicted, objective / predicted

    def pop_train_loss(self) -> float:
        """Mean training loss since the last call, over all ranks, without the z-loss. Synchronizes with the device."""
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        return float(self.trainer.strategy.reduce(loss, reduce_op="mean"))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int, dataloader_idx: int = 0) -> None:
        """Accumulate the sums of a batch on this rank, for the mixture's part with this index."""
        inputs, targets = batch[0], self.model.mask_prefix_targets(batch[1])
        # Eager, since the last batch is smaller, and compiling for it would take longer than it saves.
        with torch.compiler.set_stance("force_eager"):
            if self.with_accuracy:
                logits = self.model(inputs)
                nll, correct = plain_loss(logits, targets)[0].item(), int((logits.argmax(-1) == targets).sum())
            else:
                nll, correct = self.model.loss(inputs, targets)[0].item(), 0
            ema_nll = self.ema.loss(inputs, targets)[0].item() if self.ema is not None else 0.0
        found = (nll, int((targets != IGNORE).sum()), correct, ema_nll)
        self._val_sums += [[0.0] * len(found) for _ in range(len(self._val_sums), dataloader_idx + 1)]
        self._val_sums[dataloader_idx] = [a + b for a, b in zip(self._val_sums[dataloader_idx], found, strict=True)]

    def on_validation_epoch_end(self) -> None:
        """Reshard the averaged model, as a backward pass does for the trained one."""
        if isinstance(self.ema, FSDPModule):
            self.ema.reshard()

    def pop_val_metrics(self, parts: Iterable[str] = ()) -> dict[str, float]:
        """Metrics of the whole validation set over all ranks, and reset the sums.

        Loss, bits per byte, accuracy and the average's loss where there are such, and the loss of each of `parts`.
        """
        sums = torch.tensor(self._val_sums, dtype=torch.float64)
        if self.trainer.world_size > 1:  # on the device only then, since Apple's have no float64
            sums = self.trainer.strategy.reduce(sums.to(self.device), reduce_op="sum")
        self._val_sums = []
        nll, tokens, correct, ema_nll = sums.sum(0).tolist()
        loss = nll / tokens
        metrics = {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / self.bytes_per_token}
        if self.with_accuracy:
            metrics["val/accuracy"] = correct / tokens
        if self.ema is not None:
            metrics["val/ema_loss"] = ema_nll / tokens
        of_parts = zip(parts, sums.tolist(), strict=False)  # the only part of other text than a mixture has no name
        return metrics | {f"val/loss/{name}": nll / tokens for name, (nll, tokens, *_) in of_parts}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the losses not yet logged, averaged over all ranks, so that a resumed run logs the same mean."""
        losses = self._losses
        if losses:
            losses = list(self.trainer.strategy.reduce(torch.stack(losses), reduce_op="mean").cpu())
        checkpoint["train_losses"] = losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the losses not yet logged."""
        self._losses = list(checkpoint["train_losses"])

    def on_train_start(self) -> None:
        """Move restored losses to the module's device, which is known only now."""
        self._losses = [loss.to(self.device) for loss in self._losses]

    def configure_optimizers(self) -> Any:
        """The optimizer, and its schedule over steps."""
        optimizer = self._make_optimizer(self.model)
        # A function, not an object: LambdaLR saves an object's attributes, and an old budget would come back on resume.
        scheduler = LambdaLR(optimizer, lambda step: self._schedule(step, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
