"""The overhead of Lightning's loop: `python -m llama_lab.bench training`.

Trains the default model on the default batches, in turn by a bare PyTorch loop and by the Trainer with our callbacks
and metrics.csv, and prints the speed of each and the ratio of their times, round by round.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import hydra
import lightning as L
import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn

from llama_lab.config.components import CONF_DIR, build, build_model, register_resolvers
from llama_lab.data.module import TokenDataModule
from llama_lab.data.open import open_dataset
from llama_lab.data.tokens import TokenDataset
from llama_lab.data.windows import TrainWindows
from llama_lab.display import open_display, quiet_libraries
from llama_lab.model import measure_cost
from llama_lab.runs.metrics import MetricsCSV
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.module import LanguageModel
from llama_lab.training.monitor import SLOW_STEPS, Monitor
from llama_lab.training.stop import StopRequest

STEPS, ROUNDS = 43, 5


def bare_loop(cfg: DictConfig, dataset: TokenDataset) -> float:
    """Seconds per step of a plain PyTorch loop: forward, loss, backward, clip, step, schedule."""
    model = build_model(cfg, dataset.vocab_size)
    optimizer = build(cfg.optim, "optim")(model)
    schedule = build(cfg.schedule, "schedule")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, STEPS))
    windows = TrainWindows(dataset.train, cfg.model.max_seq_len, cfg.data.seed)
    start = 0.0
    for step in range(STEPS):
        if step == SLOW_STEPS:
            start = time.perf_counter()
        tokens = torch.from_numpy(windows.batch(step, cfg.train.batch_size))
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), cfg.train.grad_clip)
        optimizer.step()
        scheduler.step()
        loss.item()
    return (time.perf_counter() - start) / (STEPS - SLOW_STEPS)


def lightning_loop(cfg: DictConfig, dataset: TokenDataset) -> float:
    """Seconds per step of our Trainer, from its own tokens per second."""
    model = build_model(cfg, dataset.vocab_size)
    seq_len, batch_size = cfg.model.max_seq_len, cfg.train.batch_size
    optimizer, schedule = build(cfg.optim, "optim"), build(cfg.schedule, "schedule")
    module = LanguageModel(model, optimizer, schedule, STEPS, dataset.val_bytes, cfg.train.grad_clip)
    data = TokenDataModule(dataset, seq_len, batch_size, None, cfg.data.seed)
    with tempfile.TemporaryDirectory() as folder, open_display(STEPS, rank=1) as display:
        monitor = Monitor(cfg.train.log_every, seq_len * batch_size, measure_cost(model), None, display)
        checkpointing = Checkpointing(Path(folder) / "last.ckpt", STEPS, STEPS + 1, StopRequest(), monitor.stopwatch)
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            limit_val_batches=0,
            logger=MetricsCSV(Path(folder) / "metrics.csv"),
            callbacks=[monitor, checkpointing],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, data)
    assert monitor.speed.overall is not None
    return float(seq_len * batch_size / monitor.speed.overall)


def main() -> None:
    """Run both loops in turn and print their times."""
    quiet_libraries()
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = hydra.compose("config")
    with open_display(STEPS, rank=0) as display:
        dataset = open_dataset(cfg, display)
    loops: tuple[Callable[[], float], ...] = (partial(bare_loop, cfg, dataset), partial(lightning_loop, cfg, dataset))
    ratios = []
    for number in range(ROUNDS):
        # The order alternates, so that a slowdown of the machine affects both.
        bare, ours = (loop() for loop in loops) if number % 2 == 0 else reversed([loop() for loop in reversed(loops)])
        ratios.append(ours / bare)
        tokens = cfg.model.max_seq_len * cfg.train.batch_size
        print(
            f"round {number + 1}: bare {tokens / bare:,.0f} tokens/s, Lightning {tokens / ours:,.0f}, {ratios[-1]:.3f}x"
        )
    print(f"median over {ROUNDS} rounds: Lightning takes {statistics.median(ratios):.3f} times as long")
