"""Slots on GPUs or on the CPU, one for each run at a time, and the environment of a process in a slot."""

from collections.abc import Mapping
from dataclasses import dataclass

from llama_lab.errors import ConfigError

# Variables that make a process a rank of a larger job. A run in a slot starts without them, even under Slurm.
RANKS = ("LOCAL_RANK", "RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_RANKS = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


@dataclass(frozen=True)
class LocalSettings:
    """Keys of `hydra/launcher=local_gpus`. Raises ConfigError unless they are positive whole numbers.

    slots_per_gpu: runs that share a GPU. gpus_per_run: GPUs of one run, data parallel. cpu_slots: runs at a time on the
    CPU; None: one per two cores.
    """

    slots_per_gpu: int
    gpus_per_run: int
    cpu_slots: int | None

    def __post_init__(self) -> None:
        for name in ("slots_per_gpu", "gpus_per_run", "cpu_slots"):
            value = getattr(self, name)
            if name == "cpu_slots" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise setting_error(name, value, "must be a positive whole number")
        if self.slots_per_gpu > 1 and self.gpus_per_run > 1:
            raise setting_error(
                "slots_per_gpu", self.slots_per_gpu, "a GPU is shared or one of several; leave gpus_per_run at 1"
            )


@dataclass(frozen=True)
class Slot:
    """Room for one run at a time. gpus: in the notation of CUDA_VISIBLE_DEVICES. threads: CPU threads per run."""

    name: str
    gpus: tuple[str, ...]
    threads: int


def make_slots(settings: LocalSettings, accelerator: str, visible: list[str], cores: int) -> list[Slot]:
    """The slots of this machine for runs on `accelerator`. Raises ConfigError if it does not have them.

    visible: see `visible_gpus`. cores: the number that this process may use.
    """
    if accelerator == "gpu":
        return gpu_slots(settings, visible, cores)
    if accelerator == "cpu":
        return cpu_slots(settings, cores)
    raise ConfigError(
        f"trainer.accelerator={accelerator}: local_gpus has slots on CUDA GPUs and on the CPU; choose trainer=cpu, or "
        f"leave hydra/launcher out"
    )


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
        Slot(f"gpu {'+'.join(group)}{f' ({turn})' if times > 1 else ''}", group, threads)
        for turn in range(1, times + 1)  # the first runs spread over all GPUs
        for group in groups
    ]


def cpu_slots(settings: LocalSettings, cores: int) -> list[Slot]:
    """Slots with equal shares of the cores. Raises ConfigError if a setting for GPUs is given."""
    for name in ("slots_per_gpu", "gpus_per_run"):
        if (value := getattr(settings, name)) > 1:
            raise setting_error(name, value, "the runs train on the CPU; leave it out, and set cpu_slots if you like")
    count = settings.cpu_slots or max(1, cores // 2)
    return [Slot(f"cpu {i}", (), max(1, cores // count)) for i in range(1, count + 1)]


def setting_error(name: str, value: object, reason: str) -> ConfigError:
    """The error for a key of the launcher."""
    return ConfigError(f"hydra.launcher.{name}={'null' if value is None else value}: {reason}")


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """The `count` GPUs that this process sees, in the notation of CUDA_VISIBLE_DEVICES: numbers or UUIDs."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if chosen is None else [name.strip() for name in chosen.split(",")]
    return names[:count]  # CUDA ignores the names after the first unknown one


def slot_environment(slot: Slot, processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run with this many processes in `slot`, made from the launcher's `environ`.

    Keeps a user's OMP_NUM_THREADS: on a CPU, the last bits of a result depend on it.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in (*RANKS, *SLURM_RANKS) and not name.startswith("TORCHELASTIC_")
    }
    threads = {"OMP_NUM_THREADS": str(max(1, slot.threads // processes))}
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {}
    return threads | kept | gpus
