"""A run before training: config, folder, hardware and number of steps, all checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import of_layers
from llama_lab.data.batch_size import micro_batches_per_step
from llama_lab.devices.hardware import Hardware, choose_hardware
from llama_lab.evaluation.lengths import check_multiples
from llama_lab.model import Cost
from llama_lab.model.init import KV_HEADS
from llama_lab.model.recompute import PARTS
from llama_lab.runs.folder import RESOLVED, RunFolder
from llama_lab.runs.stored import Environment
from llama_lab.util.errors import ConfigError, require_positive
from llama_lab.util.files import report_disk_errors

from .schedule import part_of

MAX_TOKENS = 1e18  # so that whatever is counted fits into 64 bits


@dataclass(frozen=True)
class Run:
    """Everything known about a run before it trains. label: the arm's short name, see `short_name`."""

    cfg: DictConfig
    name: str
    arm: str
    label: str
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
    def sequences(self) -> int:
        """Training sequences of the whole budget, over all devices."""
        return int(self.steps * self.cfg.train.batch_size)

    @property
    def evaluate_every(self) -> int:
        """Optimizer steps from one evaluation to the next."""
        evaluations: int = self.cfg.train.evaluations
        return math.ceil(self.steps / evaluations)

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled; False while `auto` is undecided."""
        return self.cfg.trainer.compile is True

    def with_compile(self, decision: bool) -> "Run":
        """The run with `trainer.compile=auto` resolved, as resolved.yaml records it."""
        cfg = self.cfg.copy()
        cfg.trainer.compile = decision
        return replace(self, cfg=cfg)

    def flops(self, cost: Cost) -> float:
        """Training FLOPs of the whole budget, over all devices, for a model of this cost."""
        return self.steps * self.tokens_per_step * cost.train_flops_per_token

    @property
    def title(self) -> str:
        """The name of the run on dashboards and in a queue."""
        return f"speeds of {self.folder.path}" if self.cfg.measure else f"{self.label}/seed={self.cfg.seed}"


def new_run(
    cfg: DictConfig,
    name: str,
    arm: str,
    overrides: list[str],
    choices: dict[str, str],
    choose: Callable[[DictConfig, int, int], Hardware] | None = None,
    label: str | None = None,
) -> Run:
    """Check all settings that need neither data, model nor folder, except the warm-up of a resumed run.

    overrides: what was typed. choices: the option of every config group. choose: finds its hardware; default: that of
    this machine. label: default: the arm, or of a run to resume what it was called. Raises ConfigError.
    """
    check_numbers(cfg)
    steps = budget_steps(cfg)
    micro_batches = cfg.train.batch_size // (cfg.train.micro_batch_size or 1)
    folder = RunFolder(Path(cfg.measure or cfg.resume or Path(cfg.runs_dir) / name / arm / f"seed={cfg.seed}"))
    with report_disk_errors(f"resume={cfg.resume}" if cfg.resume else f"runs_dir={cfg.runs_dir}"):
        begun = Environment() if cfg.overwrite else folder.environment
    trainer = cfg.trainer  # whose precision is that of the run's earlier sessions, if it leaves that open
    if trainer.precision == "auto" and begun.precision:
        trainer = OmegaConf.merge(trainer, {"precision": begun.precision})
    hardware = (choose or choose_hardware)(trainer, cfg.model.dim, micro_batches)
    check_small_updates(cfg, hardware.precision)
    micro_batches_per_step(cfg.train.batch_size, cfg.train.micro_batch_size, hardware.world_size)  # for its checks
    if cfg.resume:
        label = begun.label
        cfg = with_earlier_warmup(cfg, folder, steps)
        arm_folder = folder.path.absolute().parent
        name, arm = arm_folder.parent.name, arm_folder.name
    return Run(cfg, name, arm, label or arm, overrides, choices, folder, hardware, steps)


def budget_steps(cfg: DictConfig, batch_size: int | None = None) -> int:
    """Number of optimizer steps within the token budget. Raises ConfigError for a budget below one step.

    batch_size: default: the config's.
    """
    tokens_per_step: int = (batch_size or cfg.train.batch_size) * cfg.model.max_seq_len
    steps = int(cfg.train.tokens) // tokens_per_step
    if steps < 1:
        raise ConfigError(
            f"train.tokens={cfg.train.tokens:g}: must reach one step of train.batch_size x model.max_seq_len = "
            f"{tokens_per_step} tokens; raise it, or make the batch smaller"
        )
    return steps


def with_earlier_warmup(cfg: DictConfig, folder: RunFolder, steps: int) -> DictConfig:
    """`cfg` with the warm-up steps of the run in `folder`, as a fraction of the new budget of `steps`.

    So it continues as if the budget had been larger from the start: with `constant` at every step, and with `wsd` from
    the checkpoint before its decay.
    """
    if not (folder.path / RESOLVED).exists():
        return cfg
    earlier = folder.config()
    if not {"warmup"} <= cfg.schedule.keys() & earlier.schedule.keys():
        return cfg
    before, warmup = budget_steps(earlier), earlier.schedule.warmup
    cfg = cfg.copy()
    cfg.schedule.warmup = warmup if steps == before else min(1.0, part_of(before, "warmup", warmup) / steps)
    return cfg


def check_numbers(cfg: DictConfig) -> None:
    """Raise ConfigError for numbers out of range, and invalid settings of `init_from`."""
    train, heads = cfg.train, cfg.init_kv_heads
    for key, seed in (("seed", cfg.seed), ("data.seed", cfg.data.seed)):
        if not 0 <= seed < 2**31:
            raise ConfigError(f"{key}={seed}: must be a whole number from 0 to 2147483647")
    require_positive("model.max_seq_len", cfg.model.max_seq_len)
    for key in ("batch_size", "evaluations", "log_every", "checkpoint_every", "micro_batch_size"):
        require_positive(f"train.{key}", train[key])
    for key in ("tokens", "z_loss", "sample_tokens"):
        if train[key] < 0:
            raise ConfigError(f"train.{key}={train[key]}: must not be negative")
    if train.tokens > MAX_TOKENS:
        raise ConfigError(f"train.tokens={train.tokens:g}: must not exceed {MAX_TOKENS:g}; write 2e9 for two billion")
    if train.grad_clip is not None and train.grad_clip <= 0:
        raise ConfigError(f"train.grad_clip={train.grad_clip}: must be positive, or null for no clipping")
    if train.label_smoothing is not None and not 0 < train.label_smoothing < 1:
        problem = "must be more than 0 and less than 1, such as 0.1; null smooths none"
        raise ConfigError(f"train.label_smoothing={train.label_smoothing}: {problem}")
    if train.recompute not in PARTS:
        raise ConfigError(f"train.recompute={train.recompute}: unknown; choose {' | '.join(PARTS)}")
    if train.ema is not None and not 0 <= train.ema < 1:
        raise ConfigError(
            f"train.ema={train.ema}: must be at least 0 and less than 1, such as 0.99; null keeps no average"
        )
    check_multiples("train.eval_lengths", train.eval_lengths)
    if heads is not None and not cfg.init_from:
        raise ConfigError(f"init_kv_heads={heads}: pools the heads of trained weights; add init_from=, or leave it out")
    if cfg.init_experts is not None and not cfg.init_from:
        raise ConfigError(f"init_experts={cfg.init_experts}: is for trained weights; add init_from=, or leave it out")
    if heads not in (None, *KV_HEADS):
        raise ConfigError(f"init_kv_heads={heads}: unknown; choose {' | '.join(KV_HEADS)}, or null for mean")


def check_small_updates(cfg: DictConfig, precision: str) -> None:
    """Raise ConfigError for what is updated in steps that 16 bits round to zero."""
    settings = [("train.ema", cfg.train.ema)]
    settings += [("model.ffn.balance_bias", ffn.get("balance_bias")) for ffn in of_layers(cfg.model, "ffn")]
    for key, value in settings:
        if value is not None and precision == "bf16-true":
            problem = "its updates round to zero in 16 bits; set trainer.precision=bf16-mixed, or leave it out"
            raise ConfigError(f"{key}={value}: {problem}")
