"""Training one run, from its config to a finished folder."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger

from llama_lab.config.components import build, build_model, check_decodes, model_cost, report_component_errors
from llama_lab.data.data_module import TokenDataModule
from llama_lab.data.dataset import Dataset
from llama_lab.data.open import is_probe, open_dataset
from llama_lab.data.tokenizer import TextTokenizer, encode_prompt
from llama_lab.devices.hardware import check_started, current_rank
from llama_lab.devices.memory import keep_freed_memory
from llama_lab.devices.strategy import make_plugins, make_strategy
from llama_lab.devices.throughput import peak_flops
from llama_lab.evaluation.answers import answers_text
from llama_lab.evaluation.lengths import evaluation
from llama_lab.model import Cost, Decoder, Sampling, generate
from llama_lab.model.cost import cost_metrics
from llama_lab.model.init import linear_on_meta
from llama_lab.model.recompute import recompute
from llama_lab.runs.checkpoint import before, consolidate, existing, load_checkpoint, model_weights
from llama_lab.runs.environment import environment
from llama_lab.runs.folder import RESOLVED, SAMPLE, TOKENIZER, locked
from llama_lab.runs.metrics import described, read_cells, read_metrics, with_numbers
from llama_lab.runs.stored import Facts, Summary, WarmStart
from llama_lab.util.display import open_display, quiet_libraries
from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import discard, replace_text, report_disk_errors
from llama_lab.util.formatting import conjoin

from .checkpointing import Checkpointing, InterruptedRunError, PrunedRunError
from .compiling import check_compiler, compile_in_place, compiler_failed, decide, delete_compiled
from .component_check import check_components
from .loggers import log_hparams, open_loggers
from .longer_budget import warn_of_differences
from .memory_check import check_memory
from .module import LanguageModel
from .monitor import SLOW_STEPS, DivergedError, Monitor
from .optim import check_shards
from .profile import STEPS as PROFILED
from .profile import Profile
from .run import Outcome, Run, check_folder, spare_devices
from .schedule import steps_alike
from .stop import StopRequest
from .telemetry import Telemetry
from .warm_start import describe, warm_start


def train(run: Run) -> Outcome:
    """Train, evaluate, and leave a finished folder; or say how to go on. Raises ConfigError, or what went wrong."""
    try:
        with report_component_errors(), report_disk_errors(f"runs_dir={run.cfg.runs_dir}"):
            try:
                return train_on_disk(run)
            except Exception as error:
                if run.hardware.world_size > 1 or not compiler_failed(error):
                    raise
                print(f"trainer.compile: {first_line(error)}; tries again without {delete_compiled()}", file=sys.stderr)
            return train_on_disk(run)
    except FileNotFoundError as error:
        if run.folder.path.exists():
            raise
        if not run.folder.path.parent.exists():  # in /proc, say
            raise ConfigError(
                f"runs_dir={run.cfg.runs_dir}: {error.strerror}: {error.filename}; choose another folder"
            ) from error
        raise ConfigError(
            f"{run.folder.path}: was moved or deleted while it trained; put it back, and run the same command again"
        ) from error


def train_on_disk(run: Run) -> Outcome:
    """`train`, which raises disk errors as OSError."""
    check_started(run.hardware)
    check_folder(run)
    run = as_begun(run)
    if run.compiled:
        check_compiler(run.hardware)
    quiet_libraries()
    cfg = run.cfg
    if current_rank() == 0:
        if run.hardware.spare:
            print(spare_devices(run), file=sys.stderr)
        if cfg.resume:
            warn_of_differences(cfg, run.folder, run.steps, run.overrides)
    with open_display(run.steps, current_rank()) as display:
        dataset = open_dataset(cfg, display, run.folder.revisions)
        prompt = encode_prompt("train.prompt", cfg.train.prompt, dataset.tokenizer)
        data = TokenDataModule(
            dataset, cfg.model.max_seq_len, cfg.train.batch_size, cfg.train.micro_batch_size, cfg.data.seed
        )
        with torch.device("meta"):
            outline = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
        check_memory(run, outline)
        with linear_on_meta(run.hardware.sharded and not cfg.init_from):
            model = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
        cost = model_cost(model)
        start = warm_start(cfg, run.folder, model, dataset)
        if cfg.trainer.compile == "auto":
            run = run.with_compile(decide(run.flops(cost), run.hardware))
        if cfg.train.sample_tokens and not is_probe(cfg):
            check_decodes(model, f"train.sample_tokens={cfg.train.sample_tokens}", "set this to 0")
        module = build_module(run, model, dataset.bytes_per_token)
        facts = run_facts(run, dataset, model, cost, start)
        if facts.epochs:
            display.print_line(describe_epochs(facts.epochs))
        monitor = Monitor(
            cfg.train.log_every,
            run.tokens_per_step,
            cost,
            peak_flops(run.hardware.device_name, run.hardware.precision),
            display,
            slow_steps=SLOW_STEPS + PROFILED if cfg.trainer.profile else SLOW_STEPS,
            parts=facts.epochs,
        )
        with session(run, facts, dataset.tokenizer) as checkpoint:
            if start and not checkpoint and current_rank() == 0:
                start.save(run.folder.path)
                for line in describe(start):
                    display.print_line(line)
            check_components(cfg, run.hardware)
            with open_loggers(run, checkpoint, facts) as loggers:
                outcome = fit(run, module, data, monitor, checkpoint, loggers)
                if outcome != "done" or current_rank() != 0:
                    return outcome
                consolidate(run.folder.checkpoint)
                if run.hardware.sharded:
                    model = build_model(cfg, dataset.index.vocab_size, dataset.tokenizer.eot_id)
                    model.load_state_dict(model_weights(load_checkpoint(run.folder.checkpoint)))
                if is_probe(cfg):
                    model.to(run.hardware.torch_device).eval()
                    sample = answers_text(model, dataset, cfg.train.sample_tokens, Sampling(temperature=0), cfg.seed)
                else:
                    sample = dataset.tokenizer.decode(sample_text(run, model, prompt, dataset.tokenizer.eot_id))
                replace_text(run.folder.path / SAMPLE, sample)
                if cfg.train.eval_lengths:  # before the status `done`, so that a run that is killed here does it again
                    found = evaluation(cfg, dataset, model, run.hardware, run.steps, cfg.train.eval_lengths)
                    found.save(run.folder.path)
                finish(run, monitor, facts)
    return "done"


def as_begun(run: Run) -> Run:
    """The run with `trainer.compile=auto` as it was decided when it began, if it goes on."""
    if run.cfg.trainer.compile != "auto" or run.cfg.overwrite:
        return run
    begun = run.folder.compiled
    return run if begun is None else run.with_compile(begun)


def build_module(run: Run, model: Decoder, bytes_per_token: float) -> LanguageModel:
    """The module that trains `model` as the run's config says. Raises ConfigError for a setting that cannot work."""
    cfg = run.cfg
    if run.hardware.sharded:
        check_shards(cfg.optim._target_)
    recompute(model, cfg.train.recompute)
    optimizer, schedule = build(cfg.optim, "optim"), build(cfg.schedule, "schedule")
    clip, z_loss, ema = cfg.train.grad_clip, cfg.train.z_loss, cfg.train.ema
    module = LanguageModel(
        model, optimizer, schedule, run.steps, bytes_per_token, clip, z_loss, cfg.seed, is_probe(cfg), ema
    )
    module.configure_optimizers()  # so that a bad setting is refused before anything is written
    return module


