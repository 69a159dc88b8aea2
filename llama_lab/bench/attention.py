"""Time and peak memory of causal attention over lengths, fused against written out."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from llama_lab.devices.memory import CLEAR, peak_memory_bytes, reset_peak_memory
from llama_lab.evaluation.speed import inference
from llama_lab.model.attention import reference_attention

from .rows import Row, measure, speeds

Work = Callable[[], object]
Shapes = Sequence[Sequence[int]]  # of queries, keys and values, `(B, H, T, Dh)`
Peaks = dict[tuple[str, str, str], int]  # bytes by size, direction and contender

SHAPES: Shapes = [(1, 4, length, 64) for length in (512, 1024, 2048, 4096, 8192)]


def measure_attention(rounds: int, device: torch.device, shapes: Shapes = SHAPES) -> list[Row]:
    """Measure both options of `model.attention.kernel` at every length; `both` is forward and backward.

    Time and memory exclude queries, keys, values, and the mask of the written-out kernel, which all layers of a model
    share. Float32 on a CPU, bfloat16 on a GPU. Peak memory is not measured on a macOS CPU.
    """
    peaks = measure_peaks(shapes, device)
    rows = []
    for size, direction, contenders in cases(shapes, device):
        for row in measure("attention", size, direction, contenders, rounds):
            peak = peaks.get((size, direction, row.what))
            rows.append(row if peak is None else row.adding(peak_bytes=peak))
    return rows


def cases(shapes: Shapes, device: torch.device) -> Iterator[tuple[str, str, dict[str, Work]]]:
    """(size, direction, contenders) of each measurement."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for shape in shapes:
        length = shape[2]
        heads = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        mask = torch.full((length, length), float("-inf"), device=device).triu(1)
        yield str(length), "forward", {name: inference(work) for name, work in kernels(heads, mask).items()}
        yield str(length), "both", {name: partial(both, work, heads) for name, work in kernels(heads, mask).items()}


def kernels(heads: Sequence[Tensor], mask: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Each kernel on query, key and value `(B, H, T, Dh)`; returns the same shape. mask: additive, `(T, T)`."""
    query, key, value = heads
    return {
        "written out": lambda: reference_attention(query, key, value, mask),
        "fused": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
    }


def both(work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    """Forward and backward; the output serves as the gradient, since it costs nothing to create."""
    output = work()
    torch.autograd.grad(output, inputs, output.detach())


def measure_peaks(shapes: Shapes, device: torch.device) -> Peaks:
    """Peak bytes of each case above those in use before it; empty where the peak of a CPU cannot be reset.

    On a CPU this is resident memory, in a process of its own whose allocator returns each tensor to the system at once:
    otherwise memory freed by earlier calls would hide the peak of later ones.
    """
    if device.type == "cuda":
        return peaks_here(shapes, device)
    if not CLEAR.exists():
        return {}
    child = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(shapes)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # bytes; by default glibc raises it dynamically
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {(size, direction, what): peak for size, direction, what, peak in json.loads(child.stdout)}


def peaks_here(shapes: Shapes, device: torch.device) -> Peaks:
    """`measure_peaks` in this process."""
    return {
        (size, direction, what): peak_bytes(work, device)
        for size, direction, contenders in cases(shapes, device)
        for what, work in contenders.items()
    }


def peak_bytes(work: Work, device: torch.device) -> int:
    """Peak bytes of a call above those in use before it."""
    work()  # loads libraries and starts threads
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    work()
    return peak_memory_bytes(device) - before


def attention_finding(rows: Sequence[Row]) -> str:
    """The speed and the memory of the fused kernel relative to the written-out one, over the lengths."""
    peaks = {(row.size, row.direction, row.what): row.values.get("peak_bytes", 0) for row in rows}
    shares = [
        peak / written
        for (size, direction, what), peak in peaks.items()
        if what == "fused" and (written := peaks[size, direction, "written out"])
    ]
    memory = f"{min(shares):.1%} to {max(shares):.1%} of the memory" if shares else "memory cannot be measured here"
    return f"fused to written out: {speeds(rows, 'fused')}; {memory}"


if __name__ == "__main__":
    found = peaks_here(json.loads(sys.argv[1]), torch.device("cpu"))
    print(json.dumps([[*case, peak] for case, peak in found.items()]))
