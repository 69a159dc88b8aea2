"""What the launcher does: slots for this machine, and a queue of the jobs over them."""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console

from llama_lab.errors import ConfigError
from llama_lab.training.callbacks import StopRequest
from llama_lab.training.hardware import choose_accelerator

from .board import Board
from .jobs import Sweep
from .queue import Queue
from .slots import Settings, Slot, make_slots, usable_cores, visible_gpus


def launch(
    config: DictConfig,
    context: HydraContext,
    function: TaskFunction,
    jobs: Sequence[list[str]],
    first_index: int,
    settings: Settings,
) -> list[JobReturn]:
    """Run `function` for the overrides of every job; their results in the same order, those that failed too.

    config: the command's own. Raises ConfigError for what this machine cannot do, and KeyboardInterrupt when asked to
    stop, after the runs have saved.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("hydra/launcher=local_gpus: starts all processes itself; start the command without torchrun")
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    accelerator = choose_accelerator(config.trainer.accelerator)
    gpus = visible_gpus(os.environ, torch.cuda.device_count())
    slots = make_slots(settings, accelerator, gpus, usable_cores())
    sweep = Sweep(config, context, function, jobs, first_index, accelerator, settings.gpus_per_run)
    stop = StopRequest()
    with TemporaryDirectory(prefix="llama-lab-") as folder, Board(Console()) as board, stop.listening():
        board.tell(describe(len(jobs), slots))
        return Queue(sweep, slots, Path(folder), board, stop).work()


def describe(count: int, slots: Sequence[Slot]) -> str:
    """What is about to happen, in one line."""
    return f"{count} runs on {len(slots)} slots: {', '.join(slot.name for slot in slots)}; each writes its output.log"
