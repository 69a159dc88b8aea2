"""The engine of `hydra/launcher=local_gpus`: a process per run, in slots of this machine."""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from omegaconf import DictConfig

from llama_lab.devices.hardware import Hardware, choose_accelerator, choose_hardware, usable_cores
from llama_lab.errors import ConfigError

from .engine import Engine, Execution, with_devices
from .jobs import Job
from .process import Process
from .slots import Settings, Slot, make_slots, slot_environment, visible_gpus


class Local(Engine):
    """Slots of this machine. wanted: the accelerator that the command's config asks for."""

    def __init__(self, settings: Settings, wanted: str) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError(
                "hydra/launcher=local_gpus: starts all processes itself; start the command without torchrun"
            )
        self._settings = settings
        self._accelerator = choose_accelerator(wanted)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        self._slots = make_slots(settings, self._accelerator, gpus, usable_cores())
        self._slot_of: dict[Execution, Slot] = {}
        self._tasks = TemporaryDirectory(prefix="llama-lab-")

    @property
    def places(self) -> str:
        """The slots."""
        return f"{len(self._slots)} slots: {', '.join(slot.name for slot in self._slots)}"

    @property
    def width(self) -> int:
        """A job per slot."""
        return len(self._slots)

    def settle(self, overrides: list[str]) -> list[str]:
        """On GPUs, each run has those of its slot."""
        if self._accelerator != "gpu":
            return overrides
        return with_devices(overrides, self._settings.gpus_per_run, "local_gpus")

    def hardware(self, trainer: DictConfig) -> Hardware:
        """This machine's."""
        if choose_accelerator(trainer.accelerator) != self._accelerator:
            raise ConfigError(
                f"trainer.accelerator={trainer.accelerator}: this sweep has slots on the {self._accelerator} alone; "
                f"give each accelerator a command of its own"
            )
        return choose_hardware(trainer)

    def start(self, ready: list[Job], running: Sequence[Execution], more: bool) -> list[Execution]:
        """Give every free slot a job."""
        started: list[Execution] = []
        for slot in self._slots:
            if any(self._slot_of[execution] == slot for execution in running):
                continue
            taken = {execution.job.run.folder.path for execution in (*running, *started)}
            job = next((job for job in ready if job.run.folder.path not in taken), None)
            if job is None:
                break
            ready.remove(job)
            file = Path(self._tasks.name) / f"{job.index}.task"
            job.save_task(file)
            process = Process(job, slot.name, file, slot_environment(slot, job.run.hardware.devices, os.environ))
            self._slot_of[process] = slot
            started.append(process)
        return started

    def close(self, running: Sequence[Execution]) -> None:
        """Runs do not outlive their launcher."""
        super().close(running)
        self._tasks.cleanup()
