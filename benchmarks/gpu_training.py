"""Training on a GPU: its speed as a share of the peak, memory against the estimate, FSDP2, NCCL, and a short ladder."""

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from llama_lab.api import cost, load_config
from llama_lab.data.open import open_dataset
from llama_lab.devices.performance import peak_flops, peak_memory_bytes, reset_peak_memory
from llama_lab.estimate.estimate import MemoryModel, Setup
from llama_lab.runs.stored import Status, Summary
from llama_lab.study.measure import training_speed
from llama_lab.training.run import new_run

from .decoders import BILLION, build_decoder
from .findings import Finding

PROGRAM = Path(__file__).parents[1] / "train.py"
SMALL = ("arch=gpt2", "size=gpt2", "model.vocab_size=50304", "train.batch_size=32")  # 124M
LARGE = (*BILLION, "model.max_seq_len=2048", "train.batch_size=4")
RUN = ("size=mini", "train.tokens=1e6", "train.evaluations=1", "logger=none")
LADDER_RUN = ("model.max_seq_len=512", "train.tokens=5e5", "train.batch_size=32", "train.evaluations=1", "logger=none")
LADDERS = {  # about as many parameters as its name says, with the vocabulary of the default tokenizer
    "20M": ("model.dim=384", "model.n_layers=10", "model.n_heads=6", *LADDER_RUN),
    "60M": ("model.dim=640", "model.n_layers=11", "model.n_heads=10", *LADDER_RUN),
}


@dataclass(frozen=True)
class Trained:
    """What a short training was measured at. peak_flops: of the device; None if it is not known."""

    precision: str
    parameters: int
    tokens_per_second: float
    flops_per_token: float
    peak_bytes: float
    peak_flops: float | None

    def mfu(self, name: str, goal: float | None = None) -> Finding:
        """The model FLOPs utilisation as a finding."""
        if self.peak_flops is None:
            return Finding(name, None, note=f"the peak of this device in {self.precision} is not known")
        return Finding(name, 100 * self.tokens_per_second * self.flops_per_token / self.peak_flops, "%", goal)


