"""One run, from a composed config to a finished folder."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.component_errors import report_component_errors
from llama_lab.config.components import build, build_model, check_decodes, model_cost, override_key
from llama_lab.data.module import TokenDataModule, micro_batches_per_step
from llama_lab.data.open import open_dataset
from llama_lab.data.tokenizer import TextTokenizer, encode_prompt
from llama_lab.data.tokens import TokenDataset
from llama_lab.devices.hardware import Hardware, check_started, choose_hardware, current_rank
from llama_lab.devices.site import Site
from llama_lab.devices.strategy import make_plugins, make_strategy
from llama_lab.devices.throughput import peak_flops
from llama_lab.display import open_display, quiet_libraries
from llama_lab.errors import ConfigError
from llama_lab.evaluation.lengths import check_multiples, evaluation
from llama_lab.files import discard, report_disk_errors
from llama_lab.model import Cost, Decoder, Sampling, generate
from llama_lab.model.cost import cost_metrics
from llama_lab.model.init import linear_on_meta
from llama_lab.runs.checkpoint import before, checkpoint_step, consolidate, existing, load_checkpoint, model_weights
from llama_lab.runs.environment import environment
from llama_lab.runs.folder import RESOLVED, SAMPLE, TOKENIZER, UNNAMED, RunFolder, belongs, locked
from llama_lab.runs.metrics import MetricsCSV, read_metrics
from llama_lab.runs.stored import Facts, Status, Summary

from .checkpointing import Checkpointing, InterruptedRunError
from .component_check import check_components
from .loggers import TensorBoard, WandbMetrics, log_hparams, start_wandb
from .longer_budget import warn_of_differences, with_earlier_warmup
from .module import LanguageModel
from .monitor import DivergedError, Monitor
from .schedule import steps_alike
from .stop import StopRequest

MAX_TOKENS = 1e18  # so that whatever is counted fits into 64 bits
Outcome = Literal["done", "diverged", "interrupted"]


@dataclass(frozen=True)
class Run:
    """Everything about a run that is known before it trains."""

    cfg: DictConfig
    name: str
    arm: str
    overrides: list[str]
    choices: dict[str, str]
    folder: RunFolder
    hardware: Hardware
    steps: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all devices."""
        return int(self.cfg.train.batch_size * self.cfg.model.max_seq_len)

    @property
    def title(self) -> str:
        """How people know the run."""
        return f"speeds of {self.folder.path}" if self.cfg.measure else f"{self.arm}/seed={self.cfg.seed}"


def new_run(
    cfg: DictConfig,
    name: str,
    arm: str,
    overrides: list[str],
    choices: dict[str, str],
    site: Site | None = None,
) -> Run:
    """Check all settings that need neither data, model nor folder, but for the warm-up of a run to resume.

    overrides: what was typed. choices: the option of every config group. site: where it trains; default: on this
    machine. Raises ConfigError.
    """
    steps = budget_steps(cfg, cfg.train.batch_size)
    micro_batches = cfg.train.batch_size // (cfg.train.micro_batch_size or 1)
    hardware = (site.hardware if site else choose_hardware)(cfg.trainer, micro_batches)
    micro_batches_per_step(cfg.train.batch_size, cfg.train.micro_batch_size, hardware.world_size)  # for its checks
    folder = RunFolder(Path(cfg.measure or cfg.resume or Path(cfg.runs_dir) / name / arm / f"seed={cfg.seed}"))
    if cfg.resume:
        with report_disk_errors(f"resume={cfg.resume}"):
            folder.check_files(f"resume={cfg.resume}", "restore it, or train the run again")
        cfg = with_earlier_warmup(cfg, folder, steps)
        arm_folder = folder.path.absolute().parent
        name, arm = arm_folder.parent.name, arm_folder.name
    return Run(cfg, name, arm, overrides, choices, folder, hardware, steps)