def run_facts(run: Run, dataset: Dataset, model: Decoder, cost: Cost, start: WarmStart | None = None) -> Facts:
    """What identifies a run in its folder and on dashboards."""
    kernels = sorted({mixer.kernel for mixer in model.mixers})
    first_window = torch.from_numpy(dataset.val_windows(model.max_seq_len)[0][0])
    return Facts(
        name=run.name,
        arm=run.arm,
        label=run.label,
        seed=run.cfg.seed,
        choices=run.choices,
        device=run.hardware.device_name,
        devices=run.hardware.world_size,
        sharded=run.hardware.sharded,
        precision=run.hardware.precision,
        attention_kernel="+".join(kernels),
        compiled=run.compiled,
        data_hash=dataset.index.data_hash,
        tokenizer_hash=dataset.index.tokenizer_hash,
        vocab_size=model.vocab_size,
        init_hash=start.hash if start else "",
        bytes_per_token=dataset.bytes_per_token,
        unigram_entropy=dataset.unigram_entropy(),
        entropy_floor=dataset.entropy_floor,
        revisions=dict(dataset.index.revisions),
        epochs=dataset.epochs(model.max_seq_len, run.steps * run.cfg.train.batch_size),
        token_to_position_ratio=token_to_position_ratio(model, first_window),
        metrics=cost_metrics(cost),
    )


def describe_epochs(epochs: dict[str, float]) -> str:
    """How often a run reads each part of a mixture, in one line."""
    read = (f"{name} {times:.2g} times{', so repeats it' * (times > 1)}" for name, times in epochs.items())
    return f"data.mix: reads {conjoin([*read])}"


@torch.no_grad()
def token_to_position_ratio(model: Decoder, tokens: torch.Tensor) -> float | None:
    """Size of the token signal over that of the position signal at step 0; None where positions are not added.

    Far below 1, positions drown the tokens, and what looks like a bad position encoding is a bad start.
    """
    x = model.embedding(tokens[None])
    added = model.position.embed(x, torch.arange(len(tokens))) - x
    return float(x.norm() / added.norm()) if added.any() else None


