"""The launcher that Hydra finds by its namespace: `hydra/launcher=local_gpus`, a queue over this machine's GPUs."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalGPUs(Launcher):
    """Runs every job of a sweep or study in a process of its own, as many at a time as the machine has slots."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what the jobs need."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; their results in the order of `job_overrides`. Raises ConfigError for a bad setting."""
        # Here, since it takes seconds to import, and Hydra loads plugins at every start.
        from llama_lab.launching.launch import launch
        from llama_lab.launching.slots import Settings

        jobs = [list(overrides) for overrides in job_overrides]
        settings = Settings(**self.settings)
        return launch(self.config, self.hydra_context, self.task_function, jobs, initial_job_idx, settings)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="local_gpus",
    node={"_target_": f"{__name__}.LocalGPUs", "slots_per_gpu": 1, "gpus_per_run": 1, "cpu_slots": None},
    provider="llama_lab",
)
