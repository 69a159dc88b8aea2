"""Choose accelerator, number of devices, strategy and precision of a run."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch.distributed import is_torchelastic_launched

from llama_lab.util.errors import ConfigError

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
NATIVE_BF16 = ("amx_bf16", "avx512_bf16")  # of processors, where it was measured
LEAST_WIDTH = 64  # of a model that a CPU trains faster in bf16 (docs/devices.md)
STRATEGIES = ("auto", "ddp", "fsdp")


@dataclass(frozen=True)
class Hardware:
    """Settings of a Lightning Trainer, none of them `auto`, except the precision of a machine that is `elsewhere`.

    devices: of each node. spare: GPUs of this machine that `auto` leaves alone, since more would not share the batch.
    why: what to tell of the precision; empty: nothing.
    """

    accelerator: str
    devices: int
    num_nodes: int
    precision: str
    device_name: str
    sharded: bool = False
    spare: int = 0
    elsewhere: bool = False
    why: str = field(default="", compare=False)

    @property
    def torch_device(self) -> torch.device:
        """The first device, for PyTorch."""
        return torch.device({"gpu": "cuda"}.get(self.accelerator, self.accelerator))

    def autocast(self) -> torch.autocast:
        """The context in which this precision computes outside of Lightning."""
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=self.precision == "bf16-mixed")

    def as_trained(self, device: str, precision: str) -> "Hardware":
        """In the precision of a run on a device of this name; unchanged for one on another, or that records none."""
        return replace(self, precision=precision) if precision and device == self.device_name else self

    @property
    def world_size(self) -> int:
        """Devices over all nodes."""
        return self.devices * self.num_nodes


class Started(NamedTuple):
    """The processes that a launcher has started, one per device. devices: on each node."""

    launcher: str
    devices: int
    num_nodes: int


def started() -> Started | None:
    """The processes of torchrun or srun, from their environment variables; None where Lightning starts them.

    Raises ConfigError for tasks that srun has not spread evenly over its nodes, or that would not find each other.
    """
    if is_torchelastic_launched():
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return Started("torchrun", per_node, int(os.environ["WORLD_SIZE"]) // per_node)
    if below_srun():
        tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", 1))
        per_node = int(os.environ.get("SLURM_NTASKS_PER_NODE", 1))
        if tasks != nodes * per_node:
            fix = "start one per device with srun --nodes and --ntasks-per-node, without --ntasks"
            raise ConfigError(f"SLURM_NTASKS={tasks}: is not the same number on each of {nodes} nodes; {fix}")
        return Started("srun", per_node, nodes)
    if "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        reason = "is taken for an interactive shell, and each task would train alone; give the job another name"
        raise ConfigError(f"SLURM_JOB_NAME={os.environ.get('SLURM_JOB_NAME')}: {reason}, srun --job-name=train")
    return None


def below_srun() -> bool:
    """Whether srun has started this process, without torchrun in between; false in an interactive shell of Slurm."""
    if "SLURM_NTASKS" not in os.environ or is_torchelastic_launched():
        return False
    # Here and below, where it is needed: Lightning takes three seconds to import.
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is an srun on this machine, which an interactive shell did not use
        return SLURMEnvironment.detect()


def check_started(hardware: Hardware) -> None:
    """Raise ConfigError if a launcher has started other processes than the run has devices."""
    found = started()
    if found is None:
        return
    for key in ("devices", "num_nodes"):
        if getattr(hardware, key) != getattr(found, key):
            begun = f"{found.launcher} has started {found.devices} processes on each of {found.num_nodes} nodes"
            fix = f"start one per device, or set trainer.{key}=auto"
            raise ConfigError(f"trainer.{key}={getattr(hardware, key)}: {begun}; {fix}")


def choose_hardware(trainer: DictConfig, width: int, micro_batches: int = 1) -> Hardware:
    """Resolve every `auto` of the group `trainer`. Raises ConfigError for devices that do not exist.

    width: of the model, on which the precision depends. micro_batches: of an optimizer step, which the devices share;
    `auto` takes as many GPUs as can.
    """
    check_strategy(trainer.strategy)
    accelerator = choose_accelerator(trainer.accelerator)
    available = {"gpu": torch.cuda.device_count(), "mps": 1}.get(accelerator)
    found = started() if "auto" in (trainer.devices, trainer.num_nodes) else None
    devices, nodes = trainer.devices, trainer.num_nodes
    if nodes == "auto":
        nodes = found.num_nodes if found else 1
    if nodes < 1:
        raise ConfigError(f"trainer.num_nodes={nodes}: must be a positive whole number, or auto")
    if nodes > 1 and not {"RANK", "SLURM_PROCID"} & os.environ.keys():
        raise ConfigError(f"trainer.num_nodes={nodes}: start it with torchrun or srun, or set it to 1")
    shares = devices == "auto" and found is None
    if devices == -1:
        devices = available or 1
    elif devices == "auto":
        sharing = (n for n in range(available or 1, 1, -1) if micro_batches % (n * nodes) == 0)  # equally
        devices = found.devices if found else next(sharing, 1)
    if devices < 1 or (available is not None and devices > available):
        here = f"{available or 'a'} {accelerator}"
        raise ConfigError(f"trainer.devices={devices}: this machine has {here}; choose 1 or more, -1 or auto")
    if accelerator == "cpu" and devices > usable_cores() and started() is None:
        few = f"{usable_cores()} are usable; choose at most that, or start more with torchrun"
        raise ConfigError(f"trainer.devices={devices}: on CPUs each is a process that needs a core of its own, {few}")
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if accelerator == "gpu" else has_native_bf16()
    name = torch.cuda.get_device_name() if accelerator == "gpu" else accelerator
    precision, why = choose_precision(trainer.precision, accelerator, has_bf16, width)
    spare = (available or 1) - devices if shares else 0
    return Hardware(accelerator, devices, nodes, precision, name, trainer.strategy == "fsdp", spare, why=why)


def has_native_bf16() -> bool:
    """Whether this machine's processor multiplies bf16 faster than float32."""
    capabilities: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)  # not in PyTorch 2.11
    return any(capabilities().get(name, False) for name in NATIVE_BF16)


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def asked_counts(trainer: DictConfig, what: str) -> tuple[int, int]:
    """The devices per node, and the nodes, on a machine that is not known; 1 for `auto`.

    Raises ConfigError, which says `what` needs them, for numbers below 1.
    """
    asked = {key: 1 if trainer[key] == "auto" else int(trainer[key]) for key in ("devices", "num_nodes")}
    for key, number in asked.items():
        if number < 1:
            raise ConfigError(f"trainer.{key}={number}: {what} needs a number, such as trainer.{key}=8")
    return asked["devices"], asked["num_nodes"]


