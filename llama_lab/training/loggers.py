"""The dashboards: TensorBoard and W&B."""

import netrc
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from omegaconf import OmegaConf

from llama_lab.config.components import override_key
from llama_lab.devices.hardware import current_rank
from llama_lab.files import replacing
from llama_lab.runs.checkpoint import checkpoint_step
from llama_lab.runs.folder import UNNAMED, WANDB_ID, belongs
from llama_lab.runs.metrics import MetricsCSV, MetricsLogger
from llama_lab.runs.stored import Facts, Summary

from .run import Run


def wandb_mode() -> str:
    """WANDB_MODE if set; else online with a key in the environment or in netrc, offline without. Never asks."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if os.environ.get("WANDB_API_KEY") or _has_netrc_entry() else "offline"


def _has_netrc_entry() -> bool:
    """Whether `wandb login` has stored a key for the server in use."""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    if not path.exists() or host is None:
        return False
    try:
        entry = netrc.netrc(path).authenticators(host)
        return entry is not None and bool(entry[2])
    except netrc.NetrcParseError as error:
        print(f"W&B stays offline: {error}")
        return False


# What HParams shows of a finished run, at its last token.
FINAL = (
    "val/loss",
    "val/bits_per_byte",
    "val/accuracy",
    "params",
    "flops_per_token",
    "perf/tokens_per_second",
    "perf/peak_memory_bytes",
    "kv_cache/bytes_per_token",
)


class TensorBoard(TensorBoardLogger):
    """Event files in `folder`/tensorboard, with tokens as the step.

    history: the rows of metrics.csv before the checkpoint that training goes on from, which take the place of all that
    was logged before. TensorBoard can also declare old events void, but finds them by the wall clock.
    """

    def __init__(self, folder: Path, history: Sequence[dict[str, float]] | None = None) -> None:
        begins = history is not None
        if begins:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        # The purge is for a TensorBoard that is running, and remembers.
        super().__init__(folder, name="", version="tensorboard", purge_step=0 if begins else None)
        for row in history or ():
            self.log_metrics(row)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log at the metrics' tokens, the x-axis of every plot."""
        super().log_metrics(metrics, int(metrics["tokens"]))


def log_hparams(folder: Path, learning_rate: float | None, summary: Summary) -> None:
    """Add a finished run to TensorBoard's HParams: its arm and choice per config group, and its final metrics."""
    choices = {group: option for group, option in summary.choices.items() if group != "logger"}
    arm = {"arm": summary.arm, "seed": summary.seed, **choices}
    if learning_rate is not None:  # a user's optimizer may have none
        arm["optim.lr"] = learning_rate
    logger = TensorBoard(folder)
    final = {f"final/{name}": summary.metrics[name] for name in FINAL if name in summary.metrics}
    logger.log_hyperparams(arm, final | {"tokens": summary.metrics["tokens"]})
    logger.finalize("success")


def start_wandb(
    folder: Path,
    project: str,
    name: str,
    group: str,
    tags: list[str],
    config: dict[str, Any],
    job_type: str = "train",
) -> Any:
    """Start or resume the W&B run of `folder`, whose id stays in `wandb_id`; returns it. Prints where it is.

    W&B cannot resume offline: there, every session starts at step 0, and of two sessions of one id the one that is
    synced later overwrites the other. So each must hold the whole run, see `WandbMetrics`.
    """
    import wandb

    mode = wandb_mode()
    id_file = folder / WANDB_ID
    if not id_file.exists():
        with replacing(id_file) as fresh:
            fresh.write_text(secrets.token_hex(4))
    run = wandb.init(
        project=project,
        name=name,
        group=group,
        job_type=job_type,
        tags=tags,
        config=config,
        dir=folder,
        id=id_file.read_text(),
        resume="allow" if mode == "online" else None,
        mode=mode,  # type: ignore[arg-type]
        settings=wandb.Settings(silent=True),
    )
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    if mode == "offline":
        print(f"W&B: offline; upload later with `wandb sync {run.settings.sync_dir}`")
    elif mode == "online":
        print(f"W&B: {run.url}")
    return run


class WandbMetrics(MetricsLogger):
    """Logs to a W&B run of `start_wandb`, whose step n is row n of metrics.csv, counted from 0.

    history: the rows before the checkpoint that training goes on from. What W&B has of these and of the rows to come is
    not sent again, so that a resumed run shows each of them once: online, that is all but what a kill kept from
    arriving; offline, nothing.
    """

    def __init__(self, run: Any, history: Sequence[dict[str, float]]) -> None:
        super().__init__()
        self.run = run
        self._next = 0
        self._missing = run.step
        for row in history:
            self.log_metrics(row)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log one row; `step` is left to W&B's own counter, since its metric of that name would be dropped."""
        if self._next >= self._missing:
            self.run.log(metrics)
        self._next += 1

    def finish(self, exit_code: int) -> None:
        """End the W&B run. Offline sessions before this one go: it holds what they do, and W&B cannot read killed ones.

        Without it the next run of this process would be merged into this one.
        """
        self.run.finish(exit_code=exit_code)
        own = Path(self.run.settings.sync_dir)
        for session in own.parent.glob(f"offline-run-*-{self.run.id}"):
            if session.name != own.name:
                shutil.rmtree(session)


def open_loggers(run: Run, checkpoint: Path | None, facts: Facts) -> list[Logger]:
    """metrics.csv and the dashboards of the config, continued from the `checkpoint`; none on other ranks than 0."""
    if current_rank() != 0:
        return []
    table = MetricsCSV(run.folder.metrics, facts.epochs)
    history = table.forget_after(checkpoint_step(checkpoint))
    loggers: list[Logger] = [table]
    if run.cfg.logger.tensorboard:
        loggers.append(TensorBoard(run.folder.path, history))
    if run.cfg.logger.wandb:
        config = {**OmegaConf.to_container(run.cfg, resolve=True), **facts.to_json()}  # type: ignore[dict-item]
        project = run.cfg.logger.wandb_project
        tags = [o[:64] for o in run.overrides if not belongs(override_key(o), UNNAMED)]  # W&B's limit
        wandb_run = start_wandb(run.folder.path, project, run.title, run.name, tags, config)
        loggers.append(WandbMetrics(wandb_run, history))
    return loggers
