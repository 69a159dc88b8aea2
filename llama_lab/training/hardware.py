"""Which device a run uses, how many of it, and in what precision."""

import os
from dataclasses import dataclass

import torch
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from llama_lab.errors import ConfigError

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
STRATEGIES = ("auto", "ddp")


@dataclass(frozen=True)
class Hardware:
    """Settings of a Lightning Trainer, none of them `auto`, except the precision of a machine that is `elsewhere`."""

    accelerator: str
    devices: int
    num_nodes: int
    precision: str
    device_name: str
    elsewhere: bool = False

    @property
    def torch_device(self) -> torch.device:
        """The first device, for PyTorch."""
        return torch.device({"gpu": "cuda"}.get(self.accelerator, self.accelerator))

    def autocast(self) -> torch.autocast:
        """The context in which this precision computes outside of Lightning."""
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=self.precision == "bf16-mixed")

    @property
    def world_size(self) -> int:
        """Devices over all nodes."""
        return self.devices * self.num_nodes


def choose_hardware(trainer: DictConfig) -> Hardware:
    """Resolve `accelerator`, `devices` and `precision`. Raises ConfigError for what there is not."""
    if trainer.strategy not in STRATEGIES:
        raise ConfigError(f"trainer.strategy={trainer.strategy}: unknown; choose {' or '.join(STRATEGIES)}")
    if trainer.num_nodes < 1:
        raise ConfigError(f"trainer.num_nodes={trainer.num_nodes}: must be a positive whole number")
    if trainer.num_nodes > 1 and not {"RANK", "SLURM_PROCID"} & os.environ.keys():
        raise ConfigError(f"trainer.num_nodes={trainer.num_nodes}: start it with torchrun or srun, or set it to 1")
    accelerator = choose_accelerator(trainer.accelerator)
    available = {"gpu": torch.cuda.device_count(), "mps": 1}.get(accelerator)
    devices = trainer.devices
    if devices == -1:
        devices = available or 1
    if devices < 1 or (available is not None and devices > available):
        raise ConfigError(
            f"trainer.devices={devices}: this machine has {available or 'a'} {accelerator}; choose 1 or more, or -1"
        )
    has_bf16 = accelerator != "gpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    name = torch.cuda.get_device_name() if accelerator == "gpu" else accelerator
    precision = choose_precision(trainer.precision, accelerator, has_bf16)
    return Hardware(accelerator, devices, trainer.num_nodes, precision, name)


def choose_accelerator(wanted: str, setting: str = "trainer.accelerator") -> str:
    """`gpu`, `mps` or `cpu`. Raises ConfigError for one that is missing, its message beginning with the `setting`."""
    found = {"gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, there in found.items() if there)
    if not found.get(wanted, False):
        there = ", ".join(name for name in found if found[name])
        raise ConfigError(f"{setting}={wanted}: not on this machine; choose auto or {there}")
    return wanted


def choose_precision(wanted: str, accelerator: str, has_bf16: bool) -> str:
    """The default is bf16-mixed on GPUs that have it, float32 elsewhere. Raises ConfigError for what the device lacks.

    16-mixed is not offered: its loss scaling would make arms differ in how many steps they skip.
    """
    if wanted == "auto":
        return "bf16-mixed" if accelerator == "gpu" and has_bf16 else "32-true"
    possible = PRECISIONS if has_bf16 else PRECISIONS[:1]
    if wanted not in possible:
        raise ConfigError(
            f"trainer.precision={wanted}: this {accelerator} cannot train in it; choose auto or {', '.join(possible)}"
        )
    return wanted


def current_rank() -> int:
    """This process's rank among those of the run, as its launcher tells by the environment; 0 when alone."""
    return int(rank_zero_only.rank)  # type: ignore[attr-defined]
