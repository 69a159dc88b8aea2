"""Peak memory of a run."""

import resource
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, which may be of tokenising or of an earlier run; not possible on a CPU under macOS."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        CLEAR.write_text("5")  # proc(5): reset the peak resident set size


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory since the reset: allocated by PyTorch on a GPU, resident in this process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
