"""From the overrides of a sweep's job to a run that can start, or the reason why it cannot."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from llama_lab.devices.hardware import Hardware
from llama_lab.study.design.parsing import run_config
from llama_lab.training.prepare import requested_run
from llama_lab.training.run import Run, check_folder

from .task import Function, Task


@dataclass(frozen=True)
class Job:
    """A run that can start. index: its place in the sweep. config: with Hydra's node. task: for another process."""

    index: int
    overrides: list[str]
    config: DictConfig
    run: Run
    task: Task

    def save_task(self, file: Path) -> None:
        """Write what a worker needs to run it."""
        self.task.save(file)


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives a launcher. first_index: of the jobs, in Hydra's count."""

    config: DictConfig
    context: HydraContext
    function: TaskFunction
    jobs: Sequence[list[str]]
    first_index: int

    def plan(
        self, index: int, settle: Callable[[list[str]], list[str]], hardware: Callable[[DictConfig], Hardware]
    ) -> Job:
        """The job of this index. Raises ConfigError, or Hydra's errors, if it cannot start; see also `check_folder`.

        settle, hardware: those of the engine that is to run it.
        """
        overrides = self.jobs[index]
        config = self.context.config_loader.load_sweep_config(self.config, settle(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = self.first_index + index
        run_cfg, choices = run_config(config.copy(), dict(config.hydra.runtime.choices))
        run = requested_run(run_cfg, choices, list(config.hydra.overrides.task), hardware)
        check_folder(run)
        singletons = Singleton.get_state()["instances"]
        task = Task(Function.of(self.function), config, self.context, singletons, sys.argv[0])
        return Job(index, overrides, config, run, task)
