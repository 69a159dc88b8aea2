"""Runs of a tiny model inside the test's process, whole or in pieces."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from llama_lab.config.components import build, build_model
from llama_lab.data.data_module import TokenDataModule, open_data_module
from llama_lab.data.open import open_dataset
from llama_lab.data.tokens import TokenDataset
from llama_lab.devices.performance import Stopwatch
from llama_lab.model import Decoder, measure_cost
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import RunMetadata
from llama_lab.training.command import build_callbacks, train_run
from llama_lab.training.loggers import open_loggers
from llama_lab.training.module import LanguageModel
from llama_lab.training.monitor import Monitor
from llama_lab.training.run import Run, new_run
from llama_lab.training.stop import Outcome
from llama_lab.training.train import fit, session
from llama_lab.training.warm_start import check_start
from llama_lab.util.display import Display, quiet_libraries
from tests.composing import compose_config

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
PLACES = ("runs_dir=", "init_from=", "resume=")


def on_pairs(overrides: Sequence[str], folder: Path) -> list[str]:
    """The overrides of a run on words of many lengths and their last letters, instead of a text."""
    words = [f"{n:b}{n:o}" for n in range(120)]
    for name, lines in (("from", words), ("to", [word[-n % 5 - 1 :] for n, word in enumerate(words)])):
        (folder / name).write_text("\n".join(lines))
    shared = [one for one in overrides if not one.startswith("data.document_chars")]
    return [*shared, "data=pairs", f"data.files=[{folder / 'from'},{folder / 'to'}]", "data.val_fraction=0.2"]


def planned(*overrides: str, arm: str = "arm") -> Run:
    """The run that `python train.py *overrides` would start. Runs in several places are composed once."""
    cfg = compose_config(*(override for override in overrides if not override.startswith(PLACES)))
    for key, _, place in (override.partition("=") for override in overrides if override.startswith(PLACES)):
        cfg[key] = place.strip("'\"")
    run = new_run(cfg, "name", arm, list(overrides), {"norm": "rmsnorm"})
    check_start(run)
    return run


def trained(*overrides: str, arm: str = "arm") -> Path:
    """The folder of the whole run that `python train.py *overrides` would train."""
    run = planned(*overrides, arm=arm)
    with patch.dict(os.environ, LOOPBACK):  # Lightning leaves a rank in it
        assert train_run(run) == "done"
    return run.folder.path


@dataclass
class Pieces:
    """A run's parts, as `train` puts them together; replace one before `fit`."""

    run: Run
    dataset: TokenDataset
    data: TokenDataModule
    module: LanguageModel
    monitor: Monitor

    def fit(self) -> Outcome:
        """Train as `train` does, from the folder's checkpoint if there is one, without a summary and a sample."""
        quiet_libraries()
        with (
            session(self.run, RunMetadata(), self.dataset.tokenizer) as checkpoint,
            open_loggers(self.run, checkpoint, RunMetadata()) as self.monitor.loggers,
        ):
            callbacks = build_callbacks(self.run.cfg)
            return fit(self.run, self.module, self.data, self.monitor, checkpoint, callbacks)

    @property
    def rows(self) -> list[dict[str, float]]:
        """What metrics.csv holds."""
        return rows(self.run.folder.path)


def pieces(*overrides: str, stopwatch: Stopwatch | None = None, **replaced: Any) -> Pieces:
    """The parts of the run of `overrides`; `replaced` are arguments of its LanguageModel, or `kind`, its class."""
    run = planned(*overrides)
    cfg = run.cfg
    dataset = open_dataset(cfg)
    data = open_data_module(cfg, dataset)
    arguments: dict[str, Any] = {
        "kind": LanguageModel,
        "model": build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id),
        "optimizer": build(cfg.optim, "optim"),
        "schedule": build(cfg.schedule, "schedule"),
        "steps": run.steps,
        "bytes_per_token": dataset.bytes_per_token,
        "grad_clip": cfg.train.grad_clip,
        "z_loss": cfg.train.z_loss,
        "label_smoothing": cfg.train.label_smoothing or 0.0,
        "seed": cfg.seed,
        "ema": cfg.train.ema,
    } | replaced
    display = Display(Console(quiet=True), run.steps, {})
    cost = measure_cost(arguments["model"])
    monitor = Monitor(run, cost, display)
    monitor.stopwatch = stopwatch or monitor.stopwatch
    module = arguments.pop("kind")(**arguments)
    return Pieces(run, dataset, data, module, monitor)


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv, read without our own reader; empty cells are left out."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def logged(folder: Path, metric: str) -> list[float]:
    """The values of a metric in a run's metrics.csv."""
    return [row[metric] for row in rows(folder) if metric in row]


def steps_of(folder: Path, metric: str) -> list[float]:
    """The steps of the rows of a run's metrics.csv that have a metric."""
    return [row["step"] for row in rows(folder) if metric in row]


def repeatable(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.csv without what no two runs share: time and memory."""
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("perf/")} for row in rows(folder)]


def trained_state(folder: Path) -> dict[str, Any]:
    """Weights, optimizer and schedule of a run's checkpoint."""
    checkpoint = torch.load(RunFolder(folder).checkpoint, weights_only=True)
    return {key: checkpoint[key] for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers")}


def identical(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are the same to the last bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def nll_by_hand(model: Decoder, tokens: Sequence[int]) -> list[float]:
    """What `model` pays for each token but the first, in nats: window by window, one softmax at a time, in float64."""
    model = model.double()
    paid: list[float] = []
    for start in range(0, len(tokens) - 1, model.max_seq_len):
        window = [int(token) for token in tokens[start : start + model.max_seq_len + 1]]
        with torch.no_grad():
            (logits,) = model(torch.tensor([window[:-1]]))
        for position, target in enumerate(window[1:]):
            paid.append(-F.log_softmax(logits[position], 0)[target].item())
    return paid


def own_options(folder: Path, patch: pytest.MonkeyPatch, module: str, code: str, options: dict[str, str]) -> str:
    """Write options of a user's own, `{"ffn/mine": YAML}`, and the module of their parts; the argument for them."""
    file = folder / "package" / module
    file.parent.mkdir(parents=True)
    file.write_text(code)
    patch.syspath_prepend(folder / "package")
    for option, text in options.items():
        group = option.partition("/")[0]
        (folder / "conf" / group).mkdir(parents=True, exist_ok=True)
        package = group if group == "callbacks" else f"model.{group}"
        (folder / "conf" / f"{option}.yaml").write_text(f"# @package {package}\n{text}\n")
    return f"--config-dir={folder / 'conf'}"


def killed_after(step: int, cwd: Path) -> Path:
    """A script in `cwd` that trains as train.py does, until the kernel kills each of its processes after `step`."""
    script = cwd / "killed.py"
    script.write_text(
        "import os, signal\n"
        "from llama_lab.cli import train_command\n"
        "from llama_lab.training.checkpointing import Checkpointing\n"
        "save = Checkpointing.on_train_batch_end\n"
        "def on_train_batch_end(self, trainer, *rest):\n"
        "    save(self, trainer, *rest)\n"
        f"    if trainer.global_step == {step}:\n"
        "        trainer.strategy.barrier()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "Checkpointing.on_train_batch_end = on_train_batch_end\n"
        "train_command()\n"
    )
    return script
