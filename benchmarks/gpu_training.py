"""Training on a GPU: its speed as a share of the peak, memory against the estimate, FSDP2, NCCL, and a short ladder."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from llama_lab.config.components import build_model, model_cost
from llama_lab.data.module import TokenDataModule
from llama_lab.data.open import open_dataset
from llama_lab.devices.throughput import peak_flops
from llama_lab.display import open_display
from llama_lab.errors import ConfigError
from llama_lab.estimate.estimate import MemoryModel, Setup
from llama_lab.runs.metrics import MetricsCSV, read_metrics
from llama_lab.runs.stored import Status, Summary
from llama_lab.training.monitor import Monitor
from llama_lab.training.run import new_run
from llama_lab.training.train import build_module, make_trainer

from .decoders import compose
from .findings import Finding, skipped
from .gpu_memory import free

PROGRAM = Path(__file__).parents[1] / "train.py"
SMALL = ("arch=gpt2", "size=gpt2", "model.vocab_size=50304", "train.batch_size=32")  # 124M
BILLION = ("arch=llama3", "size=llama3_1b", "embedding=tied", "model.max_seq_len=2048", "train.batch_size=4")
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
            return skipped(name, f"the peak of this device in {self.precision} is not known")
        return Finding(name, 100 * self.tokens_per_second * self.flops_per_token / self.peak_flops, "%", goal)


def measure_small(
    device: torch.device,
    overrides: Sequence[str] = SMALL,
    steps: int = 50,
    modes: Sequence[bool] = (False, True),
    mfu_goal: float = 45,
) -> Iterator[Finding]:
    """bf16 by default, its speed over float32, and what `measure_billion` measures."""
    by_default = train_steps(device, steps, *overrides, "trainer.compile=false")
    yield Finding("bf16-mixed by default", by_default.precision == "bf16-mixed", goal=True)
    full = train_steps(device, max(5, steps // 5), *overrides, "trainer.compile=false", "trainer.precision=32-true")
    ratio = by_default.tokens_per_second / full.tokens_per_second
    yield Finding("speed by default over float32", ratio, goal=1.5)
    yield from measure_billion(device, overrides, steps, modes, mfu_goal)


def measure_billion(
    device: torch.device,
    overrides: Sequence[str] = BILLION,
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
        yield Finding(f"training, {how}", trained.tokens_per_second, "tokens/s", note=f"{trained.parameters:,} params")
        yield trained.mfu(f"MFU, {how}", mfu_goal if compiled == modes[-1] else None)
        yield Finding(f"peak memory, {how}", trained.peak_bytes / 1e9, "GB")
        if not compiled:
            yield from estimate_error(device, overrides, trained.peak_bytes)
    if len(modes) > 1:
        yield Finding("speed of compiled over eager", speeds[1] / speeds[0], goal=1)


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
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    cfg = compose(*overrides, f"trainer.accelerator={accelerator}", "trainer.devices=1", "train.log_every=1000000")
    cfg.train.tokens = steps * cfg.train.batch_size * cfg.model.max_seq_len
    return cfg


def train_steps(device: torch.device, steps: int, *overrides: str) -> Trained:
    """Train on the default text by our Trainer, without evaluations and checkpoints. Its first steps are not timed."""
    free()  # of an earlier training
    cfg = config(device, steps, *overrides)
    with tempfile.TemporaryDirectory() as folder, open_display(steps, rank=1) as display:
        cfg.runs_dir = folder
        run = new_run(cfg, "bench", "gpu", [], {})
        data = TokenDataModule(
            open_dataset(cfg, display), cfg.model.max_seq_len, cfg.train.batch_size, None, cfg.data.seed
        )
        model = build_model(cfg, cfg.model.vocab_size)
        cost = model_cost(model)
        monitor = Monitor(cfg.train.log_every, run.tokens_per_step, cost, None, display)
        metrics = MetricsCSV(Path(folder) / "metrics.csv")
        module = build_module(run, model, bytes_per_token=1)
        make_trainer(run, module, [monitor], logger=metrics, limit_val_batches=0).fit(module, data)
        rows = read_metrics(metrics.path)
    assert monitor.speed.overall is not None
    return Trained(
        precision=run.hardware.precision,
        parameters=cost.params,
        tokens_per_second=monitor.speed.overall,
        flops_per_token=cost.train_flops_per_token,
        peak_bytes=rows[-1]["perf/peak_memory_bytes"],
        peak_flops=peak_flops(run.hardware.device_name, run.hardware.precision),
    )


def measure_sharding(device: torch.device, overrides: Sequence[str] = RUN) -> Iterator[Finding]:
    """Whole runs of train.py, sharded and on two devices, beside one on one device."""
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, *settings: str) -> dict[str, float]:
            path = Path(folder) / name
            train(path, *overrides, f"trainer.accelerator={accelerator}", *settings)
            return Summary.load(only_run(path)).metrics

        one = trained("one", "trainer.devices=1")
        cases = {"FSDP2 on one device": ("trainer=fsdp", "trainer.devices=1")}
        two = {f"{name} on two devices": (f"trainer={name}", "trainer.devices=2") for name in ("ddp", "fsdp")}
        if torch.cuda.device_count() > 1:
            cases |= two
        for number, (name, settings) in enumerate(cases.items()):
            found = trained(str(number), *settings)
            difference = abs(found["val/loss"] - one["val/loss"])
            yield Finding(f"{name}: validation loss beside one device's", difference, "nats", 0.02, at_most=True)
            speeds = [metrics["perf/tokens_per_second"] for metrics in (found, one)]
            yield Finding(f"{name}: speed over one device's", speeds[0] / speeds[1])
    if torch.cuda.device_count() < 2:
        for name in two:
            yield skipped(name, f"needs two GPUs, and there are {torch.cuda.device_count()}")


def measure_ladder(
    device: torch.device, ladders: Mapping[str, Sequence[str]] = LADDERS, slots: int = 3
) -> Iterator[Finding]:
    """Ladders through train.py, at one seed and rate, in slots of this machine: all runs end, and some at a time."""
    on = {"cuda": [f"hydra.launcher.slots_per_gpu={slots}"]}.get(
        device.type, ["trainer=cpu", f"hydra.launcher.cpu_slots={slots}"]
    )
    launcher = ["hydra/launcher=local_gpus", *on]
    study = ["study=ladder", "study.seeds=[1]", "study.learning_rates=null", "study.measure_speed=false"]
    for size, overrides in ladders.items():
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            train(Path(folder), *study, *launcher, *overrides)
            seconds = time.monotonic() - begun
            runs = [path.parent for path in Path(folder).rglob(Status.FILE)]
            done = sum(Status.load(path).status == "done" for path in runs)
            params = {Summary.load(path).metrics["params"] for path in runs}
            reports = list(Path(folder).rglob("report.html"))
            most = runs_at_once(runs)
        about = f"{len(runs)} runs of {min(params) / 1e6:.3g}M to {max(params) / 1e6:.3g}M parameters"
        yield Finding(f"ladder at {size}: runs that are done", done, goal=len(runs), note=about)
        yield Finding(f"ladder at {size}: has its report", len(reports) == 1, goal=True)
        yield Finding(f"ladder at {size}: runs at a time", most, goal=2, note=f"{slots} slots")
        yield Finding(f"ladder at {size}: time", seconds, "s")


def train(runs_dir: Path, *overrides: str) -> None:
    """Run `python train.py` in a process of its own. Raises RuntimeError with its last line if it fails."""
    if not PROGRAM.exists():
        raise ConfigError(f"gpu: {PROGRAM} is missing; run the command in a checkout")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), f"runs_dir={runs_dir}", *overrides],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "WANDB_MODE": "offline"},
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise RuntimeError(f"train.py {' '.join(overrides)} ended with {done.returncode}: {lines[-1] if lines else ''}")


def only_run(runs_dir: Path) -> Path:
    """The folder of the only run below `runs_dir`."""
    (status,) = runs_dir.rglob(Status.FILE)
    return status.parent


def runs_at_once(runs: Sequence[Path]) -> int:
    """The largest number of runs that trained at a time, from when their first and their last file were written."""
    spans = []
    for path in runs:
        with suppress(FileNotFoundError):
            spans.append(tuple((path / name).stat().st_mtime for name in ("environment.json", Summary.FILE)))
    return max((sum(start <= moment < end for start, end in spans) for moment, _ in spans), default=0)
