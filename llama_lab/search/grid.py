"""The sampler that takes every point of a space once."""

from collections.abc import Sequence

from optuna.samplers import GridSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from llama_lab.util.errors import ConfigError

from .space import Parameter


class Grid(GridSampler):
    """Optuna's GridSampler over a space of choices and ranges. Raises ConfigError for an interval.

    The order of the points is shuffled by the seed.
    """

    def __init__(self, space: Sequence[Parameter], seed: int) -> None:
        if endless := next((one for one in space if not one.values), None):
            raise ConfigError(
                f"{endless.argument}: an interval has no grid; give a choice or a range, or another "
                f"hydra/sweeper/sampler"
            )
        super().__init__({one.key: one.values for one in space}, seed)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Nothing: Optuna's own would stop `Study.optimize` after the last point, and fails outside of it."""
