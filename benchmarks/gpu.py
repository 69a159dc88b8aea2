"""What only a GPU can show, beside its goals: `python -m benchmarks gpu`, within ten minutes on one card.

Parts run one after the other. One that fails is recorded with its error, and the others go on.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from llama_lab.util.display import quiet_libraries
from llama_lab.util.errors import ConfigError, first_line

from . import gpu_decoding, gpu_kernels, gpu_training
from .findings import Finding
from .rows import start

Part = Callable[[torch.device], Iterator[Finding]]  # the sizes of each are for a GPU by default

PARTS: dict[str, Part] = {
    "training": gpu_training.measure_small,
    "loss": gpu_kernels.measure_loss,
    "attention": gpu_kernels.measure_attention,
    "decoding": gpu_decoding.measure_decoding,
    "billion": gpu_training.measure_training,
    "sharding": gpu_training.measure_sharding,
    "ladder": gpu_training.measure_ladder,
}


def run(only: Sequence[str], minutes: float, out: Path) -> None:
    """Measure, print, and write `gpu.csv` into `out` after every finding. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("gpu: PyTorch finds no CUDA device here; run it on a machine that has one")
    device, where = start("gpu")
    quiet_libraries()
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, finding in findings(only, device, minutes):
        print(f"{name}: {finding}", flush=True)
        rows.append({"part": name, **asdict(finding), "outcome": finding.outcome})
        pd.DataFrame(rows).assign(**where, cuda=torch.version.cuda).to_csv(out / "gpu.csv", index=False)
    print(f"wrote {out / 'gpu.csv'}")


def findings(
    only: Sequence[str], device: torch.device, minutes: float, parts: Mapping[str, Part] = PARTS
) -> Iterator[tuple[str, Finding]]:
    """What parts find in turn, with their names; none begins once `minutes` have passed."""
    end = time.monotonic() + 60 * minutes
    for name in only:
        if time.monotonic() > end:
            yield name, Finding("all", None, note=f"--minutes={minutes:g} have passed; --only {name} measures it")
            continue
        try:
            for finding in parts[name](device):
                yield name, finding
        except Exception as error:
            traceback.print_exc()
            yield name, Finding("the rest", None, note=f"failed, {first_line(error)}")
        gpu_training.free()
