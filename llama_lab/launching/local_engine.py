"""The engine of `hydra/launcher=local_gpus`: a process per run, in slots of this machine, on GPUs or on the CPU."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llama_lab.devices.hardware import choose_accelerator, usable_cores
from llama_lab.devices.site import Site
from llama_lab.runs.environment import RUNS_AT_ONCE

from .engine import Engine, Job, Session, SubmittedRun, check_alone
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

    visible: see `visible_gpus`. cores: the number that this process may use. threads: of each slot on a CPU, unless the
    settings have a number of slots; None: two.
    """
    if accelerator == "cpu":
        return cpu_slots(settings, cores, threads)
    return gpu_slots(settings, ["0"] if accelerator == "mps" else visible, cores)  # a Mac has one GPU


def gpu_slots(settings: LocalSettings, visible: list[str], cores: int) -> list[Slot]:
    """Groups of `gpus_per_run` GPUs, or every GPU `slots_per_gpu` times. Raises ConfigError."""
    size, times = settings.gpus_per_run, settings.slots_per_gpu
    if settings.cpu_slots is not None:
        raise setting_error("cpu_slots", settings.cpu_slots, "the runs train on GPUs; leave it out, or add trainer=cpu")
    if size > len(visible):
        raise setting_error("gpus_per_run", size, f"this process sees {len(visible)} GPU(s); choose at most that")
    groups = [tuple(visible[i : i + size]) for i in range(0, len(visible) - size + 1, size)]
    threads = max(1, cores // (len(groups) * times))
    return [
        Slot(f"gpu {'+'.join(group)}{f' ({turn})' if times > 1 else ''}", group, threads, times)
        for turn in range(1, times + 1)  # the first runs spread over all GPUs
        for group in groups
    ]


def cpu_slots(settings: LocalSettings, cores: int, threads: int | None) -> list[Slot]:
    """Slots that share the cores, see `make_slots`. Raises ConfigError if a setting for GPUs is given."""
    for name in ("slots_per_gpu", "gpus_per_run"):
        if (value := getattr(settings, name)) > 1:
            raise setting_error(name, value, "the runs train on the CPU; leave it out, and set cpu_slots if you like")
    count = settings.cpu_slots or max(1, cores // (threads or 2))
    if settings.cpu_slots or threads is None:
        threads = max(1, cores // count)
    return [Slot(f"cpu {i}", (), threads, count) for i in range(1, count + 1)]


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


class LocalRun(SubmittedRun):
    """A run in a slot of this machine."""

    def __init__(self, job: Job, slot: Slot) -> None:
        super().__init__(job)
        self.slot = slot
        self.session = Session(slot.name, time.time())
        hardware = job.run.hardware
        environment = slot_environment(slot, hardware.devices, os.environ) | run_variables()
        environment[RUNS_AT_ONCE] = str(slot.sharing)
        start = RunFork if FORKS and (hardware.accelerator, hardware.devices) == ("cpu", 1) else RunProcess
        self.process = start(job.command, self.output, environment, Path.cwd())

    def poll(self) -> int | None:
        """The exit status of the process."""
        return self.process.poll()


class LocalEngine(Engine[LocalRun]):
    """Slots of this machine. wanted: the accelerator in the command's config. threads: see `make_slots`."""

    def __init__(self, settings: LocalSettings, wanted: str, threads: int | None = None) -> None:
        check_alone("local_gpus")
        accelerator = choose_accelerator(wanted)
        gpus = visible_gpus(os.environ, torch.cuda.device_count())
        self._slots = make_slots(settings, accelerator, gpus, usable_cores(), threads)
        self.site = Site("local_gpus", (accelerator,), gpus=settings.gpus_per_run)
        self.max_parallel = len(self._slots)

    def open(self) -> str:
        """The slots; nothing needs to be acquired."""
        return f"{len(self._slots)} slots: {', '.join(slot.name for slot in self._slots)}"

    def start(self, jobs: Sequence[Job], running: Sequence[LocalRun], more: bool) -> list[LocalRun]:
        """Start a job in every free slot."""
        occupied = [run.slot for run in running]
        free = [slot for slot in self._slots if slot not in occupied]
        return [LocalRun(job, slot) for job, slot in zip(jobs, free, strict=False)]

    def stop(self, running: Sequence[LocalRun]) -> None:
        """Send SIGINT to the runs."""
        for run in running:
            run.process.send(signal.SIGINT)

    def close(self, running: Sequence[LocalRun]) -> None:
        """Kill the runs: none outlives its launcher."""
        for run in running:
            run.process.kill()
