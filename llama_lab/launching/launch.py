"""The entry point of all launchers: puts a sweep's jobs through a queue."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console

from llama_lab.training.callbacks import StopRequest

from .engine import Engine
from .queue import Queue
from .queue_display import QueueDisplay
from .sweep import Sweep


def launch(
    config: DictConfig,
    context: HydraContext,
    function: TaskFunction,
    jobs: Sequence[list[str]],
    first_index: int,
    engine: Engine,
) -> list[JobReturn]:
    """Run `function` for the overrides of every job; the results are in the same order, failures included.

    config: that of the command. Raises ConfigError for what the engine cannot do, and KeyboardInterrupt when the user
    stops the command.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    sweep = Sweep(config, context, function, jobs, first_index)
    stop = StopRequest()
    with QueueDisplay(Console()) as display, stop.listening():
        display.print_line(f"{len(jobs)} runs on {engine.description}; each writes its output.log")
        return Queue(sweep, engine, display, stop).work()
