"""Memory: what a device has, what a run keeps between steps, and its peak."""

import ctypes
import os
import resource
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CONTAINER = Path("/sys/fs/cgroup/memory.max")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt(3)
libc = ctypes.CDLL(None)


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
