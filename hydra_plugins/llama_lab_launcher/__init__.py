"""The launchers that Hydra discovers by namespace: a queue over this machine's GPUs, Slurm, or a Ray cluster."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra.utils import get_class
from omegaconf import DictConfig

from llama_lab.launching.settings import LocalSettings, RaySettings, SlurmSettings

if TYPE_CHECKING:
    from llama_lab.devices.site import Site
    from llama_lab.launching.engine import Engine
    from llama_lab.training.run import Run


class QueueLauncher(Launcher):
    """Trains every run of a sweep or study in processes of its own, through an engine."""

    SETTINGS: type
    ENGINE: str  # its class, imported as it is built: that takes seconds, and Hydra loads plugins at every start

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.options: dict[str, Any] = {}  # further arguments of the engine

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store what the runs need. They are commands themselves, not `task_function`."""
        self.context = hydra_context
        self.config = config

    @cached_property
    def engine(self) -> "Engine":
        """What starts the runs. Raises ConfigError for a bad setting, or a device or program that is missing."""
        settings, kind = self.SETTINGS(**self.settings), get_class(f"llama_lab.launching.{self.ENGINE}")
        engine: Engine = kind(settings, self.config, **self.options)
        return engine

    @property
    def site(self) -> "Site":
        """The machines on which the runs train. Raises ConfigError."""
        return self.engine.site

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Train the runs and return their results in the order of `job_overrides`. Raises ConfigError."""
        return self.launch_runs([list(overrides) for overrides in job_overrides])

    def launch_runs(self, runs: "Sequence[Run | list[str]]", before: int = 0, after: float = 0.0) -> list[JobReturn]:
        """`launch` for runs that a study has planned, which need not be composed again, or for overrides.

        before, after: see `Queue`.
        """
        from llama_lab.launching.launch import Queue

        engine = self.engine
        del self.engine  # it is closed afterwards; later runs need a new one
        return Queue(self.config, self.context, engine, runs, before, after).work()


class LocalGPUs(QueueLauncher):
    """Starts as many runs at a time as this machine has slots."""

    SETTINGS, ENGINE = LocalSettings, "local_engine.LocalEngine"

    def share_cores(self, threads: int) -> None:
        """Give each run so many threads of a CPU from now on, unless the user has set the number of slots."""
        self.options = {"threads": threads}
        del self.engine  # a study has asked it for its site; the next one has other slots


class Slurm(QueueLauncher):
    """Submits every run as a job of a Slurm cluster."""

    SETTINGS, ENGINE = SlurmSettings, "slurm_engine.SlurmEngine"

    def print_scripts(self, runs: "Sequence[Run]") -> None:
        """Print the batch scripts that would train the runs, for `study.dry_run`."""
        from llama_lab.launching.launch import queued_run
        from llama_lab.launching.slurm_engine import print_scripts

        queued = [queued_run(number, run, self.config) for number, run in enumerate(runs)]
        print_scripts(queued, SlurmSettings(**self.settings))


class Ray(QueueLauncher):
    """Starts as many runs at a time as Ray has room for, on this machine or on a cluster."""

    SETTINGS, ENGINE = RaySettings, "ray_engine.RayEngine"


for name, launcher in (("local_gpus", LocalGPUs), ("slurm", Slurm), ("ray", Ray)):
    node = {"_target_": f"{__name__}.{launcher.__name__}", **vars(launcher.SETTINGS())}
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="llama_lab")
