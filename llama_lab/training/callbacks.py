"""What happens beside the training step: metrics, checkpoints, and a clean stop."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from llama_lab.devices.memory import peak_memory_bytes, reset_peak_memory
from llama_lab.devices.throughput import Speed, Stopwatch, synchronize
from llama_lab.model import Cost
from llama_lab.model.cost import state_metrics
from llama_lab.runs.checkpoint import discard, replace_checkpoint, stable

from .module import LanguageModel

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SLOW_STEPS = 3  # steps of a process that no speed includes: kernels compile, caches fill


class DivergedError(Exception):
    """A loss is no longer a number."""


class InterruptedRunError(Exception):
    """The user asked to stop, and a checkpoint has been written."""


class Display(Protocol):
    """Shows progress to a person."""

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """Training has come to `step`; `metrics` are those of this step, if any were logged."""


class Monitor(L.Callback):
    """Logs metrics at the first step, every `log_every` steps and after every evaluation, and shows them.

    tokens_per_step: over all devices. cost: the model's; every row has its KV cache's. peak_flops: of one device, None
    if not known. Speed leaves out the first steps, evaluation, and whatever runs inside `stopwatch.paused()`. Raises
    DivergedError when the loss is no number.
    """

    def __init__(
        self,
        log_every: int,
        tokens_per_step: int,
        cost: Cost,
        peak_flops: float | None,
        display: Display,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.log_every = log_every
        self.tokens_per_step = tokens_per_step
        self.cost = cost
        self.peak_flops = peak_flops
        self.display = display
        self.stopwatch = stopwatch or Stopwatch()
        self.speed = Speed()
        self.evaluated_step = -1
        self._resumed_seconds = 0.0
        self._first_step = 0
        self._seen_step = 0

    def state_dict(self) -> dict[str, Any]:
        """Training seconds, so that the wall clock goes on when a run resumes."""
        return {"seconds": self.stopwatch.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the clock of the checkpoint."""
        self._resumed_seconds = state_dict["seconds"]
        self.stopwatch.start(self._resumed_seconds)
        self.stopwatch.stop()  # until training goes on, if any is left

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, and the search for the peak of memory."""
        reset_peak_memory(pl_module.device)
        self._first_step = self._seen_step = trainer.global_step
        self.stopwatch.start(self._resumed_seconds)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step: mark the speed, log if it is time."""
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        if step == self._first_step + SLOW_STEPS:
            synchronize(pl_module.device)
            self.speed.mark(step * self.tokens_per_step, self.stopwatch.seconds)
        metrics = {}
        if step % self.log_every == 0 or step in (1, trainer.max_steps):
            assert isinstance(pl_module, LanguageModel)
            metrics = self._train_metrics(trainer, pl_module, step)
            self._log(trainer, metrics)
        self.display.update(step, metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.stopwatch.stop()

    def _train_metrics(self, trainer: L.Trainer, module: LanguageModel, step: int) -> dict[str, float]:
        """Everything that is known after this step. Raises DivergedError."""
        assert module.grad_norm is not None
        loss = module.pop_train_loss()  # waits for the device, so that the speed below is of finished work
        if not math.isfinite(loss):
            raise DivergedError(f"the training loss is {loss} at step {step}")
        tokens = step * self.tokens_per_step
        if step > self._first_step + SLOW_STEPS:
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
        """Log the losses of the whole validation set, and let the clock run on."""
        assert isinstance(pl_module, LanguageModel)
        loss, bits_per_byte = pl_module.pop_val_loss()
        step = self.evaluated_step = trainer.global_step
        if not math.isfinite(loss):
            raise DivergedError(f"the validation loss is {loss} at step {step}")
        metrics = {
            "tokens": step * self.tokens_per_step,
            "seconds": self.stopwatch.seconds,
            "val/loss": loss,
            "val/bits_per_byte": bits_per_byte,
        }
        self._log(trainer, metrics)
        self.display.update(step, metrics)
        if trainer.state.fn == TrainerFn.FITTING:
            self.stopwatch.resume()

    def _log(self, trainer: L.Trainer, metrics: dict[str, float]) -> None:
        """Send metrics to all loggers."""
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


class StepTimes(L.Callback):
    """The seconds of every optimizer step, until the device has done it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._seen_step = 0
        self._began = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        synchronize(pl_module.device)
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step: note what it took."""
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        synchronize(pl_module.device)
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now


class StopRequest:
    """Ctrl-C and SIGTERM as a flag that the training loop reads between steps; a second Ctrl-C stops at once.

    A second SIGTERM does not: schedulers send several, and a save may be under way.
    """

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals inside, and hand them back to whoever had them before."""
        old = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def listen(self) -> None:
        """Catch the signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = True
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)


class Checkpointing(L.Callback):
    """Writes `last.ckpt` every `every` optimizer steps, at the end, and when asked to stop; always between two steps.

    At a step that is evaluated (every `evaluate_every`), it waits for the evaluation, which a resumed run would skip.
    The one before is kept beside it, and a kill leaves one of them. At `stable_step`, if that is not the last, it
    writes `stable.ckpt`, too, for a larger budget to begin from. Raises InterruptedRunError after the checkpoint of a
    requested stop.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        evaluate_every: int,
        stop: StopRequest,
        stopwatch: Stopwatch,
        stable_step: int = 0,
    ) -> None:
        self.path = path
        self.stable_step = stable_step
        self.every = every
        self.evaluate_every = evaluate_every
        self.stop = stop
        self.stopwatch = stopwatch
        self._saved_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step to start from needs no checkpoint. Take SIGTERM back from Lightning, which would stop unsaved."""
        self.stop.listen()
        self._saved_step = trainer.global_step
        if trainer.is_global_zero and trainer.global_step < self.stable_step:
            discard(stable(self.path))  # of a smaller budget, or written just before a kill

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step that is not evaluated: save if it is time, stop if asked."""
        is_step_end = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_step_end and trainer.global_step % self.evaluate_every:
            self._save_or_stop(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After an evaluation in training: the same."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._save_or_stop(trainer)

    def _save_or_stop(self, trainer: L.Trainer) -> None:
        """Save if it is time; stop if asked, all ranks at the same step."""
        step = trainer.global_step
        if step == self._saved_step:
            return
        if step == self.stable_step and step < trainer.max_steps:
            self._write(trainer, stable(self.path))
        stopping = trainer.strategy.reduce_boolean_decision(self.stop.requested, all=False)
        if stopping or step % self.every == 0 or step == trainer.max_steps:
            self.save(trainer)
        if stopping and step < trainer.max_steps:
            raise InterruptedRunError

    def save(self, trainer: L.Trainer) -> None:
        """Write the last checkpoint."""
        self._write(trainer, self.path)
        self._saved_step = trainer.global_step

    def _write(self, trainer: L.Trainer, path: Path) -> None:
        """Write a checkpoint; the time it takes is not training."""
        with self.stopwatch.paused():
            fresh = path.with_suffix(".tmp")
            if trainer.is_global_zero:
                discard(fresh)  # what a kill has left
            try:
                trainer.save_checkpoint(fresh)
            except OSError:
                discard(fresh)  # half a checkpoint would fill a full disk
                raise
            if trainer.is_global_zero:
                replace_checkpoint(fresh, path)
