"""The launchers that Hydra discovers by namespace: a queue over this machine's GPUs, Slurm, or a Ray cluster."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from llama_lab.devices.site import Site
    from llama_lab.launching.engine import Engine
    from llama_lab.launching.launch import Launch
    from llama_lab.study.design.plan import PlannedRun

# Engines are imported where they are built: it takes seconds, and Hydra loads plugins at every start.


class QueueLauncher(Launcher):
    """Runs every job of a sweep or study in processes of its own, through an engine."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what the jobs need. They run the command itself, not `task_function`."""
        self.context = hydra_context
        self.config = config

    @cached_property
    @abstractmethod
    def engine(self) -> "Engine":
        """What runs the jobs. Raises ConfigError for a bad setting, or a device or program that is missing."""

    @property
    def site(self) -> "Site":
        """The machines on which the jobs run. Raises ConfigError."""
        return self.engine.site

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs and return their results in the order of `job_overrides`. Raises ConfigError."""
        return self._launch(lambda launch: launch.sweep([list(overrides) for overrides in job_overrides]))

    def launch_planned(self, runs: "Sequence[PlannedRun]") -> list[JobReturn]:
        """Run what a study has planned, and return the results in order. Raises ConfigError."""
        return self._launch(lambda launch: launch.study(runs))

    def _launch(self, work: "Callable[[Launch], list[JobReturn]]") -> list[JobReturn]:
        from llama_lab.launching.launch import Launch

        launch = Launch(self.config, self.context, self.engine)
        try:
            return work(launch)
        finally:
            del self.engine  # it is closed; later jobs need a new one


class LocalGPUs(QueueLauncher):
    """Starts as many runs at a time as this machine has slots."""

    @cached_property
    def engine(self) -> "Engine":
        """Slots of this machine."""
        from llama_lab.launching.local_engine import LocalEngine
        from llama_lab.launching.slots import LocalSettings

        return LocalEngine(LocalSettings(**self.settings), self.config.trainer.accelerator)


class Slurm(QueueLauncher):
    """Submits every run as a job of a Slurm cluster."""

    @cached_property
    def engine(self) -> "Engine":
        """The Slurm cluster."""
        from llama_lab.launching.slurm_cluster import SlurmSettings
        from llama_lab.launching.slurm_engine import SlurmEngine

        return SlurmEngine(SlurmSettings(**self.settings))


class Ray(QueueLauncher):
    """Starts as many runs at a time as Ray has room for, on this machine or on a cluster."""

    @cached_property
    def engine(self) -> "Engine":
        """The Ray cluster."""
        from llama_lab.launching.ray_cluster import RaySettings
        from llama_lab.launching.ray_engine import RayEngine

        return RayEngine(RaySettings(**self.settings), self.config.trainer.accelerator)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="local_gpus",
    node={"_target_": f"{__name__}.LocalGPUs", "slots_per_gpu": 1, "gpus_per_run": 1, "cpu_slots": None},
    provider="llama_lab",
)

ConfigStore.instance().store(
    group="hydra/launcher",
    name="slurm",
    node={
        "_target_": f"{__name__}.Slurm",
        "partition": None,
        "time": None,
        "cpus_per_task": None,
        "memory": None,
        "at_a_time": None,
        "signal_seconds": 120,
        "setup": [],
        "sbatch": DictConfig({}, flags={"struct": False}),
    },
    provider="llama_lab",
)

ConfigStore.instance().store(
    group="hydra/launcher",
    name="ray",
    node={
        "_target_": f"{__name__}.Ray",
        "address": None,
        "gpus_per_run": 1,
        "cpus_per_run": 1,
        "max_retries": 3,
    },
    provider="llama_lab",
)
