"""The engine of `hydra/launcher=local_gpus`: a process per run, in slots of this machine."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from llama_lab.devices.hardware import choose_accelerator, usable_cores
from llama_lab.devices.site import Site
from llama_lab.errors import ConfigError

from .engine import Engine, Job, Session, SubmittedRun, startable
from .process import RunProcess, run_variables
from .slots import LocalSettings, Slot, make_slots, slot_environment, visible_gpus


class LocalRun(SubmittedRun):
    """A run in a slot of this machine."""

    def __init__(self, job: Job, slot: Slot) -> None:
        super().__init__(job)
        self.slot = slot
        self._started_at = time.time()
        self._start_tick = time.monotonic()  # the other clock may be set
        environment = slot_environment(slot, job.run.hardware.devices, os.environ) | run_variables()
        self._process = RunProcess(job.command, self.output, environment, Path.cwd())

    @property
    def session(self) -> Session:
        """Its only one."""
        return Session(self.slot.name, self._started_at, time.monotonic() - self._start_tick)

    @property
    def exit_status(self) -> int | None:
        """The exit status of the process."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Send SIGINT."""
        self._process.interrupt()

    def kill(self) -> None:
        """Kill all processes of the run."""
        self._process.kill()


class LocalEngine(Engine):
    """Slots of this machine. wanted: the accelerator in the command's config."""

    def __init__(self, settings: LocalSettings, wanted: str) -> None:
        check_alone("local_gpus")
        accelerator = choose_accelerator(wanted)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        self._slots = make_slots(settings, accelerator, gpus, usable_cores())
        self._site = Site("local_gpus", (accelerator,), gpus=settings.gpus_per_run)

    @property
    def site(self) -> Site:
        """This machine."""
        return self._site

    @property
    def description(self) -> str:
        """The slots."""
        return f"{len(self._slots)} slots: {', '.join(slot.name for slot in self._slots)}"

    @property
    def max_parallel(self) -> int:
        """The number of slots."""
        return len(self._slots)

    def start(self, ready: list[Job], running: Sequence[SubmittedRun], more: bool) -> list[SubmittedRun]:
        """Start a job in every free slot."""
        occupied = [submitted.slot for submitted in running if isinstance(submitted, LocalRun)]
        free = [slot for slot in self._slots if slot not in occupied]
        started = [LocalRun(job, slot) for job, slot in zip(startable(ready, running), free, strict=False)]
        for submitted in started:
            ready.remove(submitted.job)
        return list(started)


def check_alone(launcher: str) -> None:
    """Raise ConfigError if torchrun started this process: our launchers start the processes of a run themselves."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"hydra/launcher={launcher}: starts all processes itself; start the command without torchrun")
