"""From the overrides of a sweep's job to a run that can start, or the reason why it cannot."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.singleton import Singleton
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from llama_lab.config import override_key
from llama_lab.errors import ConfigError
from llama_lab.job import plan_job
from llama_lab.study.request import run_config
from llama_lab.training.hardware import choose_accelerator
from llama_lab.training.run import Run, check_folder

from .task import Function, Task


@dataclass(frozen=True)
class Job:
    """A run that can start. index: its place in the sweep. config: with Hydra's node."""

    index: int
    overrides: list[str]
    config: DictConfig
    run: Run


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives a launcher, and the device that its jobs are for.

    accelerator: gpu or cpu. gpus_per_run: processes of each job on GPUs. first_index: of the jobs, in Hydra's count.
    """

    config: DictConfig
    context: HydraContext
    function: TaskFunction
    jobs: Sequence[list[str]]
    first_index: int
    accelerator: str
    gpus_per_run: int

    def plan(self, index: int) -> Job:
        """The job of this index. Raises ConfigError, or Hydra's errors, if it cannot start; see also `check_folder`."""
        overrides = self.jobs[index]
        self.check_devices([o.partition("=")[2] for o in overrides if override_key(o) == "trainer.devices"])
        given = [f"trainer.devices={self.gpus_per_run}"] if self.accelerator == "gpu" else []
        config = self.context.config_loader.load_sweep_config(self.config, [*overrides, *given])
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = self.first_index + index
        run_cfg, choices = run_config(config.copy(), dict(config.hydra.runtime.choices))
        if choose_accelerator(run_cfg.trainer.accelerator) != self.accelerator:
            raise ConfigError(
                f"trainer.accelerator={run_cfg.trainer.accelerator}: this sweep has slots on the "
                f"{self.accelerator} alone; give each accelerator a command of its own"
            )
        run = plan_job(run_cfg, choices, list(config.hydra.overrides.task))
        check_folder(run)
        return Job(index, overrides, config, run)

    def check_devices(self, asked: Sequence[str]) -> None:
        """Raise ConfigError if a number of devices was asked for that runs do not get."""
        for devices in asked:
            if self.accelerator == "gpu" and devices not in ("-1", str(self.gpus_per_run)):
                raise ConfigError(
                    f"trainer.devices={devices}: hydra/launcher=local_gpus gives each run "
                    f"hydra.launcher.gpus_per_run={self.gpus_per_run}; set that, and leave trainer.devices out"
                )

    def save_task(self, job: Job, file: Path) -> None:
        """Write what a worker needs to run a job."""
        singletons = Singleton.get_state()["instances"]
        Task(Function.of(self.function), job.config, self.context, singletons, sys.argv[0]).save(file)
