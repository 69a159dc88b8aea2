"""The engine of `hydra/launcher=local_gpus`: a process per run, in slots of this machine, on GPUs or on the CPU."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from llama_lab.devices.hardware import choose_accelerator, usable_cores
from llama_lab.devices.site import Site
from llama_lab.runs.environment import RUNS_AT_ONCE

from .engine import Engine, QueuedRun, check_alone
from .forks import FORKS, RunFork
from .process import RunProcess, run_variables, without_ranks
from .settings import LocalSettings, setting_error


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time.

    gpus: in the notation of CUDA_VISIBLE_DEVICES. threads: CPU threads per run. sharing: the slots on its device.
    """

    name: str
    gpus: tuple[str, ...]
    threads: int
    sharing: int = 1


def make_slots(
    settings: LocalSettings, accelerator: str, visible: list[str], cores: int, threads: int | None = None
) -> list[Slot]:
    """The slots of this machine for runs on `accelerator`. Raises ConfigError for settings that it cannot serve.

    On a CPU, they share the cores. On GPUs, they are groups of `gpus_per_run`, or every GPU `slots_per_gpu` times.
    visible: see `visible_gpus`. cores: the number that this process may use. threads: of each slot on a CPU, unless the
    settings have a number of slots; None: two.
    """
    count, size, times = settings.cpu_slots, settings.gpus_per_run, settings.slots_per_gpu
    if accelerator == "cpu":
        for name, value in (("slots_per_gpu", times), ("gpus_per_run", size)):
            if value > 1:
                reason = "the runs train on the CPU; leave it out, and set cpu_slots if you like"
                raise setting_error(name, value, reason)
        slots = count or max(1, cores // (threads or 2))
        if count or threads is None:
            threads = max(1, cores // slots)
        return [Slot(f"cpu {i}", (), threads, slots) for i in range(1, slots + 1)]
    if accelerator == "mps":  # a Mac has one GPU
        visible = ["0"]
    if count is not None:
        raise setting_error("cpu_slots", count, "the runs train on GPUs; leave it out, or add trainer=cpu")
    if size > len(visible):
        raise setting_error("gpus_per_run", size, f"this process sees {len(visible)} GPU(s); choose at most that")
    groups = [tuple(visible[i : i + size]) for i in range(0, len(visible) - size + 1, size)]
    threads = max(1, cores // (len(groups) * times))
    return [
        Slot(f"gpu {'+'.join(group)}{f' ({turn})' if times > 1 else ''}", group, threads, times)
        for turn in range(1, times + 1)  # the first runs spread over all GPUs
        for group in groups
    ]


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """The `count` GPUs that this process sees, in the notation of CUDA_VISIBLE_DEVICES: numbers or UUIDs."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if chosen is None else [name.strip() for name in chosen.split(",")]
    return names[:count]  # CUDA ignores the names after the first unknown one


def slot_environment(slot: Slot, processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run with this many processes in `slot`, made from the launcher's `environ`.

    Keeps a user's OMP_NUM_THREADS: on a CPU, the last bits of a result depend on it.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, slot.threads // processes))}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {}
    return threads | without_ranks(environ, "SLURM_(PROCID|LOCALID|NTASKS)") | gpus


class LocalEngine(Engine):
    """Slots of this machine. config: of the command. threads: see `make_slots`."""

    def __init__(self, settings: LocalSettings, config: DictConfig, threads: int | None = None) -> None:
        check_alone("local_gpus")
        accelerator = choose_accelerator(config.trainer.accelerator)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        self._slots = make_slots(settings, accelerator, gpus, usable_cores(), threads)
        self._processes: dict[QueuedRun, RunProcess] = {}
        self.site = Site("local_gpus", (accelerator,), gpus=settings.gpus_per_run, slots=len(self._slots))

    def open(self) -> str:
        """The slots; nothing needs to be acquired."""
        return f"{len(self._slots)} slots: {', '.join(slot.name for slot in self._slots)}"

    def start(self, ready: Sequence[QueuedRun], running: Sequence[QueuedRun], more: bool) -> Sequence[QueuedRun]:
        """Start a run in every free slot."""
        occupied = [queued.place for queued in running]
        free = [slot for slot in self._slots if slot.name not in occupied]
        for queued, slot in zip(ready, free, strict=False):
            queued.start(slot.name, time.time())
            hardware = queued.run.hardware
            environment = slot_environment(slot, hardware.devices, os.environ) | run_variables()
            environment[RUNS_AT_ONCE] = str(slot.sharing)
            begin = RunFork if FORKS and (hardware.accelerator, hardware.devices) == ("cpu", 1) else RunProcess
            self._processes[queued] = begin(queued.command, queued.open_output(), environment, Path.cwd())
        return ready[: len(free)]

    def poll(self, queued: QueuedRun) -> int | None:
        """The exit status of the process."""
        return self._processes[queued].poll()

    def stop(self, running: Sequence[QueuedRun]) -> None:
        """Send SIGINT to the runs."""
        for queued in running:
            self._processes[queued].send(signal.SIGINT)

    def close(self, running: Sequence[QueuedRun]) -> None:
        """Kill the runs: none outlives its launcher."""
        for queued in running:
            self._processes[queued].kill()