def budget_steps(cfg: DictConfig, batch_size: int) -> int:
    """The optimizer steps of `batch_size` sequences that the budget buys; raises ConfigError for a bad number."""
    for key, seed in (("seed", cfg.seed), ("data.seed", cfg.data.seed)):
        if not 0 <= seed < 2**31:
            raise ConfigError(f"{key}={seed}: must be a whole number from 0 to 2147483647")
    if cfg.model.max_seq_len < 1:
        raise ConfigError(f"model.max_seq_len={cfg.model.max_seq_len}: must be a positive whole number")
    check_train(cfg.train)
    tokens_per_step: int = batch_size * cfg.model.max_seq_len
    steps = int(cfg.train.tokens) // tokens_per_step
    if steps < 1:
        raise ConfigError(
            f"train.tokens={cfg.train.tokens:g}: must reach one step of train.batch_size x model.max_seq_len = "
            f"{tokens_per_step} tokens; raise it, or make the batch smaller"
        )
    return steps


def check_folder(run: Run) -> None:
    """Raise ConfigError unless the run may start or go on in its folder, FinishedRunError if it is there already."""
    if run.cfg.measure or current_rank() != 0:  # nothing is trained; rank 0 answers for all
        return
    run.folder.check(run.cfg, run.choices)
    if not run.cfg.resume:
        return
    trained = checkpoint_step(run.folder.checkpoint_for(run.cfg))
    if run.steps <= trained and Status.load(run.folder.path).status == "done":
        raise ConfigError(
            f"train.tokens={run.cfg.train.tokens:g}: the run has had {trained * run.tokens_per_step}; to train it "
            f"further, give more"
        )


def check_train(train: DictConfig) -> None:
    """Raise ConfigError for a number out of its range."""
    for key in ("batch_size", "evaluations", "log_every", "checkpoint_every", "micro_batch_size"):
        if train[key] is not None and train[key] < 1:
            raise ConfigError(f"train.{key}={train[key]}: must be a positive whole number")
    for key in ("tokens", "z_loss", "sample_tokens"):
        if train[key] < 0:
            raise ConfigError(f"train.{key}={train[key]}: must not be negative")
    if train.tokens > MAX_TOKENS:
        raise ConfigError(f"train.tokens={train.tokens:g}: must not exceed {MAX_TOKENS:g}; write 2e9 for two billion")
    if train.grad_clip is not None and train.grad_clip <= 0:
        raise ConfigError(f"train.grad_clip={train.grad_clip}: must be positive, or null for no clipping")
    check_multiples("train.eval_lengths", train.eval_lengths)


def train(run: Run) -> Outcome:
    """Train, evaluate, and leave a finished folder; or say how to go on. Raises ConfigError, or what went wrong."""
    with report_component_errors(), report_disk_errors(f"runs_dir={run.cfg.runs_dir}"):
        return train_on_disk(run)


def train_on_disk(run: Run) -> Outcome:
    """`train`, with errors of the disk as Python raises them."""
    check_started(run.hardware)
    check_folder(run)
    quiet_libraries()
    cfg = run.cfg
    if current_rank() == 0:
        if run.hardware.spare:
            print(spare_devices(run), file=sys.stderr)
        if cfg.resume:
            warn_of_differences(cfg, run.folder, run.steps, run.overrides)
    with open_display(run.steps, current_rank()) as display:
        dataset = open_dataset(cfg, display)
        prompt = encode_prompt("train.prompt", cfg.train.prompt, dataset.tokenizer)
        data = TokenDataModule(
            dataset, cfg.model.max_seq_len, cfg.train.batch_size, cfg.train.micro_batch_size, cfg.data.seed
        )
        with linear_on_meta(run.hardware.sharded):
            model = build_model(cfg, dataset.index.vocab_size)
        cost = model_cost(model)
        if cfg.train.sample_tokens:
            check_decodes(model, f"train.sample_tokens={cfg.train.sample_tokens}", "set this to 0")
        module = build_module(run, model, dataset.index.val.bytes)
        monitor = Monitor(
            cfg.train.log_every,
            run.tokens_per_step,
            cost,
            peak_flops(run.hardware.device_name, run.hardware.precision),
            display,
        )
        facts = run_facts(run, dataset, model, cost)
        with session(run, facts, dataset.tokenizer) as checkpoint:
            check_components(cfg, run.hardware)
            outcome = fit(run, module, data, monitor, checkpoint, facts)
            if outcome != "done" or current_rank() != 0:
                return outcome
            consolidate(run.folder.checkpoint)
            if run.hardware.sharded:
                model = build_model(cfg, dataset.index.vocab_size)
                model.load_state_dict(model_weights(load_checkpoint(run.folder.checkpoint)))
            sample = dataset.tokenizer.decode(sample_text(run, model, prompt, dataset.tokenizer.eot_id))
            (run.folder.path / SAMPLE).write_text(sample, encoding="utf-8")
            if cfg.train.eval_lengths:  # before the run counts as done, so that one that is killed here makes up for it
                found = evaluation(cfg, dataset, model, run.hardware, run.steps, cfg.train.eval_lengths)
                found.save(run.folder.path)
            finish(run, monitor, facts)
    return "done"


