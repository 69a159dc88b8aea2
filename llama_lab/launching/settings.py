"""The keys of the launchers, `hydra.launcher.*`: defaults and checks. Quick to import, as Hydra does at every start."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from llama_lab.util.errors import ConfigError, require_positive

# Options of sbatch that are set elsewhere, and where.
PLACES = {
    **dict.fromkeys(("array", "chdir", "error", "open_mode", "output", "requeue", "no_requeue"), "that is ours"),
    **dict.fromkeys(("ntasks", "ntasks_per_node", "gpus", "gpus_per_task"), "that is trainer.devices of the run"),
    "nodes": "that is trainer.num_nodes of the run",
    "partition": "that is hydra.launcher.partition",
    "time": "that is hydra.launcher.time",
    "cpus_per_task": "that is hydra.launcher.cpus_per_task",
    "mem": "that is hydra.launcher.memory",
    "signal": "that is hydra.launcher.signal_seconds",
}


def setting_error(name: str, value: object, reason: str) -> ConfigError:
    """The error for a key of the launcher."""
    return ConfigError(f"hydra.launcher.{name}={'null' if value is None else value}: {reason}")


def check_counts(settings: Any, *names: str) -> None:
    """Raise ConfigError unless each setting is a positive whole number, or None where that is the default."""
    for name in names:
        or_null = getattr(type(settings), name) is None
        require_positive(f"hydra.launcher.{name}", getattr(settings, name), or_null)


@dataclass(frozen=True)
class LocalSettings:
    """Keys of `hydra/launcher=local_gpus`. Raises ConfigError unless they are positive whole numbers.

    slots_per_gpu: runs that share a GPU. gpus_per_run: GPUs of one run, data parallel. cpu_slots: runs at a time on the
    CPU; None: one per two cores.
    """

    slots_per_gpu: int = 1
    gpus_per_run: int = 1
    cpu_slots: int | None = None

    def __post_init__(self) -> None:
        check_counts(self, "slots_per_gpu", "gpus_per_run", "cpu_slots")
        if self.slots_per_gpu > 1 and self.gpus_per_run > 1:
            reason = "a GPU is shared or one of several; leave gpus_per_run at 1"
            raise setting_error("slots_per_gpu", self.slots_per_gpu, reason)


@dataclass(frozen=True)
class SlurmSettings:
    """Keys of `hydra/launcher=slurm`; None: Slurm's default. Raises ConfigError for an invalid one.

    partition: one, or several separated by commas. time: limit of a job, in minutes or in Slurm's notation
    (`1-12:00:00`). cpus_per_task: of each process. memory: of each node, in Slurm's notation (`64G`). at_a_time:
    running jobs of one array. signal_seconds: before the time limit, when runs save and are requeued. setup: shell
    commands at the start of every job. sbatch: other options, such as {account: lab, qos: high, constraint: a100}.
    """

    partition: str | None = None
    time: int | str | None = None
    cpus_per_task: int | None = None
    memory: str | int | None = None
    at_a_time: int | None = None
    signal_seconds: int = 120
    setup: Sequence[str] = ()
    sbatch: Mapping[str, Any] = field(default_factory=lambda: DictConfig({}, flags={"struct": False}))  # for any key

    def __post_init__(self) -> None:
        check_counts(self, "cpus_per_task", "at_a_time", "signal_seconds")
        least = self.signal_seconds
        if self.time is not None and seconds_of(self.time) <= least:
            reason = f"must be longer than hydra.launcher.signal_seconds={least}, the time to save; raise it"
            raise setting_error("time", self.time, reason)
        for option, value in self.sbatch.items():
            if place := PLACES.get(option.replace("-", "_")):
                raise setting_error(f"sbatch.{option}", value, f"{place}; leave it out")


def seconds_of(time_limit: int | str) -> int:
    """Seconds of a time limit in sbatch's notation: minutes, minutes:seconds, h:m:s, days-h, days-h:m, days-h:m:s."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time_limit))
    if found is None:
        raise setting_error("time", time_limit, "must be minutes, or as Slurm writes it, such as 90, 4:00:00, 1-12")
    days, *parts = (int(part or 0) for part in found.groups())
    hours, minutes, seconds = parts if found[1] or found[4] else (0, *parts[:2])
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


@dataclass(frozen=True)
class RaySettings:
    """Keys of `hydra/launcher=ray`. Raises ConfigError for an invalid one.

    address: of a cluster; `auto`: the one that this machine belongs to; None: one that is started here and stopped at
    the end. gpus_per_run: below 1 for a share of a GPU. max_retries: how often a run is resumed after its Ray worker or
    node died.
    """

    address: str | None = None
    gpus_per_run: float = 1
    cpus_per_run: float = 1
    max_retries: int = 3

    def __post_init__(self) -> None:
        address, gpus, cpus, retries = self.address, self.gpus_per_run, self.cpus_per_run, self.max_retries
        if not (address is None or address == "auto" or is_host_and_port(address)):
            raise setting_error("address", address, "must be auto, or host:port of a cluster that this machine is in")
        if not is_positive(gpus) or (gpus > 1 and gpus != int(gpus)):
            raise setting_error("gpus_per_run", gpus, "must be a whole number, or a fraction to share a GPU")
        if not is_positive(cpus):
            raise setting_error("cpus_per_run", cpus, "must be a positive number")
        if type(retries) is not int or retries < 0:
            raise setting_error("max_retries", retries, "must be a whole number, 0 for none")


def is_positive(value: float) -> bool:
    """Whether `value` is a positive int or float, but no bool."""
    return type(value) in (int, float) and value > 0


def is_host_and_port(address: object) -> bool:
    """Whether an address is `host:port`."""
    host, _, port = str(address).rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal()