@contextmanager
def session(run: Run, facts: Facts, tokenizer: TextTokenizer) -> Iterator[Path | None]:
    """Lock a run's folder while it trains, and record how that ends; yields the checkpoint to resume from, if any.

    Other ranks only check whether there is one: rank 0 alone reads the checkpoints and chooses, and `load_checkpoint`
    of the strategies broadcasts its choice. Raises ConfigError if another process is training in the folder.
    """
    if current_rank() != 0:
        goes_on = not run.cfg.overwrite and (run.folder.path / RESOLVED).exists()
        yield next(iter(existing(run.folder.checkpoint)), None) if goes_on else None
        return
    with locked(run.folder.path):
        checkpoint = run.folder.begin(run.cfg, run.overrides, environment(facts))
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
    loggers: list[Logger],
) -> Outcome:
    """Run Lightning's loop from `checkpoint`, or the start, to the end of the budget; else write the status."""
    cfg, folder = run.cfg, run.folder
    stop = StopRequest(folder.prune_request)
    evaluate_every = math.ceil(run.steps / cfg.train.evaluations)
    checkpointing = Checkpointing(
        folder.checkpoint,
        cfg.train.checkpoint_every,
        evaluate_every,
        stop,
        monitor.stopwatch,
        steps_alike(build(cfg.schedule, "schedule"), run.steps),
    )
    profiled = [Profile(folder.path, monitor.stopwatch)] if cfg.trainer.profile and current_rank() == 0 else []
    watching = [Telemetry(monitor)] if cfg.train.telemetry else []
    callbacks = [*profiled, *watching, monitor, checkpointing]
    trainer = make_trainer(run, module, callbacks, logger=loggers, val_check_interval=evaluate_every)
    outcome: Outcome
    try:
        with stop.listening():
            trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
        rows = read_metrics(folder.metrics) if current_rank() == 0 else []
        # Now, or before it was killed, for instance in its sample.
        evaluated = any(row["step"] == run.steps and "val/loss" in row for row in rows)
        if not trainer.strategy.broadcast(evaluated):
            trainer.validate(module, data, verbose=False)
    except DivergedError as error:
        outcome, message = "diverged", str(error)
    except InterruptedRunError:
        outcome, message = "interrupted", f"stopped by the user at step {trainer.global_step} of {run.steps}"
    except PrunedRunError:
        outcome, message = "pruned", f"stopped by the search at step {trainer.global_step} of {run.steps}"
    else:
        outcome = "done"
    leave_process_group()
    if current_rank() == 0 and outcome != "done":
        folder.write_status(outcome, message)
    return outcome


def make_trainer(run: Run, module: LanguageModel, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """Lightning's Trainer on the run's hardware, for its steps; compiles the module's model if the run wants it."""
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
    """Destroy the process group, if there is one: its threads may outlive the interpreter, which would abort."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def finish(run: Run, monitor: Monitor, facts: Facts) -> None:
    """Write the summary, with the last value of every metric, and the status.

    The speed is that of the whole run rather than of its last interval.
    """
    metrics = dict(facts.metrics)
    rows = read_cells(run.folder.metrics)
    for row in with_numbers(rows):
        metrics |= row
    metrics |= monitor.speed_metrics(monitor.speed.overall, run.hardware.world_size)
    if run.compiled and monitor.warm_up_seconds is not None:
        metrics["perf/compile_seconds"] = monitor.warm_up_seconds
    summary = Summary(**vars(facts) | {"metrics": metrics}, rows=described(rows)["checksum"])
    summary.save(run.folder.path)
    if run.cfg.logger.tensorboard:
        log_hparams(run.folder.path, run.cfg.optim.get("lr"), summary)
    discard(before(run.folder.checkpoint))
    run.folder.write_status("done")


def sample_text(run: Run, model: Decoder, prompt: list[int], eot_id: int) -> list[int]:
    """The prompt and the model's continuation, within its context; seeded by the run."""
    start = [eot_id, *prompt][: model.max_seq_len]
    length = min(run.cfg.train.sample_tokens, model.max_seq_len - len(start))
    if length == 0:  # a model without a state cannot generate
        return prompt
    model.to(run.hardware.torch_device).eval()  # Lightning has moved it to the CPU, slow for a large one
    steps = generate(model, [start], length, Sampling(temperature=0.8), seed=run.cfg.seed)
    with torch.compiler.set_stance("force_eager"):  # a text has a shape for each of its tokens
        return [*prompt, *(token for (token,) in steps if token is not None)]
