"""The overhead of Lightning's loop: `python -m benchmarks training`.

Trains the default model on the default batches, in turn by a bare PyTorch loop and by the Trainer with our callbacks
and metrics.csv, and prints the speed of each and the ratio of their times, round by round.
"""

import tempfile
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from llama_lab.config.components import build, build_model, model_cost
from llama_lab.data.module import TokenDataModule
from llama_lab.data.open import Dataset, open_dataset
from llama_lab.display import open_display, quiet_libraries
from llama_lab.runs.metrics import MetricsCSV
from llama_lab.timing import alternating
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.monitor import SLOW_STEPS, Monitor
from llama_lab.training.run import Run, new_run
from llama_lab.training.stop import StopRequest
from llama_lab.training.train import build_module, make_trainer

from .decoders import compose

STEPS, ROUNDS = 43, 5


def bare_loop(run: Run, dataset: Dataset) -> float:
    """Tokens per second of a plain PyTorch loop: forward, loss, backward, clip, step, schedule."""
    cfg = run.cfg
    model = build_model(cfg, dataset.index.vocab_size)
    optimizer = build(cfg.optim, "optim")(model)
    schedule = build(cfg.schedule, "schedule")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, STEPS))
    windows = dataset.train_windows(cfg.model.max_seq_len, cfg.data.seed)
    start = 0.0
    for step in range(STEPS):
        if step == SLOW_STEPS:
            start = time.perf_counter()
        inputs, targets = map(torch.from_numpy, windows.examples(step, cfg.train.batch_size))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), cfg.train.grad_clip)
        optimizer.step()
        scheduler.step()
        loss.item()
    return run.tokens_per_step * (STEPS - SLOW_STEPS) / (time.perf_counter() - start)


def lightning_loop(run: Run, dataset: Dataset) -> float:
    """Tokens per second of our Trainer, as it logs them."""
    cfg, folder = run.cfg, run.folder
    folder.checkpoint.parent.mkdir(parents=True)
    model = build_model(cfg, dataset.index.vocab_size)
    data = TokenDataModule(dataset, cfg.model.max_seq_len, cfg.train.batch_size, None, cfg.data.seed)
    with open_display(STEPS, rank=1) as display:
        monitor = Monitor(cfg.train.log_every, run.tokens_per_step, model_cost(model), None, display)
        checkpointing = Checkpointing(folder.checkpoint, STEPS, STEPS + 1, StopRequest(), monitor.stopwatch)
        module, logger = build_module(run, model, dataset.bytes_per_token), MetricsCSV(folder.metrics)
        trainer = make_trainer(run, module, [monitor, checkpointing], logger=logger, limit_val_batches=0)
        trainer.fit(module, data)
    assert monitor.speed.overall is not None
    return monitor.speed.overall


def run() -> None:
    """Run both loops in turn and print their speeds."""
    quiet_libraries()
    cfg = compose("trainer=cpu", "trainer.compile=false")
    cfg.train.tokens = STEPS * cfg.train.batch_size * cfg.model.max_seq_len
    with open_display(STEPS, rank=0) as display:
        dataset = open_dataset(cfg, display)
    slowdowns = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            cfg.runs_dir = folder
            job = new_run(cfg, "bench", "training", [], {})
            speeds = {loop: loop(job, dataset) for loop in alternating((bare_loop, lightning_loop), number)}
        bare, ours = speeds[bare_loop], speeds[lightning_loop]
        slowdowns.append(bare / ours)
        print(f"round {number + 1}: bare {bare:,.0f} tokens/s, Lightning {ours:,.0f}, {slowdowns[-1]:.3f}x")
    print(f"median over {ROUNDS} rounds: Lightning takes {median(slowdowns):.3f} times as long")
