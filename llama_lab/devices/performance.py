"""Speed and memory of training, and a table of devices with memory and peak FLOP/s, for MFU and estimates."""

import ctypes
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CONTAINER = Path("/sys/fs/cgroup/memory.max")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Device:
    """memory: bytes. peak: dense bf16 FLOP/s."""

    memory: float
    peak: float


# From NVIDIA's data sheets, in the order in which a name is looked up; sparse peaks are halved, and a GB is 1e9 bytes.
# For devices that are not here no MFU is reported: none is better than a wrong one.
DEVICES = {
    "GB200": Device(186e9, 2500e12),
    "B200": Device(180e9, 2250e12),
    "GH200": Device(96e9, 989e12),
    "H200 NVL": Device(141e9, 835e12),
    "H200": Device(141e9, 989e12),
    "H100 PCIe": Device(80e9, 756e12),
    "H100 NVL": Device(94e9, 835e12),
    "H100": Device(80e9, 989e12),
    "A100 40GB": Device(40e9, 312e12),
    "A100": Device(80e9, 312e12),
    "A40": Device(48e9, 150e12),
    "A30": Device(24e9, 165e12),
    "A10": Device(24e9, 125e12),
    "A10G": Device(24e9, 70e12),
    "L40S": Device(48e9, 362e12),
    "L40": Device(48e9, 181e12),
    "L4": Device(24e9, 121e12),
}


def named(device_name: str) -> Device | None:
    """The device with the driver's name `device_name`; None if it is not in the table, or a slice of one (MIG)."""
    known = DEVICES if "MIG" not in device_name else {}
    return next((device for name, device in known.items() if re.search(rf"\b{name}\b", device_name)), None)


def options() -> dict[str, Device]:
    """The devices by their names on the command line: `h100_pcie`."""
    return {name.lower().replace(" ", "_"): device for name, device in DEVICES.items()}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s; None for unknown devices, MIG slices, and precisions other than bf16."""
    device = named(device_name) if precision.startswith("bf16") else None
    return device.peak if device else None


class Stopwatch:
    """Seconds spent training: runs between `start` and now, less what happens inside `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before = 0.0
        self._started: float | None = None  # None while it stands still

    def start(self, seconds: float | None = None) -> None:
        """Run from `seconds` on; default: from where it stands."""
        self._before, self._started = self._before if seconds is None else seconds, self._clock()

    def stop(self) -> None:
        """Stand still until `start`."""
        self._before, self._started = self.seconds, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens inside, if running."""
        was_running = self._started is not None
        if was_running:
            self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    @property
    def seconds(self) -> float:
        """Seconds counted so far."""
        return self._before if self._started is None else self._before + (self._clock() - self._started)


class Speed:
    """Tokens per second, from marks of (tokens so far, training seconds so far).

    interval: between the last two marks. overall: from the first to the last. Both are None before the second mark.
    Make the first mark after the steps in which kernels compile and caches fill, to leave them out. measured: tokens
    and seconds between the marks; set it to that of earlier sessions to have `overall` include them.
    """

    def __init__(self) -> None:
        self.measured: tuple[int, float] = (0, 0.0)
        self.interval: float | None = None
        self._last: tuple[int, float] | None = None

    def mark(self, tokens: int, seconds: float) -> None:
        """Add a mark; the first one starts the measurement."""
        before = self._last or (tokens, seconds)
        more = (tokens - before[0], seconds - before[1])
        self.interval = _rate(*more)
        self.measured = (self.measured[0] + more[0], self.measured[1] + more[1])
        self._last = (tokens, seconds)

    @property
    def overall(self) -> float | None:
        """See the class."""
        return _rate(*self.measured)


def _rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second, None if no time has passed."""
    return tokens / seconds if seconds > 0 else None


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device, so that it can be timed."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_memory(device: torch.device) -> int:
    """The bytes of memory of a GPU, or of this machine or container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTAINER.read_text().strip() if CONTAINER.exists() else "max"
    return installed if limit == "max" else min(installed, int(limit))


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for this process; does nothing where that is not glibc.

    A step frees what the next one allocates again. glibc returns large tensors to the kernel, which then has to zero
    their pages anew in every step: about a sixth of the time of a small model on a CPU.
    """
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, which may be of tokenising or of an earlier run; not possible on a CPU under macOS."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # returns what `keep_freed_memory` has kept
        CLEAR.write_text("5")  # proc(5): reset the peak resident set size


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory since the reset: allocated by PyTorch on a GPU, resident in this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