def spare_devices(run: Run) -> str:
    """Why the run leaves GPUs of this machine alone, in one line."""
    return (
        f"trainer.devices=auto: trains on {run.hardware.devices} of {run.hardware.devices + run.hardware.spare} GPUs, "
        f"since more cannot share train.batch_size={run.cfg.train.batch_size} with train.micro_batch_size="
        f"{'null' if run.cfg.train.micro_batch_size is None else run.cfg.train.micro_batch_size}"
    )


def build_module(run: Run, model: Decoder, val_bytes: int) -> LanguageModel:
    """The module that trains `model` as the run's config says. Raises ConfigError for a setting that cannot work."""
    cfg = run.cfg
    optimizer, schedule = build(cfg.optim, "optim"), build(cfg.schedule, "schedule")
    clip, z_loss = cfg.train.grad_clip, cfg.train.z_loss
    module = LanguageModel(model, optimizer, schedule, run.steps, val_bytes, clip, z_loss, cfg.seed)
    module.configure_optimizers()  # so that a bad setting is refused before anything is written
    return module


def run_facts(run: Run, dataset: TokenDataset, model: Decoder, cost: Cost) -> Facts:
    """What identifies a run in its folder and on dashboards."""
    kernels = sorted({mixer.kernel for mixer in model.mixers})
    first_window = torch.from_numpy(dataset.val[: model.max_seq_len].astype(int))
    return Facts(
        name=run.name,
        arm=run.arm,
        seed=run.cfg.seed,
        choices=run.choices,
        device=run.hardware.device_name,
        devices=run.hardware.world_size,
        sharded=run.hardware.sharded,
        precision=run.hardware.precision,
        attention_kernel="+".join(kernels),
        data_hash=dataset.index.data_hash,
        tokenizer_hash=dataset.index.tokenizer_hash,
        vocab_size=model.vocab_size,
        bytes_per_token=dataset.bytes_per_token,
        unigram_entropy=dataset.unigram_entropy(),
        token_to_position_ratio=token_to_position_ratio(model, first_window),
        metrics=cost_metrics(cost),
    )


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
    """Lock a run's folder while it trains, and record how that ends; yields the checkpoint to go on from, if any.

    Other ranks only see whether there is a checkpoint: rank 0 alone reads them and chooses, and `load_checkpoint` of
    the strategies passes its choice on. Raises ConfigError if another process holds the folder.
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
            with suppress(OSError):  # a disk that is full for the status, too, must not hide what went wrong
                run.folder.write_status("failed", f"{type(error).__name__}: {lines[-1] if lines else ''}")
            raise


def fit(
    run: Run,
    module: LanguageModel,
    data: TokenDataModule,
    monitor: Monitor,
    checkpoint: Path | None,
    facts: Facts,
) -> Outcome:
    """Run Lightning's loop from `checkpoint`, or from the start, to the budget; write the status of any other end."""
    cfg, folder = run.cfg, run.folder
    loggers = open_loggers(run, checkpoint, facts)
    stop = StopRequest()
    evaluate_every = math.ceil(run.steps / cfg.train.evaluations)
    checkpointing = Checkpointing(
        folder.checkpoint,
        cfg.train.checkpoint_every,
        evaluate_every,
        stop,
        monitor.stopwatch,
        steps_alike(build(cfg.schedule, "schedule"), run.steps),
    )
    trainer = make_trainer(run, module, [monitor, checkpointing], logger=loggers, val_check_interval=evaluate_every)
    outcome: Outcome | None = None
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
    else:
        outcome = "done"
    finally:
        for logger in loggers:
            if isinstance(logger, WandbMetrics):
                logger.finish(exit_code=0 if outcome == "done" else 1)
    leave_process_group()
    if current_rank() == 0 and outcome != "done":
        folder.write_status(outcome, message)
    return outcome


