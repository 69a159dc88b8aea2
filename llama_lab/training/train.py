"""Training one run, from its config to a finished folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch

from llama_lab.config.components import build_model, check_decodes, model_cost
from llama_lab.data.data_module import TokenDataModule, open_data_module
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import has_answers, open_dataset
from llama_lab.data.tokenizer import TextTokenizer, encode_prompt
from llama_lab.devices.hardware import current_rank
from llama_lab.devices.performance import keep_freed_memory
from llama_lab.devices.strategy import make_plugins, make_strategy
from llama_lab.model import Decoder
from llama_lab.model.init import linear_on_meta
from llama_lab.runs.checkpoint import existing
from llama_lab.runs.environment import environment
from llama_lab.runs.folder import RESOLVED, TOKENIZER, locked
from llama_lab.runs.metrics import read_metrics
from llama_lab.runs.stored import PROGRESS, RunMetadata, WarmStart
from llama_lab.util.display import open_display

from .assemble import build_module
from .checkpointing import Checkpointing
from .compiling import compile_in_place, decide
from .loggers import open_loggers
from .model_check import check_components, check_memory
from .module import LanguageModel
from .monitor import Monitor, TrainerLogger
from .recording import finish, run_metadata
from .run import Run
from .stop import EndedError, Outcome, StopRequest


def train(
    run: Run, initialize: Callable[[Decoder, Dataset], WarmStart] | None = None, callbacks: Sequence[L.Callback] = ()
) -> Outcome:
    """Train and evaluate a run; leaves a finished folder, or one to resume from.

    initialize: copies trained weights into the new model, and returns a record of it; None: train from scratch.
    """
    cfg, is_first = run.cfg, current_rank() == 0
    with open_display(run.steps, current_rank(), PROGRESS) as display:
        dataset = open_dataset(cfg, display, run.folder.environment.revisions)
        prompt = encode_prompt("train.prompt", cfg.train.prompt, dataset.tokenizer)
        data = open_data_module(cfg, dataset)
        model = new_model(run, dataset)
        cost = model_cost(model)
        start = initialize(model, dataset) if initialize else None
        if cfg.trainer.compile == "auto":
            run = run.with_compile(decide(run.flops(cost), run.hardware))
        module = build_module(run, model, dataset.bytes_per_token)
        metadata = run_metadata(run, dataset, model, cost, start)
        if run.hardware.why:
            display.print_line(run.hardware.why)
        if cfg.get("size", {}).get("init_std") == cfg.model.init.get("std", 0.0):
            display.print_line(
                f"init: {cfg.model.init.std:.3g} by width, as the lab's sizes have it; published ones: 0.02"
            )
        for part, n in dataset.epochs(model.max_seq_len, run.sequences).items():
            if part or n > 1:
                display.print_line(f"data: reads {part or 'the text'} {n:.3g} times{', so repeats it' * (n > 1)}")
        monitor = Monitor(run, cost, display, metadata.epochs)
        with session(run, metadata, dataset.tokenizer) as checkpoint:
            if start and is_first and not checkpoint:
                start.save(run.folder.path)
                for line in start.describe():
                    display.print_line(line)
            check_components(cfg, run.hardware)
            with open_loggers(run, checkpoint, metadata) as monitor.loggers:
                outcome = fit(run, module, data, monitor, checkpoint, callbacks)
                if outcome == "done" and is_first:
                    finish(run, model, dataset, prompt, metadata, monitor)
    return outcome


def new_model(run: Run, dataset: Dataset) -> Decoder:
    """The initialised decoder of a run. Raises ConfigError if it does not fit into memory, or cannot decode."""
    cfg, vocab = run.cfg, (dataset.index.vocab_size, dataset.tokenizer.eot_id)
    with torch.device("meta"):
        check_memory(run, build_model(cfg, *vocab))
    with linear_on_meta(run.hardware.sharded and not cfg.init_from):
        model: Decoder = build_model(cfg, *vocab)
    if cfg.train.sample_tokens and not has_answers(cfg):
        check_decodes(model, f"train.sample_tokens={cfg.train.sample_tokens}", "set this to 0")
    return model


@contextmanager
def session(run: Run, metadata: RunMetadata, tokenizer: TextTokenizer) -> Iterator[Path | None]:
    """Lock the folder during training, and record the outcome; yields the checkpoint to resume from, if any.

    Rank 0 reads the checkpoints and chooses; the strategies' `load_checkpoint` broadcasts its choice, and other ranks
    only check whether there is one. Raises ConfigError if another process is training in the folder.
    """
    if current_rank() != 0:
        goes_on = not run.cfg.overwrite and (run.folder.path / RESOLVED).exists()
        yield next(iter(existing(run.folder.checkpoint)), None) if goes_on else None
        return
    with locked(run.folder.path):
        checkpoint = run.folder.begin(run.cfg, run.overrides, environment(metadata))
        tokenizer.save(run.folder.path / TOKENIZER)
        try:
            yield checkpoint
        except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
            run.folder.write_status("interrupted", "stopped by the user between two checkpoints")
            raise KeyboardInterrupt from None
        except BaseException as error:
            lines = str(error).strip().splitlines()
            with suppress(OSError):  # of a full disk, which must not hide the error
                run.folder.write_status("failed", f"{type(error).__name__}: {lines[-1] if lines else ''}")
            raise


def fit(
    run: Run,
    module: LanguageModel,
    data: TokenDataModule,
    monitor: Monitor,
    checkpoint: Path | None,
    callbacks: Sequence[L.Callback],
) -> Outcome:
    """Run Lightning's loop from `checkpoint` or the start; if it ends early, write the status."""
    folder = run.folder
    stop = StopRequest(folder.prune_request)
    every = [*callbacks, monitor, Checkpointing(run, stop)]
    trainer = make_trainer(run, module, every, logger=TrainerLogger(monitor), val_check_interval=run.evaluate_every)
    outcome: Outcome = "done"
    try:
        with stop.listening():
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        if trainer.global_step < run.steps:  # not seen by Checkpointing: asked before the first step, or after its hook
            raise EndedError("interrupted", f"stopped by a callback at step {trainer.global_step} of {run.steps}")
        rows = read_metrics(folder.metrics) if current_rank() == 0 else []
        # Now, or before it was killed, for instance in its sample.
        evaluated = any(row["step"] == run.steps and "val/loss" in row for row in rows)
        if not trainer.strategy.broadcast(evaluated):
            trainer.validate(module, data, verbose=False)
    except EndedError as end:
        outcome = end.outcome
        if current_rank() == 0:
            folder.write_status(outcome, str(end))
    leave_process_group()
    return outcome


def make_trainer(run: Run, module: LanguageModel, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """Lightning's Trainer on the run's hardware, for its steps; compiles the model if the run says so."""
    if run.hardware.accelerator == "cpu":
        keep_freed_memory()
    if run.compiled:
        compile_in_place(module.model)
    return L.Trainer(
        accelerator=run.hardware.accelerator,
        devices=run.hardware.devices,
        num_nodes=run.hardware.num_nodes,
        strategy=make_strategy(run.hardware),
        plugins=make_plugins(),
        precision=run.hardware.precision,  # type: ignore[arg-type]
        max_steps=run.steps,
        check_val_every_n_epoch=None,
        # Trained weights are evaluated before the first step, all of the validation set; not when a run goes on.
        num_sanity_val_steps=-1 if run.cfg.get("init_from") else 0,
        log_every_n_steps=run.cfg.train.log_every,
        use_distributed_sampler=False,
        callbacks=callbacks,
        default_root_dir=run.folder.path,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=not run.hardware.sharded,  # which would leave gathered weights that no gradient can pass
        **settings,
    )


def leave_process_group() -> None:
    """Destroy the process group, if any: its threads may outlive the interpreter, which would then abort."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
