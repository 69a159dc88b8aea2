"""The sweeper that Hydra discovers by namespace: `hydra/sweeper=optuna` searches with Optuna."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from llama_lab.search.settings import SearchSettings, check_installed


class OptunaSweeper(Sweeper):
    """Lets Optuna choose the overrides of runs instead of taking their product."""

    def __init__(self, **settings: Any) -> None:
        pass  # read from the config, in which they can refer to other keys

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what a search needs."""
        self.hydra_context = hydra_context
        self.task_function = task_function
        self.config = config

    def sweep(self, arguments: Sequence[str]) -> Any:
        """Search the space on the command line."""
        assert self.config is not None
        assert self.hydra_context is not None
        check_installed()
        from llama_lab.search.search import search  # takes seconds to import, and Hydra loads plugins at every start

        search(self.config, self.hydra_context, self.task_function, list(arguments))


SAMPLERS = {
    "tpe": {"_target_": "optuna.samplers.TPESampler", "n_startup_trials": 10},
    "random": {"_target_": "optuna.samplers.RandomSampler"},
    "qmc": {"_target_": "optuna.samplers.QMCSampler", "qmc_type": "sobol"},
    # It shuffles all points, the same for all trials.
    "grid": {"_target_": "llama_lab.search.space.Grid", "_partial_": True, "seed": "${hydra.sweeper.seed}"},
}
# Their steps are evaluations.
PRUNERS = {
    "median": {"_target_": "optuna.pruners.MedianPruner", "n_startup_trials": 5, "n_warmup_steps": 0},
    "halving": {"_target_": "optuna.pruners.SuccessiveHalvingPruner", "min_resource": 1, "reduction_factor": 4},
    "hyperband": {
        "_target_": "optuna.pruners.HyperbandPruner",
        "min_resource": 1,
        "max_resource": "${train.evaluations}",
        "reduction_factor": 3,
    },
    "none": {"_target_": "optuna.pruners.NopPruner"},
}
SWEEPER = {
    "defaults": [{"sampler": "tpe"}, {"pruner": "median"}],
    "_target_": f"{__name__}.OptunaSweeper",
    "_recursive_": False,  # the sampler and the pruner are built where Optuna is imported
    **vars(SearchSettings()),
}

store = ConfigStore.instance().store
store(group="hydra/sweeper", name="optuna", node=SWEEPER, provider="llama_lab")
for part, options in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
    for name, node in options.items():
        store(group=f"hydra/sweeper/{part}", name=name, node=node, provider="llama_lab")
