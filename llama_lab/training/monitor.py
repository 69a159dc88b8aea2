"""Log and display metrics during training."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn

from llama_lab.devices.performance import (
    Speed,
    Stopwatch,
    peak_flops,
    peak_memory_bytes,
    reset_peak_memory,
    synchronize,
)
from llama_lab.model import Cost
from llama_lab.model.cost import state_metrics
from llama_lab.runs.stored import SPEED, is_ours
from llama_lab.util.display import Display

from .loggers import MetricsCSV, MetricsLogger
from .run import Run
from .stop import EndedError

SLOW_STEPS = 3  # steps of a process that no speed includes: kernels compile, caches fill


class Monitor(L.Callback):
    """Logs and displays a row of metrics at the first step, every `train.log_every` and after every evaluation.

    cost: the model's; every row has its KV cache's. parts: names of a mixture's, whose losses are logged too. Speed
    leaves out the first `slow_steps`, evaluation, and whatever runs inside `stopwatch.paused()`. Raises EndedError when
    a loss is not finite.

    What callbacks before this one log, and modules by `metrics_to_log()`, goes into the next row of training or of
    evaluation, as the mean of the values since the last such row. loggers: none on ranks other than 0.
    """

    _trainer: L.Trainer  # from `setup` on

    def __init__(self, run: Run, cost: Cost, display: Display, parts: Iterable[str] = ()) -> None:
        self.run, self.cost, self.display, self.parts = run, cost, display, tuple(parts)
        self.slow_steps = SLOW_STEPS
        self.stopwatch = Stopwatch()
        self.speed = Speed()
        self.loggers: Sequence[MetricsLogger] = ()
        self._added: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}  # of training; of an evaluation
        self._left_out: set[str] = set()
        self._resumed_seconds = 0.0
        self._first_step = 0
        self._slow_seconds = 0.0  # of the first `slow_steps`

    @staticmethod
    def of(trainer: L.Trainer) -> "Monitor":
        """The monitor of a run, for other callbacks."""
        return next(callback for callback in trainer.callbacks if isinstance(callback, Monitor))  # type: ignore[attr-defined]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Replace `log` and `log_dict` of the module and of all callbacks by ours, which add to the rows."""
        self._trainer = trainer
        for logging in (*trainer.callbacks, pl_module):  # type: ignore[attr-defined]
            logging.log, logging.log_dict = self.record, self.record_all

    def record(self, name: str, value: Any, sync_dist: bool = False) -> None:
        """Add a number of the user's to the next row; one that is not finite is left out, and told once.

        sync_dist: average it over all devices, all of which must call this; default: the first one's. Raises ValueError
        for a name of ours.
        """
        if is_ours(name):
            raise ValueError(f"{name}: is the name of a metric of ours; choose another")
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        if sync_dist:
            device = self._trainer.strategy.root_device
            number = float(self._trainer.strategy.reduce(torch.tensor(number, device=device), reduce_op="mean"))
        if math.isfinite(number):
            self.add({name: number})
        elif name not in self._left_out:
            self._left_out.add(name)
            print(f"{name}: is {number}, which is left out of metrics.csv and dashboards", file=sys.stderr)

    def record_all(self, metrics: Mapping[str, Any], sync_dist: bool = False) -> None:
        """`record` several numbers."""
        for name, value in metrics.items():
            self.record(name, value, sync_dist)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add numbers to the next row, whatever their names."""
        for name, value in metrics.items():
            self._added[self._trainer.training].setdefault(name, []).append(value)

    def state_dict(self) -> dict[str, Any]:
        """Training seconds, those measured, and what waits for the next row, so that a resumed run continues them."""
        return {"seconds": self.stopwatch.seconds, "measured": self.speed.measured, "added": self._added[True]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the checkpoint's clock, speed and row."""
        self._added[True] = state_dict.get("added", {})
        self.speed.measured = state_dict.get("measured", (0, 0.0))
        self._resumed_seconds = state_dict["seconds"]
        self.stopwatch.start(self._resumed_seconds)
        self.stopwatch.stop()  # until training goes on, if any is left

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Describe the rows of metrics.csv so far, to which a resumed run adds its own."""
        for table in self.loggers:
            if isinstance(table, MetricsCSV):
                checkpoint["metrics"] = dict(table.rows)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, and reset the peak memory."""
        reset_peak_memory(pl_module.device)
        self._first_step = trainer.global_step
        self.stopwatch.start(self._resumed_seconds)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an optimizer step: mark the speed, log if it is time."""
        step = trainer.global_step
        if step == self._first_step + self.slow_steps:
            synchronize(pl_module.device)
            self.speed.mark(step * self.run.tokens_per_step, self.stopwatch.seconds)
            self._slow_seconds = self.stopwatch.seconds - self._resumed_seconds
        if not self.logs(step, trainer.max_steps):
            self.display.update(step, {})
            return
        found = pl_module.pop_train_metrics()  # waits for the device, so that the speed below is of finished work
        loss = found["train/loss"]
        if not math.isfinite(loss):
            raise EndedError("diverged", f"the training loss is {loss} at step {step}")
        tokens = step * self.run.tokens_per_step
        if step > self._first_step + self.slow_steps:
            self.speed.mark(tokens, self.stopwatch.seconds)
        metrics = {
            "tokens": tokens,
            "seconds": self.stopwatch.seconds,
            **found,
            "optim/lr": trainer.optimizers[0].param_groups[0]["lr"],
            "optim/grad_norm": float(pl_module.grad_norm),
            "perf/peak_memory_bytes": peak_memory_bytes(pl_module.device),
            **state_metrics(self.cost),
            **self.speed_metrics(self.speed.interval),
        }
        for name, part in pl_module.model.named_modules():
            own: dict[str, Any] = getattr(part, "metrics_to_log", dict)()
            self.record_all({f"{name}.{key}": value for key, value in own.items()})
        self._write(metrics, step)
        self.display.update(step, metrics)

    def logs(self, step: int, last: int) -> bool:
        """Whether a step, counted from 1 to `last`, is logged."""
        return step % self.run.cfg.train.log_every == 0 or step in (1, last)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.stopwatch.stop()

    @property
    def warm_up_seconds(self) -> float | None:
        """What the first steps took beyond as many later ones; None before both are known."""
        if self.speed.overall is None or not self._slow_seconds:
            return None
        return max(0.0, self._slow_seconds - self.slow_steps * self.run.tokens_per_step / self.speed.overall)

    def speed_metrics(self, tokens_per_second: float | None) -> dict[str, float]:
        """The perf/ metrics of a speed over all devices; none of them before it is known."""
        if tokens_per_second is None:
            return {}
        per_device = tokens_per_second / self.run.hardware.world_size
        metrics = {SPEED: tokens_per_second, f"{SPEED}_per_device": per_device}
        if peak := peak_flops(self.run.hardware.device_name, self.run.hardware.precision):
            metrics["perf/mfu"] = per_device * self.cost.train_flops_per_token / peak
        return metrics

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        if trainer.state.fn == TrainerFn.FITTING:
            synchronize(pl_module.device)
            self.stopwatch.stop()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Log the losses of the whole validation set, and resume the clock."""
        found = pl_module.pop_val_metrics(self.parts)
        step = trainer.global_step
        if not math.isfinite(found["val/loss"]):
            raise EndedError("diverged", f"the validation loss is {found['val/loss']} at step {step}")
        metrics = {"tokens": step * self.run.tokens_per_step, "seconds": self.stopwatch.seconds, **found}
        self._write(metrics, step)
        self.display.update(step, metrics)
        if trainer.state.fn == TrainerFn.FITTING:
            self.stopwatch.start()

    def _write(self, metrics: dict[str, float], step: int) -> None:
        """Send a row to all loggers, with what was added to it."""
        added = self._added[self._trainer.training]
        row = metrics | {name: sum(values) / len(values) for name, values in added.items()}
        added.clear()
        for logger in self.loggers:
            logger.log_metrics(row, step)


class TrainerLogger(DummyLogger):
    """The logger that Lightning knows: what its own callbacks, such as LearningRateMonitor, log is in our rows."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics to the next row."""
        self.monitor.record_all({name: value for name, value in metrics.items() if name != "epoch"})