def measure_small(
    device: torch.device,
    overrides: Sequence[str] = SMALL,
    steps: int = 50,
    modes: Sequence[bool] = (False, True),
) -> Iterator[Finding]:
    """bf16 by default, its speed over float32, and what `measure_training` measures."""
    by_default = train_steps(device, steps, *overrides, "trainer.compile=false")
    yield Finding("bf16-mixed by default", by_default.precision == "bf16-mixed", goal=1)
    full = train_steps(device, max(5, steps // 5), *overrides, "trainer.compile=false", "trainer.precision=32-true")
    ratio = by_default.tokens_per_second / full.tokens_per_second
    yield Finding("speed by default over float32", ratio, goal=1.5)
    yield from measure_training(device, overrides, steps, modes, mfu_goal=45)


def measure_training(
    device: torch.device,
    overrides: Sequence[str] = LARGE,
    steps: int = 30,
    modes: Sequence[bool] = (False, True),
    mfu_goal: float = 50,
) -> Iterator[Finding]:
    """Speed, MFU and peak memory, eager and compiled, and the error of the estimate of the memory.

    modes: whether the model is compiled, of each training. The goal is for the last of them.
    """
    speeds = []
    for compiled in modes:
        how = "compiled" if compiled else "eager"
        trained = train_steps(device, steps, *overrides, f"trainer.compile={str(compiled).lower()}")
        speeds.append(trained.tokens_per_second)
        note = f"{trained.parameters:,} parameters"
        yield Finding(f"training, {how}", trained.tokens_per_second, "tokens/s", note=note)
        yield trained.mfu(f"MFU, {how}", mfu_goal if compiled == modes[-1] else None)
        yield Finding(f"peak memory, {how}", trained.peak_bytes / 1e9, "GB")
        if not compiled:
            yield from estimate_error(device, overrides, trained.peak_bytes)
    yield Finding("speed of the last over the first", speeds[-1] / speeds[0], goal=1)


def estimate_error(device: torch.device, overrides: Sequence[str], peak_bytes: float) -> Iterator[Finding]:
    """How far the estimate is from the allocator's peak, and how long it took."""
    cfg = config(device, 1, *overrides)
    begun = time.monotonic()
    model = MemoryModel(cfg, cfg.model.vocab_size, 1, "bf16-mixed")
    batch, length = cfg.train.batch_size, cfg.model.max_seq_len
    estimated = model.memory(Setup(False, 1, batch, batch, length)).total
    seconds = time.monotonic() - begun
    note = f"{estimated / 1e9:.3g} GB"
    yield Finding("error of the estimated memory", 100 * abs(estimated / peak_bytes - 1), "%", 10, True, note)
    yield Finding(f"time of an estimate at {cfg.model.vocab_size:,} ids", seconds, "s", goal=20, at_most=True)


def config(device: torch.device, steps: int, *overrides: str) -> DictConfig:
    """The config of a training of `steps` steps on one device."""
    cfg = load_config([*overrides, f"trainer.accelerator={accelerator(device)}", "trainer.devices=1"])
    cfg.train.tokens = steps * cfg.train.batch_size * cfg.model.max_seq_len
    return cfg


def accelerator(device: torch.device) -> str:
    """What the config calls a device."""
    return "gpu" if device.type == "cuda" else "cpu"


def train_steps(device: torch.device, steps: int, *overrides: str) -> Trained:
    """Train on the default text by our Trainer, without evaluations and checkpoints. Its first steps are not timed."""
    cfg = config(device, steps, *overrides)
    run = new_run(cfg, "bench", "gpu", [], {})
    dataset = open_dataset(cfg)
    free()  # of an earlier training
    reset_peak_memory(device)
    speed = training_speed(run, dataset)
    costs = cost(build_decoder(cfg, torch.device("meta")))
    return Trained(
        precision=run.hardware.precision,
        parameters=costs.params,
        tokens_per_second=speed,
        flops_per_token=costs.train_flops_per_token,
        peak_bytes=peak_memory_bytes(device),
        peak_flops=peak_flops(run.hardware.device_name, run.hardware.precision),
    )


def free() -> None:
    """Give back what an earlier measurement has left: tensors in cycles of references, compiled code, kept memory."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def measure_sharding(device: torch.device, overrides: Sequence[str] = RUN) -> Iterator[Finding]:
    """Whole runs of train.py, sharded and on two devices, beside one on one device."""
    common = (*overrides, f"trainer.accelerator={accelerator(device)}")
    cases = {"FSDP2 on one device": ("trainer=fsdp", "trainer.devices=1")}
    cases |= {f"{name} on two devices": (f"trainer={name}", "trainer.devices=2") for name in ("ddp", "fsdp")}
    one = metrics_of(*common, "trainer.devices=1")
    for name, settings in cases.items():
        if settings[1] == "trainer.devices=2" and torch.cuda.device_count() < 2:
            yield Finding(name, None, note=f"needs two GPUs, and there are {torch.cuda.device_count()}")
            continue
        found = metrics_of(*common, *settings)
        difference = abs(found["val/loss"] - one["val/loss"])
        yield Finding(f"{name}: validation loss beside one device's", difference, "nats", 0.02, at_most=True)
        ratio = found["perf/tokens_per_second"] / one["perf/tokens_per_second"]
        yield Finding(f"{name}: speed over one device's", ratio)


def metrics_of(*overrides: str) -> dict[str, float]:
    """The metrics of a whole run of train.py."""
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), *overrides)
        (status,) = Path(folder).rglob(Status.FILE)
        return Summary.load(status.parent).metrics


def measure_ladder(
    device: torch.device, ladders: Mapping[str, Sequence[str]] = LADDERS, slots: int = 3
) -> Iterator[Finding]:
    """Ladders through train.py, at one seed and rate, in slots of this machine."""
    slot = "slots_per_gpu" if device.type == "cuda" else "cpu_slots"
    launcher = [
        "hydra/launcher=local_gpus",
        f"trainer.accelerator={accelerator(device)}",
        f"hydra.launcher.{slot}={slots}",
    ]
    study = ["study=ladder", "study.seeds=[1]", "study.learning_rates=null", "study.measure_speed=false"]
    for size, overrides in ladders.items():
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            train(Path(folder), *study, *launcher, *overrides)
            seconds = time.monotonic() - begun
            runs = [path.parent for path in Path(folder).rglob(Status.FILE)]
            done = sum(Status.load(path).status == "done" for path in runs)
            reports = len(list(Path(folder).rglob("report.html")))
        yield Finding(f"ladder at {size}: runs that are done", done, goal=len(runs))
        yield Finding(f"ladder at {size}: reports", reports, goal=1)
        yield Finding(f"ladder at {size}: time", seconds, "s", note=f"{slots} slots")


def train(runs_dir: Path, *overrides: str) -> None:
    """Run `python train.py` in a process of its own. Raises RuntimeError with its last line if it fails."""
    command = [sys.executable, str(PROGRAM), f"runs_dir={runs_dir}", *overrides]
    variables = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(f"train.py {' '.join(overrides)} ended with {done.returncode}: {lines[-1] if lines else ''}")
