"""From the overrides of a sweep's job to a run that can start, or the reason why it cannot."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from llama_lab.devices.hardware import Hardware
from llama_lab.study.design.command import run_config
from llama_lab.training.prepare import requested_run
from llama_lab.training.run import Run, check_folder

from .task import Function, Task


@dataclass(frozen=True)
class Job:
    """A run that can start. index: its position in the sweep. task: the run for another process to start."""

    index: int
    overrides: list[str]
    run: Run
    task: Task

    @property
    def config(self) -> DictConfig:
        """The composed config, with Hydra's node."""
        return self.task.config


@dataclass(frozen=True)
class Sweep:
    """What Hydra passes to a launcher. config: that of the command. first_index: Hydra's number of the first job."""

    config: DictConfig
    context: HydraContext
    function: TaskFunction
    jobs: Sequence[list[str]]
    first_index: int

    def prepare(
        self, index: int, complete: Callable[[list[str]], list[str]], hardware: Callable[[DictConfig], Hardware]
    ) -> Job:
        """Compose and check the job of this index.

        complete, hardware: `complete_overrides` and `hardware` of the engine. Raises ConfigError, or an error of
        Hydra's, if the job cannot start; see also `check_folder`.
        """
        overrides = self.jobs[index]
        config = self.context.config_loader.load_sweep_config(self.config, complete(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = self.first_index + index
        run_cfg, choices = run_config(config.copy(), dict(config.hydra.runtime.choices))
        run = requested_run(run_cfg, choices, list(config.hydra.overrides.task), hardware)
        check_folder(run)
        singletons = Singleton.get_state()["instances"]
        task = Task(Function.of(self.function), config, self.context, singletons, sys.argv[0])
        return Job(index, overrides, run, task)