def check_strategy(wanted: str) -> None:
    """Raise ConfigError for an unknown strategy."""
    if wanted not in STRATEGIES:
        raise ConfigError(f"trainer.strategy={wanted}: unknown; choose {', '.join(STRATEGIES)}")


def choose_accelerator(wanted: str, setting: str = "trainer.accelerator") -> str:
    """`gpu`, `mps` or `cpu`. Raises ConfigError, beginning with the `setting`, for one that is missing."""
    found = {"gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, there in found.items() if there)
    if not found.get(wanted, False):
        there = ", ".join(name for name in found if found[name])
        raise ConfigError(f"{setting}={wanted}: not on this machine; choose auto or {there}")
    return wanted


def choose_precision(wanted: str | int, accelerator: str, has_bf16: bool, width: int) -> tuple[str, str]:
    """The precision of training a model of this width, and what to tell of it.

    The default is bf16-mixed where the device has it and the model gains from it, float32 elsewhere. Raises ConfigError
    for what the device lacks. 16-mixed is not offered: its loss scaling would make arms differ in how many steps they
    skip.
    """
    is_cpu = accelerator == "cpu"
    if wanted == "auto" and not is_cpu:
        return "bf16-mixed" if accelerator == "gpu" and has_bf16 else "32-true", ""
    if wanted == "auto":
        if width < LEAST_WIDTH:
            return "32-true", f"trainer.precision=auto: 32-true, since bf16 gains little below model.dim={LEAST_WIDTH}"
        if not has_bf16:
            return "32-true", "trainer.precision=auto: 32-true, since this processor has no native bf16"
        return "bf16-mixed", "trainer.precision=auto: bf16-mixed, since this processor has native bf16"
    possible = PRECISIONS if has_bf16 or accelerator != "gpu" else PRECISIONS[:1]
    if wanted not in possible:
        meant = [precision for precision in possible if str(wanted) in precision][:1]
        near = f" (did you mean {meant[0]}?)" if meant else ""
        others = f"choose auto or {', '.join(possible)}"
        raise ConfigError(f"trainer.precision={wanted}: this {accelerator} cannot train in it{near}; {others}")
    is_slow = is_cpu and not has_bf16 and wanted != "32-true"
    slow = f"trainer.precision={wanted}: is slow, since this processor has no native bf16; 32-true is faster"
    return str(wanted), slow if is_slow else ""


def current_rank() -> int:
    """This process's rank among those of the run, from its environment variables; 0 when alone."""
    from lightning.pytorch.utilities import rank_zero_only

    return int(rank_zero_only.rank)  # type: ignore[attr-defined]
