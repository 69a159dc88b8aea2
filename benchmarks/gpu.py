"""What only a GPU can show, beside its goals: `python -m benchmarks gpu`, within ten minutes on one card.

Parts run one after the other. One that fails is recorded with its error, and the others go on; every finding is written
when it is made.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from llama_lab.display import quiet_libraries
from llama_lab.errors import INTERRUPTED, ConfigError

from . import gpu_decoding, gpu_kernels, gpu_training
from .findings import Finding, Findings, failure, skipped
from .gpu_memory import free
from .rows import start


@dataclass(frozen=True)
class Part:
    """A part of the command. measure: takes the device, and sizes, whose defaults are for a GPU; yields findings."""

    about: str
    measure: Callable[[torch.device], Iterator[Finding]]


PARTS = {
    "training": Part("training 124M parameters in bf16, eager and compiled", gpu_training.measure_small),
    "loss": Part("memory of the loss at a vocabulary of 128k", gpu_kernels.measure_loss),
    "attention": Part("windows, biases and soft-caps through flex_attention", gpu_kernels.measure_attention),
    "decoding": Part("decoding 1B parameters in bf16", gpu_decoding.measure_decoding),
    "billion": Part("training 1B parameters in bf16, eager and compiled", gpu_training.measure_billion),
    "sharding": Part("whole runs: FSDP2, and NCCL between two GPUs", gpu_training.measure_sharding),
    "ladder": Part("short ladders of 20M and 60M parameters in slots of one GPU", gpu_training.measure_ladder),
}


def run(only: str, minutes: float, out: Path) -> None:
    """Measure, print, and write `gpu.json` and `gpu.md` into `out`. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("gpu: PyTorch finds no CUDA device here; run it on a machine that has one")
    device, where, console = start("gpu")
    quiet_libraries()
    findings = Findings(out, "gpu", where | {"cuda": torch.version.cuda})
    try:
        measure_parts(only.split(","), device, findings, console, minutes)
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        console.print(f"stopped; what was found is in {findings.json} and {findings.table}", soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    console.print(f"wrote {findings.json} and {findings.table}", soft_wrap=True)


def measure_parts(
    names: Sequence[str],
    device: torch.device,
    findings: Findings,
    console: Console,
    minutes: float,
    parts: Mapping[str, Part] = PARTS,
) -> None:
    """Measure the parts of these names in turn; none begins once `minutes` have passed."""
    begun = time.monotonic()
    for name in names:
        part, since = parts[name], time.monotonic()
        if since - begun > 60 * minutes:
            findings.add(name, skipped(part.about, f"--minutes={minutes:g} have passed; --only={name} measures it"))
            continue
        console.print(f"\n{name}: {part.about}")
        try:
            for finding in part.measure(device):
                findings.add(name, finding)
                console.print(f"  {finding}", soft_wrap=True)
        except Exception as error:
            findings.add(name, failure(error))
            console.print(traceback.format_exc(), soft_wrap=True)
        findings.took(name, time.monotonic() - since)
        free()
