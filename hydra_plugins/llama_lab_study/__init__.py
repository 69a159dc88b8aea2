"""The sweeper that Hydra discovers by namespace: `study=...` selects it, and it runs the study."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class StudySweeper(Sweeper):
    """Runs the arms of a design instead of a product of overrides."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what a sweep needs; the runs of a study have a task function of their own."""
        self.hydra_context = hydra_context
        self.config = config

    def sweep(self, arguments: Sequence[str]) -> Any:
        """Run the study on the command line."""
        assert self.config is not None
        assert self.hydra_context is not None
        from llama_lab.study.conduct import conduct  # takes seconds to import, and Hydra loads plugins at every start

        conduct(self.config, self.hydra_context, list(arguments))


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="study",
    node={"_target_": f"{__name__}.StudySweeper"},
    provider="llama_lab",
)
