"""The entry point of all launchers: puts a sweep's jobs through a queue."""

from pathlib import Path

from hydra.core.utils import JobReturn, configure_log, setup_globals
from rich.console import Console

from llama_lab.training.stop import StopRequest

from .engine import Engine
from .queue import Queue
from .queue_display import QueueDisplay
from .sweep import Sweep


def launch(sweep: Sweep, engine: Engine) -> list[JobReturn]:
    """Run all jobs of a sweep; the results are in the same order, failures included.

    Raises ConfigError for what the engine cannot do, and KeyboardInterrupt when the user stops the command.
    """
    setup_globals()
    hydra = sweep.config.hydra
    configure_log(hydra.hydra_logging, hydra.verbose)
    Path(str(hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    stop = StopRequest()
    with QueueDisplay(Console()) as display, stop.listening():
        display.print_line(f"{len(sweep.jobs)} runs on {engine.description}; each writes its output.log")
        return Queue(sweep, engine, display, stop).work()
