"""Measure the speeds of a study's arms in alternation, after its runs.

The speeds that runs log are measured at different times, on a machine that may be busy with other work.
"""

import copy
import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import OmegaConf

from llama_lab.config.components import build_model
from llama_lab.config.trust import Trust, stored_config
from llama_lab.data.batch_size import micro_batches_per_step
from llama_lab.data.data_module import open_data_module
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import is_probe, open_dataset, read_by
from llama_lab.devices.hardware import check_started, current_rank
from llama_lab.devices.performance import peak_memory_bytes, reset_peak_memory, synchronize
from llama_lab.evaluation.evaluate import place
from llama_lab.evaluation.speed import NEW_TOKENS, alternating, decoding, reading, time_in_turn
from llama_lab.runs.folder import RESOLVED, RunFolder
from llama_lab.runs.study import BATCH, ArmSpeed, Study, StudySpeed
from llama_lab.runs.study import FILE as STUDY
from llama_lab.training.assemble import build_module
from llama_lab.training.compiling import check_compiler
from llama_lab.training.monitor import SLOW_STEPS
from llama_lab.training.run import Run
from llama_lab.training.train import leave_process_group, make_trainer
from llama_lab.util.display import open_display, quiet_libraries
from llama_lab.util.errors import ConfigError

ROUNDS = 5
STEPS = 3  # timed training steps per round


def measure_study(measuring: Run) -> None:
    """Measure the arms of the study that `measuring` names by its key `measure`, on its hardware, and write speed.json.

    Runs on every rank. Raises ConfigError, and KeyboardInterrupt at Ctrl-C.
    """
    check_started(measuring.hardware)
    quiet_libraries()
    folder = measuring.folder.path
    if not (folder / STUDY).exists():
        raise ConfigError(f"measure={folder}: holds no study; name the folder of one, such as runs/ladder")
    runs = {}
    for arm in Study.load(folder).arms:
        judged = [folder / member.folder for member in arm.judged]
        if done := [run for run in judged if (now := RunFolder(run).status) and now.status == "done"]:
            runs[arm.name] = timed_run(done[0], measuring)
    if not runs:
        raise ConfigError(f"measure={folder}: none of its arms has a finished run; train it first")
    with open_display(steps=1, rank=current_rank()) as display:
        dataset = open_dataset(next(iter(runs.values())).cfg, display)
    try:
        arms = measure_in_turn(runs, dataset)
    except SystemExit:  # Lightning raises it on Ctrl-C
        raise KeyboardInterrupt from None
    leave_process_group()
    if current_rank() == 0:
        here, threads = next(iter(runs.values())).hardware, torch.get_num_threads()
        StudySpeed(here.device_name, here.world_size, here.precision, threads, torch.__version__, arms).save(folder)


def timed_run(run: Path, measuring: Run) -> Run:
    """The run in a folder, to be timed on the hardware of `measuring`, in its precision and compiled as it was.

    Unless `measuring` says otherwise. Raises ConfigError for targets that are not trusted.
    """
    cfg = stored_config(run / RESOLVED)
    trust = Trust.of_command(tuple(measuring.cfg.trust))
    trust.check(cfg, f"measure={measuring.cfg.measure}: {run / RESOLVED}", lambda package: f"trust=[{package}]")
    compiled = RunFolder(run).compiled if measuring.cfg.trainer.compile == "auto" else measuring.compiled
    if compiled:
        check_compiler(measuring.hardware)
    cfg.trainer = measuring.cfg.trainer.copy()
    cfg.trainer.compile = compiled
    if not is_probe(cfg):
        cfg.data.cache_dir = measuring.cfg.data.cache_dir
    train, world_size = cfg.train, measuring.hardware.world_size
    micro_batches_per_step(train.batch_size, train.micro_batch_size, world_size)  # its checks
    trained, hardware = RunFolder(run).environment, measuring.hardware
    if measuring.cfg.trainer.precision == "auto":
        hardware = hardware.as_trained(trained.device, trained.precision)
    return replace(measuring, cfg=cfg, steps=SLOW_STEPS + STEPS, hardware=hardware)


def measure_in_turn(runs: Mapping[str, Run], dataset: Dataset) -> dict[str, ArmSpeed]:
    """Measure every arm once per round (arms that differ in budget only count as one); decoding on rank 0."""
    first: dict[str, str] = {}  # arm by settings
    alike = {name: first.setdefault(settings_but_budget(run), name) for name, run in runs.items()}
    arms = {name: ArmSpeed([], []) for name in first.values()}
    for number in range(ROUNDS):
        for name in alternating(arms, number):  # a slowdown affects all arms
            found, device = arms[name], runs[name].hardware.torch_device
            if device.type == "cuda":
                gc.collect()  # what the arm before left in cycles of references
                reset_peak_memory(device)
            found.train.append(training_speed(runs[name], dataset))
            if device.type == "cuda":
                found.memory.append(peak_memory_bytes(device))
            if current_rank() == 0:
                for kind, speed in generation_speeds(runs[name], dataset).items():
                    getattr(found, kind).append(speed)
        if current_rank() == 0:
            print(f"measuring the speed of {len(arms)} arms in turn: round {number + 1} of {ROUNDS}", flush=True)
    return {name: arms[one] for name, one in alike.items()}


def settings_but_budget(run: Run) -> str:
    """The config of a run as text, without its name and how long it trains."""
    cfg = copy.deepcopy(run.cfg)
    cfg.arm = cfg.train.tokens = None
    return OmegaConf.to_yaml(cfg)


def training_speed(run: Run, dataset: Dataset) -> float:
    """Training tokens per second over all devices: the median of `STEPS` steps after a warm-up."""
    ends: list[float] = []  # of the optimizer steps, until the device has done them; the first is the start of training

    def note(trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        synchronize(module.device)
        ends.append(time.perf_counter())

    train_bare(run, dataset, LambdaCallback(on_train_start=note, on_train_batch_end=note))
    return run.tokens_per_step / median(end - start for start, end in list(pairwise(ends))[SLOW_STEPS:])


def train_bare(run: Run, dataset: Dataset, callback: L.Callback) -> None:
    """Train the steps of a run, and leave nothing."""
    cfg, dataset = run.cfg, read_by(run.cfg, dataset)
    model = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
    module = build_module(run, model, dataset.bytes_per_token)
    trainer = make_trainer(run, module, [callback], logger=False, limit_val_batches=0)
    trainer.fit(module, open_data_module(cfg, dataset))


def generation_speeds(run: Run, dataset: Dataset) -> dict[str, float]:
    """Tokens per second by field of ArmSpeed, not compiled: decoding at the end of the context, and reading all of it.

    With the KV cache; none for a model that cannot decode with one.
    """
    dataset = read_by(run.cfg, dataset)
    model = place(build_model(run.cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id), run.hardware)
    if not model.decodes:
        return {}
    context = model.max_seq_len
    new_tokens = min(NEW_TOKENS, context)
    parts = {
        "decode": decoding(model, 1, context, new_tokens),
        "decode_batch": decoding(model, BATCH, context, new_tokens),
        "prefill": reading(model, 1, context),
    }
    timed = time_in_turn(parts, rounds=1)
    tokens = {"decode": new_tokens, "decode_batch": BATCH * new_tokens, "prefill": context}
    return {kind: n / timed[kind].median for kind, n in tokens.items()}
