"""When checkpoints are written, and which are kept."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from llama_lab.config.components import build
from llama_lab.runs.checkpoint import replace_checkpoint, stable
from llama_lab.util.files import discard

from .monitor import Monitor
from .run import Run
from .schedule import steps_alike
from .stop import EndedError, Outcome, StopRequest


class Checkpointing(L.Callback):
    """Writes `last.ckpt` every `train.checkpoint_every`, at the end, and on a request to stop; always between steps.

    At a step with an evaluation, it is written after that, since a resumed run would skip it. The previous checkpoint
    is kept until the new one is complete, so that a kill leaves one of them. At `stable_step`, the last one whose rate
    a larger budget would not change, if more follow, it also writes `stable.ckpt`, for training with such a budget.
    Raises EndedError after the checkpoint of a requested stop.
    """

    def __init__(self, run: Run, stop: StopRequest) -> None:
        self.run, self.path, self.stop = run, run.folder.checkpoint, stop
        self.stable_step = steps_alike(build(run.cfg.schedule, "schedule"), run.steps)
        self._saved_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle SIGTERM again, at which Lightning would stop without a checkpoint; the first step needs none."""
        self.stop.listen()
        self._saved_step = trainer.global_step
        if trainer.is_global_zero and trainer.global_step < self.stable_step:
            discard(stable(self.path))  # of a smaller budget, or written just before a kill

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step without an evaluation: save if due, stop if requested."""
        if trainer.global_step % self.run.evaluate_every:
            self._save_or_stop(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After an evaluation during training: the same."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._save_or_stop(trainer)

    def _save_or_stop(self, trainer: L.Trainer) -> None:
        """Save if due; stop if requested, or if a callback has asked Lightning to, on all ranks at the same step."""
        step = trainer.global_step
        if step == self._saved_step:
            return
        if step == self.stable_step and step < trainer.max_steps:
            self._write(trainer, stable(self.path))
        asked = self.stop.requested or trainer.should_stop or (trainer.is_global_zero and self.stop.pruned)
        stopping = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if stopping or step % self.run.cfg.train.checkpoint_every == 0 or step == trainer.max_steps:
            self._write(trainer, self.path)
            self._saved_step = step
        if stopping and step < trainer.max_steps:
            by_search = trainer.strategy.broadcast(self.stop.pruned)
            outcome: Outcome = "pruned" if by_search else "interrupted"
            who = "the search" if by_search else "a callback" if trainer.should_stop else "the user"
            raise EndedError(outcome, f"stopped by {who} at step {step} of {trainer.max_steps}")

    def _write(self, trainer: L.Trainer, path: Path) -> None:
        """Write a checkpoint, with the training clock paused."""
        with Monitor.of(trainer).stopwatch.paused():
            fresh = path.with_suffix(".tmp")
            if trainer.is_global_zero:
                discard(fresh)  # left by a kill
            try:
                trainer.save_checkpoint(fresh)
            except OSError:
                discard(fresh)  # half a checkpoint would fill a full disk
                raise
            if trainer.is_global_zero:
                replace_checkpoint(fresh, path)
