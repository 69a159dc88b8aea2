"""What a run logs and shows while it trains."""

import math
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from llama_lab.devices.memory import peak_memory_bytes, reset_peak_memory
from llama_lab.devices.throughput import Speed, Stopwatch, synchronize
from llama_lab.model import Cost
from llama_lab.model.cost import state_metrics
from llama_lab.util.display import Display

from .module import LanguageModel

SLOW_STEPS = 3  # steps of a process that no speed includes: kernels compile, caches fill


class DivergedError(Exception):
    """A loss is not finite."""


class Monitor(L.Callback):
    """Logs metrics at the first step, every `log_every` steps and after every evaluation, and shows them.

    tokens_per_step: over all devices. cost: the model's; every row has its KV cache's. peak_flops: of one device, None
    if not known. Speed leaves out the first `slow_steps`, evaluation, and whatever runs inside `stopwatch.paused()`.
    parts: names of a mixture's, whose losses are logged too. Raises DivergedError when the loss is not finite.

    extra: metrics that another callback, before this one, adds to the row of the step.
    """

    def __init__(
        self,
        log_every: int,
        tokens_per_step: int,
        cost: Cost,
        peak_flops: float | None,
        display: Display,
        stopwatch: Stopwatch | None = None,
        slow_steps: int = SLOW_STEPS,
        parts: Iterable[str] = (),
    ) -> None:
        self.log_every = log_every
        self.slow_steps = slow_steps
        self.parts = tuple(parts)
        self.tokens_per_step = tokens_per_step
        self.cost = cost
        self.peak_flops = peak_flops
        self.display = display
        self.stopwatch = stopwatch or Stopwatch()
        self.speed = Speed()
        self.extra: dict[str, float] = {}
        self._resumed_seconds = 0.0
        self._first_step = 0
        self._slow_seconds = 0.0  # of the first SLOW_STEPS

    def state_dict(self) -> dict[str, Any]:
        """Training seconds, so that the clock of a resumed run continues."""
        return {"seconds": self.stopwatch.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the checkpoint's clock."""
        self._resumed_seconds = state_dict["seconds"]
        self.stopwatch.start(self._resumed_seconds)
        self.stopwatch.stop()  # until training goes on, if any is left

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, and reset the peak memory."""
        reset_peak_memory(pl_module.device)
        self._first_step = trainer.global_step
        self.stopwatch.start(self._resumed_seconds)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step: mark the speed, log if it is time."""
        step = trainer.global_step
        if step == self._first_step + self.slow_steps:
            synchronize(pl_module.device)
            self.speed.mark(step * self.tokens_per_step, self.stopwatch.seconds)
            self._slow_seconds = self.stopwatch.seconds - self._resumed_seconds
        metrics = {}
        if self.logs(step, trainer.max_steps):
            assert isinstance(pl_module, LanguageModel)
            metrics = self._train_metrics(trainer, pl_module, step)
            self._log(trainer, metrics | self.extra)
            self.extra = {}
        self.display.update(step, metrics)

    def logs(self, step: int, last: int) -> bool:
        """Whether a step, counted from 1 to `last`, is logged."""
        return step % self.log_every == 0 or step in (1, last)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.stopwatch.stop()

    @property
    def warm_up_seconds(self) -> float | None:
        """What the first steps took beyond as many later ones; None before a speed is known."""
        if self.speed.overall is None:
            return None
        return max(0.0, self._slow_seconds - SLOW_STEPS * self.tokens_per_step / self.speed.overall)

    def _train_metrics(self, trainer: L.Trainer, module: LanguageModel, step: int) -> dict[str, float]:
        """The metrics of this step. Raises DivergedError."""
        assert module.grad_norm is not None
        loss = module.pop_train_loss()  # waits for the device, so that the speed below is of finished work
        if not math.isfinite(loss):
            raise DivergedError(f"the training loss is {loss} at step {step}")
        tokens = step * self.tokens_per_step
        if step > self._first_step + self.slow_steps:
            self.speed.mark(tokens, self.stopwatch.seconds)
        optimizer = trainer.optimizers[0]
        return {
            "tokens": tokens,
            "seconds": self.stopwatch.seconds,
            "train/loss": loss,
            "optim/lr": optimizer.param_groups[0]["lr"],
            "optim/grad_norm": float(module.grad_norm),
            "perf/peak_memory_bytes": peak_memory_bytes(module.device),
            **state_metrics(self.cost),
            **self.speed_metrics(self.speed.interval, trainer.world_size),
        }

    def speed_metrics(self, tokens_per_second: float | None, world_size: int) -> dict[str, float]:
        """The perf/ metrics of a speed over all devices; none of them before it is known."""
        if tokens_per_second is None:
            return {}
        per_device = tokens_per_second / world_size
        metrics = {
            "perf/tokens_per_second": tokens_per_second,
            "perf/tokens_per_second_per_device": per_device,
        }
        if self.peak_flops is not None:
            metrics["perf/mfu"] = per_device * self.cost.train_flops_per_token / self.peak_flops
        return metrics

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        if trainer.state.fn == TrainerFn.FITTING:
            synchronize(pl_module.device)
            self.stopwatch.stop()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the losses of the whole validation set, and resume the clock."""
        assert isinstance(pl_module, LanguageModel)
        found = pl_module.pop_val_metrics(self.parts)
        step = trainer.global_step
        if not math.isfinite(found["val/loss"]):
            raise DivergedError(f"the validation loss is {found['val/loss']} at step {step}")
        metrics = {"tokens": step * self.tokens_per_step, "seconds": self.stopwatch.seconds, **found}
        self._log(trainer, metrics)
        self.display.update(step, metrics)
        if trainer.state.fn == TrainerFn.FITTING:
            self.stopwatch.resume()

    def _log(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        """Send metrics to all loggers."""
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