def make_trainer(run: Run, module: LanguageModel, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """Lightning's Trainer on the run's hardware, for its steps; compiles the module's model if the run wants it."""
    if run.cfg.trainer.compile:
        torch._dynamo.reset()  # its limit on recompilations is the process's, and later runs of a sweep would run eager
        for part in module.model.blocks if run.hardware.sharded else [module.model]:
            part.compile()  # in place, so that no name in a checkpoint changes
    return L.Trainer(
        accelerator=run.hardware.accelerator,
        devices=run.hardware.devices,
        num_nodes=run.hardware.num_nodes,
        strategy=make_strategy(run.hardware),
        plugins=make_plugins(),
        precision=run.hardware.precision,  # type: ignore[arg-type]
        max_steps=run.steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
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
    """Take the process group down, if there is one: else its threads may outlive the interpreter, which aborts then."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def open_loggers(run: Run, checkpoint: Path | None, facts: Facts) -> list[Logger]:
    """metrics.csv, and the dashboards that the config wants, to go on after the `checkpoint`. Rank 0 only."""
    if current_rank() != 0:
        return []
    table = MetricsCSV(run.folder.metrics)
    history = table.forget_after(checkpoint_step(checkpoint))
    loggers: list[Logger] = [table]
    if run.cfg.logger.tensorboard:
        loggers.append(TensorBoard(run.folder.path, history))
    if run.cfg.logger.wandb:
        config = {**OmegaConf.to_container(run.cfg, resolve=True), **facts.to_json()}  # type: ignore[dict-item]
        project = run.cfg.logger.wandb_project
        wandb_run = start_wandb(run.folder.path, project, run.title, run.name, tags(run), config)
        loggers.append(WandbMetrics(wandb_run, history))
    return loggers


def tags(run: Run) -> list[str]:
    """What makes the arm: `norm=rmsnorm`, `model.n_kv_heads=2`, within W&B's limit."""
    return [o[:64] for o in run.overrides if not belongs(override_key(o), UNNAMED)]


def finish(run: Run, monitor: Monitor, facts: Facts) -> None:
    """Write the summary, with the last value of every metric, and the status.

    The speed is that of the whole run rather than of its last interval.
    """
    metrics = dict(facts.metrics)
    for row in read_metrics(run.folder.metrics):
        metrics |= row
    metrics |= monitor.speed_metrics(monitor.speed.overall, run.hardware.world_size)
    summary = Summary(**vars(facts) | {"metrics": metrics})
    summary.save(run.folder.path)
    if run.cfg.logger.tensorboard:
        log_hparams(run.folder.path, run.cfg.optim.get("lr"), summary)
    discard(before(run.folder.checkpoint))
    run.folder.write_status("done")


def sample_text(run: Run, model: Decoder, prompt: list[int], eot_id: int) -> list[int]:
    """The prompt and what the model makes of it, as far as the context reaches; seeded by the run."""
    start = [eot_id, *prompt][: model.max_seq_len]
    length = min(run.cfg.train.sample_tokens, model.max_seq_len - len(start))
    if length == 0:  # a model that keeps no state can be asked for nothing
        return prompt
    steps = generate(model.eval(), [start], length, Sampling(temperature=0.8), seed=run.cfg.seed)
    return [*prompt, *(token for (token,) in steps if token is not None)]
