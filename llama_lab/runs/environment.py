"""The environment of a run: command, versions, devices, commit."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from llama_lab.config.grammar import typed_command
from llama_lab.util.version import __version__

from .stored import Environment, Git, RunMetadata

CPUINFO = Path("/proc/cpuinfo")
RUNS_AT_ONCE = "LLAMA_LAB_RUNS_AT_ONCE"  # variable that a launcher sets: how many runs may share the run's device
LIBRARIES = ("lightning", "hydra-core", "numpy", "tokenizers", "datasets", "wandb")


def environment(metadata: RunMetadata) -> Environment:
    """The environment of a run in this process; the command is that of its launcher, if any."""
    return Environment(
        **vars(metadata),
        command=typed_command(),
        python=platform.python_version(),
        versions={"llama-lab": __version__, "torch": torch.__version__} | {name: version(name) for name in LIBRARIES},
        platform=platform.platform(),
        cpu=cpu_name(),
        cpu_threads=torch.get_num_threads(),
        runs_at_once=int(os.environ.get(RUNS_AT_ONCE, 1)),
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
        deterministic=torch.are_deterministic_algorithms_enabled(),
        git=git_state(Path(__file__).parent),
    )


def cpu_name() -> str:
    """The processor's name, as Linux knows it, or else its architecture."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def git_state(folder: Path) -> Git | None:
    """The state of the checkout that tracks `folder`; None outside one, or if git does not answer."""
    try:
        tracked = _git(folder, "ls-files", "--", "environment.py")
        if not tracked:
            return None
        return Git(_git(folder, "rev-parse", "HEAD"), bool(_git(folder, "status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout: an installed package; or a slow disk
        return None


def _git(folder: Path, *arguments: str) -> str:
    """Standard output of a git command, which takes no lock: the user may be at work in the checkout."""
    done = subprocess.run(
        ("git", "--no-optional-locks", *arguments), cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
