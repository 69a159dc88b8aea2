"""The sweeper that Hydra discovers by namespace: `study=...` selects it, and it runs the study."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from llama_lab.analysis.result import Result
    from llama_lab.config.trust import Trust


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
        from llama_lab.study.execute import execute  # takes seconds to import, and Hydra loads plugins at every start
        from llama_lab.study.task import study_task

        execute(self.config, self.hydra_context, list(arguments), study_task, report)


def report(folder: Path, trust: "Trust", logger: DictConfig | None) -> "Result":
    """Write a study's report, and log it where `logger` says."""
    from llama_lab.report.write import log_report, write_report  # after the runs: SciPy takes a second

    result = write_report(folder, trust)
    if logger and logger.wandb:
        log_report(result, folder, logger)
    return result


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="study",
    node={"_target_": f"{__name__}.StudySweeper"},
    provider="llama_lab",
)
