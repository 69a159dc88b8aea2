"""The keys of the search, `hydra.sweeper.*`: defaults and checks. Quick to import, as Hydra does at every start."""

import importlib.util
from dataclasses import dataclass

from llama_lab.util.errors import ConfigError

DIRECTIONS = ("minimize", "maximize")
TRIALS = 20  # by default, unless the search is over a grid


def check_installed() -> None:
    """Raise ConfigError without Optuna."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("hydra/sweeper=optuna: needs Optuna; pip install 'llama-lab[optuna]'")


def setting_error(name: str, value: object, reason: str) -> ConfigError:
    """The error for a key of the sweeper."""
    return ConfigError(f"hydra.sweeper.{name}={'null' if value is None else value}: {reason}")


@dataclass(frozen=True)
class SearchSettings:
    """Keys of `hydra/sweeper=optuna` beside its sampler and its pruner. Raises ConfigError for an invalid one.

    n_trials: of the whole search, over all of its commands; None: all points of a grid, else 20. n_jobs: trials of a
    batch, which are started together; None: one for each slot of the launcher. metric: a column of metrics.csv, whose
    last value scores a trial. storage: an Optuna URL; None: a journal in the folder of the search.
    """

    n_trials: int | None = None
    n_jobs: int | None = None
    metric: str = "val/loss"
    direction: str = "minimize"
    seed: int = 1
    storage: str | None = None

    def __post_init__(self) -> None:
        for name in ("n_trials", "n_jobs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise setting_error(name, value, "must be a positive whole number, or null for the default")
        if type(self.seed) is not int or not 0 <= self.seed < 2**31:
            raise setting_error("seed", self.seed, "must be a whole number from 0 to 2147483647")
        if self.direction not in DIRECTIONS:
            raise setting_error("direction", self.direction, f"must be {' or '.join(DIRECTIONS)}")
        if self.storage is not None and "://" not in str(self.storage):
            raise setting_error("storage", self.storage, "must be an Optuna URL such as sqlite:///search.db, or null")
