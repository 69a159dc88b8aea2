"""torch.compile in training: whether it pays off, whether this machine can compile, and compiling itself.

The decision depends on counted FLOPs and the kind of device, never on a timing: runs that are compared must decide
alike, or their speeds and last digits would differ for reasons other than their architecture.
"""

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._triton import has_triton

from llama_lab.devices.hardware import Hardware, current_rank
from llama_lab.model import Decoder
from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import duration


@dataclass(frozen=True)
class Threshold:
    """When compiling pays off: flops_per_second of eager training, and the seconds that it must take at least."""

    flops_per_second: float
    seconds: float


# By accelerator; on others, `auto` does not compile. The CPU's are measured on two cores: the README's first run trains
# at 0.9e11 FLOP/s, and compiling took 15 s, or five times that with masks, to save 14% of each step (dim 256, 6 layers,
# float32). The GPU's are a guess: a third of an A100's bf16 peak, and a minute to compile for a fifth of the time.
THRESHOLDS = {"cpu": Threshold(1e11, 600), "gpu": Threshold(1e14, 300)}
IN_BF16 = 1.7  # times the speed of a CPU in float32; compiling saves as much of each step (docs/devices.md)


def pays(flops: float, hardware: Hardware) -> bool:
    """Whether compiling shortens a run with this many training FLOPs, over all devices."""
    threshold = THRESHOLDS.get(hardware.accelerator)
    return threshold is not None and eager_seconds(flops, hardware) > threshold.seconds


def eager_seconds(flops: float, hardware: Hardware) -> float:
    """Estimated seconds of an eager run, at the nominal speed of its kind of device and its precision."""
    speed = THRESHOLDS[hardware.accelerator].flops_per_second
    if hardware.accelerator == "cpu" and hardware.precision != "32-true":
        speed *= IN_BF16
    return flops / hardware.world_size / speed


def decide(flops: float, hardware: Hardware) -> bool:
    """Resolve `trainer.compile=auto` for runs of up to this many training FLOPs.

    Prints to standard error if they compile, or would if this machine could.
    """
    if not pays(flops, hardware):
        return False
    missing = missing_part(hardware)
    outcome = f"trains eagerly, since compiling needs {missing}" if missing else "compiles"
    if current_rank() == 0:
        print(
            f"trainer.compile=auto: {outcome}; {flops:.2g} training FLOPs take about "
            f"{duration(eager_seconds(flops, hardware))} eagerly",
            file=sys.stderr,
        )
    return missing is None


def check_compiler(hardware: Hardware) -> None:
    """Raise ConfigError if this machine cannot compile."""
    if missing := missing_part(hardware):
        raise ConfigError(f"trainer.compile=true: needs {missing}, or set trainer.compile=false")


def missing_part(hardware: Hardware) -> str | None:
    """What is missing for compiling on this device, and the fix; None if nothing is, or for another machine."""
    if hardware.elsewhere:
        return None
    if hardware.accelerator == "gpu" and not has_triton():
        return "Triton and a GPU that it supports (pip install triton)"
    if hardware.accelerator == "gpu":  # for Triton; else for TorchInductor
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    else:
        compilers = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    if not any(map(shutil.which, compilers)):
        return "a C++ compiler (apt install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python (apt install python3-dev)"
    return None


def compile_in_place(model: Decoder, backend: str = "inductor") -> None:
    """Compile every block at its first call, in place, so that names in checkpoints stay the same.

    Blocks of equal shape share their code, which takes a fraction of the time of compiling the whole model.
    """
    torch._dynamo.reset()  # its limit on recompilations is the process's, and later runs of a sweep would run eagerly
    # Each block may need code of its own, and a second one if it makes the mask that those after it share.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(model.all_blocks))
    if any(getattr(ffn, "kernel", "") for ffn in model.feedforwards) and current_rank() == 0:
        cost = "which a CPU trains slower than with trainer.compile=false"
        print(f"trainer.compile: experts and routing run eagerly, since their sizes are data, {cost}", file=sys.stderr)
    for block in model.all_blocks:
        block.compile(backend=backend)
