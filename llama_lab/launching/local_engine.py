"""The engine of `hydra/launcher=local_gpus`: a process per run, in slots of this machine."""

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hydra.core.utils import JobStatus
from omegaconf import DictConfig

from llama_lab.devices.hardware import Hardware, choose_accelerator, choose_hardware, usable_cores
from llama_lab.errors import ConfigError

from .engine import Engine, SubmittedRun, with_devices
from .slots import LocalSettings, Slot, make_slots, slot_environment, visible_gpus
from .sweep import Job
from .worker_process import LaunchContext, WorkerProcess


class LocalRun(SubmittedRun):
    """A run in a process of this machine. environment: that of the process."""

    def __init__(self, job: Job, slot: Slot, task_file: Path, environment: Mapping[str, str]) -> None:
        super().__init__(job)
        self.slot = slot
        self._task_file = task_file
        self._started_at = time.time()
        self._start_tick = time.monotonic()  # the other clock may be set
        self._worker = WorkerProcess(task_file, self.output, environment, LaunchContext.current())

    @property
    def place(self) -> str:
        """The slot's name."""
        return self.slot.name

    @property
    def started_at(self) -> float:
        """When the process was started, as a time.time()."""
        return self._started_at

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._start_tick

    def has_ended(self) -> bool:
        """Whether all processes of the run have exited."""
        return self._worker.has_ended()

    def interrupt(self) -> None:
        """Send SIGINT."""
        self._worker.interrupt()

    def kill(self) -> None:
        """Kill all processes of the run."""
        self._worker.kill()

    @property
    def was_stopped(self) -> bool:
        """Whether the worker was asked to stop before its job was done."""
        return self._worker.was_stopped

    def read_result(self) -> tuple[JobStatus, Any] | None:
        """The result that the worker wrote."""
        result = self._worker.collect().result
        return None if result is None else pickle.loads(result)

    def exit_reason(self) -> str:
        """The worker's exit status in words."""
        return self._worker.collect().reason


class LocalEngine(Engine):
    """Slots of this machine. wanted: the accelerator in the command's config."""

    def __init__(self, settings: LocalSettings, wanted: str) -> None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError(
                "hydra/launcher=local_gpus: starts all processes itself; start the command without torchrun"
            )
        self._settings = settings
        self._accelerator = choose_accelerator(wanted)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        self._slots = make_slots(settings, self._accelerator, gpus, usable_cores())
        self._tasks = TemporaryDirectory(prefix="llama-lab-")

    @property
    def description(self) -> str:
        """The slots."""
        return f"{len(self._slots)} slots: {', '.join(slot.name for slot in self._slots)}"

    @property
    def max_parallel(self) -> int:
        """The number of slots."""
        return len(self._slots)

    def complete_overrides(self, overrides: list[str]) -> list[str]:
        """Set `trainer.devices` to the GPUs of a slot, on GPUs."""
        if self._accelerator != "gpu":
            return overrides
        return with_devices(overrides, self._settings.gpus_per_run, "local_gpus")

    def hardware(self, trainer: DictConfig) -> Hardware:
        """This machine's hardware. Raises ConfigError for another accelerator than that of the slots."""
        if choose_accelerator(trainer.accelerator) != self._accelerator:
            raise ConfigError(
                f"trainer.accelerator={trainer.accelerator}: this sweep has slots on the {self._accelerator} alone; "
                f"give each accelerator a command of its own"
            )
        return choose_hardware(trainer)

    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Start a job in every free slot."""
        occupied = [submitted.slot for submitted in running if isinstance(submitted, LocalRun)]
        started: list[SubmittedRun] = []
        for slot in self._slots:
            if slot in occupied:
                continue
            taken = {submitted.job.run.folder.path for submitted in (*running, *started)}
            job = next((job for job in ready if job.run.folder.path not in taken), None)
            if job is None:
                break
            ready.remove(job)
            file = Path(self._tasks.name) / f"{job.index}.task"
            job.task.save(file)
            environment = slot_environment(slot, job.run.hardware.devices, os.environ)
            started.append(LocalRun(job, slot, file, environment))
        return started

    def close(self, running: Sequence[SubmittedRun]) -> None:
        """Kill the runs: none outlives its launcher."""
        super().close(running)
        self._tasks.cleanup()
