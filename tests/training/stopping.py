"""Runs that stop or die at some moment, and go on with the same command."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest

from llama_lab.runs import checkpoint
from llama_lab.training.command import train_run
from llama_lab.training.run import Run
from tests.training.tiny import identical, planned, repeatable, trained, trained_state

# 24 steps of two micro-batches; evaluations after steps 6, 12, 18, 24; checkpoints after 4, 8 ... 24.
RUN = [
    "train.tokens=6144",
    "train.micro_batch_size=4",
    "train.log_every=3",
    "train.evaluations=4",
    "train.checkpoint_every=4",
    "model.dropout=0.1",
    "train.ema=0.9",
    "ffn=moe",
    "model.ffn.n_experts=4",
    "model.ffn.balance_bias=0.01",
]

# A layer of each recurrent mixer.
RECURRENT = [
    "model.n_layers=4",
    "position=none",
    "attention=mamba2",
    *(f"+pattern.p{i}={{at: {i}, attention: {one}}}" for i, one in enumerate(("gated_delta", "kimi_delta", "linear"))),
]

MASKED = ["family=encoder", "objective=masked", "train.sample_tokens=0"]

Moment = Callable[[Callable[[], object]], AbstractContextManager[object]]
"""`with moment(act):` has `act` happen at the moment."""


class Power(BaseException):
    """A power cut, as far as one can be had inside a process: nothing that would handle an error knows it."""


def cut() -> None:
    raise Power


def stop(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask this process to stop, as a cluster or Ctrl-C does."""
    os.kill(os.getpid(), number)


class Ending(L.Callback):
    """Ends training as a user's callback does, in a hook at a step."""

    def __init__(self, hook: str, step: int) -> None:
        def end(trainer: L.Trainer, *rest: object) -> None:
            trainer.should_stop |= trainer.global_step == step

        setattr(self, hook, end)


def ending(hook: str, step: int) -> str:
    """The override for an `Ending`."""
    return f"callbacks={{ending: {{_target_: {__name__}.Ending, hook: {hook}, step: {step}}}}}"


def at(owner: type, hook: str, step: int) -> Moment:
    """The moment after a callback's hook ran at a step."""

    def arrange(act: Callable[[], object]) -> AbstractContextManager[object]:
        ran = getattr(owner, hook)

        def run(self: Any, trainer: Any, *rest: Any) -> None:
            due = trainer.global_step == step
            ran(self, trainer, *rest)
            if due:
                act()

        return patch.object(owner, hook, run)

    return arrange


def while_writing_the_checkpoint(act: Callable[[], object]) -> AbstractContextManager[object]:
    """The moment when half of a second checkpoint is written."""
    save, saved = L.Trainer.save_checkpoint, []

    def save_checkpoint(trainer: L.Trainer, path: Path) -> None:
        saved.append(path)
        if len(saved) == 2:
            path.write_bytes(b"half")
            act()
        save(trainer, path)

    return patch.object(L.Trainer, "save_checkpoint", save_checkpoint)


def while_replacing_the_checkpoint(move: int) -> Moment:
    """The moment before a move of files: the first puts the first checkpoint in its place, two more the second."""

    def arrange(act: Callable[[], object]) -> AbstractContextManager[object]:
        replaced = []

        def replace(*paths: Any) -> None:
            replaced.append(paths)
            if len(replaced) == move:
                act()
            os.rename(*paths)

        return patch.object(checkpoint.os, "replace", replace)

    return arrange


def stopped(moment: Moment, act: Callable[[], object], *overrides: str) -> Run:
    """A run that is stopped by `act` at a moment, or dies of it if it is `cut`."""
    run = planned(*overrides)
    with moment(act):
        if act is not cut:
            assert train_run(run) == "interrupted"
            return run
        with pytest.raises(Power):
            train_run(run)
    run.folder.write_status("running")  # as a real power cut leaves it
    return run


def ends_as_the_whole_run(whole: Path, *overrides: str) -> bool:
    """Give the same command again; is everything what it would have been?"""
    folder = trained(*overrides)
    assert repeatable(folder) == repeatable(whole)
    return identical(trained_state(folder), trained_state(whole))
