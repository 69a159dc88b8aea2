"""What the launchers do: a queue of the jobs over an engine."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich.console import Console

from llama_lab.training.stop import StopRequest

from .board import Board
from .engine import Engine
from .jobs import Sweep
from .queue import Queue


def launch(
    config: DictConfig,
    context: HydraContext,
    function: TaskFunction,
    jobs: Sequence[list[str]],
    first_index: int,
    engine: Engine,
) -> list[JobReturn]:
    """Run `function` for the overrides of every job; their results in the same order, those that failed too.

    config: the command's own. Raises ConfigError for what the engine cannot do, and KeyboardInterrupt when asked to
    stop.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    sweep = Sweep(config, context, function, jobs, first_index)
    stop = StopRequest()
    with Board(Console()) as board, stop.listening():
        board.tell(f"{len(jobs)} runs on {engine.places}; each writes its output.log")
        return Queue(sweep, engine, board, stop).work()
