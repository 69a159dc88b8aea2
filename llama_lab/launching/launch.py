"""The entry point of all launchers: from overrides, or the plan of a study, to command lines, and through a queue."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig
from rich.console import Console

from llama_lab.config.arguments import typed_flags
from llama_lab.config.components import override_key
from llama_lab.runs.folder import belongs
from llama_lab.study.design.command import run_config
from llama_lab.study.design.plan import PlannedRun
from llama_lab.training.prepare import requested_run
from llama_lab.training.run import Run, check_folder
from llama_lab.training.stop import StopRequest

from .engine import Engine
from .process import program
from .queue import Queue, Request
from .queue_display import QueueDisplay

# Settings of the launching command that a run of its own does not have, and those that its hardware settles.
LAUNCHING = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep", "hydra.mode")
PLACED = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes")


@dataclass(frozen=True)
class Launch:
    """A command that launches runs. config, context: what Hydra passes to a launcher. engine: runs them."""

    config: DictConfig
    context: HydraContext
    engine: Engine

    def sweep(self, jobs: Sequence[list[str]]) -> list[JobReturn]:
        """Launch a run for the overrides of each job; see `Queue.work`."""
        return self._work([Request(overrides, partial(self._composed, overrides)) for overrides in jobs])

    def study(self, runs: Sequence[PlannedRun]) -> list[JobReturn]:
        """Launch planned runs; see `Queue.work`."""
        return self._work([Request(run.run.overrides, partial(self._planned, run)) for run in runs])

    def _work(self, requests: Sequence[Request]) -> list[JobReturn]:
        stop = StopRequest()
        with QueueDisplay(Console()) as display, stop.listening():
            display.print_line(f"{len(requests)} runs on {self.engine.description}; each writes its output.log")
            return Queue(requests, self.engine, display, stop).work()

    def _composed(self, overrides: list[str]) -> tuple[Run, list[str]]:
        cfg = self.context.config_loader.load_sweep_config(self.config, overrides)
        typed = list(cfg.hydra.overrides.task)
        run_cfg, choices = run_config(cfg, dict(cfg.hydra.runtime.choices))
        run = requested_run(run_cfg, choices, typed, self.engine.site)
        check_folder(run)
        return run, self._command(run, overrides)

    def _planned(self, planned: PlannedRun) -> tuple[Run, list[str]]:
        check_folder(planned.run)
        return planned.run, self._command(planned.run, planned.run.overrides)

    def _command(self, run: Run, overrides: Sequence[str]) -> list[str]:
        """The command line that trains `run` alone."""
        typed = list(self.config.hydra.overrides.hydra)
        kept = [o for o in (*typed, *overrides) if not belongs(override_key(o), (*LAUNCHING, *PLACED))]
        if "hydra/launcher" not in map(override_key, typed):  # an experiment chose it
            kept.append("hydra/launcher=basic")
        values = (run.hardware.accelerator, run.hardware.devices, run.hardware.num_nodes)
        kept.append("hydra.mode=RUN")  # an experiment may choose a study itself
        placed = [f"{key}={value}" for key, value in zip(PLACED, values, strict=True)]
        return [*program(), *typed_flags(), *kept, *placed]
