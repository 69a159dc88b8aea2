"""The dashboards of a run: TensorBoard, W&B and Trackio."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from omegaconf import OmegaConf

from llama_lab.config.grammar import override_key
from llama_lab.config.schema import COMPONENTS, belongs
from llama_lab.devices.hardware import current_rank
from llama_lab.runs.checkpoint import load_checkpoint
from llama_lab.runs.layer_metrics import QUANTITIES, layer_metric
from llama_lab.runs.metrics import NO_ROWS, MetricsCSV
from llama_lab.runs.stored import Facts, Summary

from .logger_check import LONGEST_TAG
from .run import Run
from .trackio_run import TrackioMetrics
from .wandb_run import WandbMetrics, finish_wandb, log_model, start_wandb

UNCHARTED = ("logger", "data", "trainer")  # groups that HParams leaves out
# What it shows of a finished run, at its last token.
FINAL = (
    "val/loss",
    "val/bits_per_byte",
    "val/accuracy",
    "val/ema_loss",
    "params",
    "flops_per_token",
    "perf/tokens_per_second",
    "perf/peak_memory_bytes",
    "kv_cache/bytes_per_token",
)
# On its page "custom scalars": a line for each layer.
LAYER_CHARTS = {quantity: ["Multiline", [layer_metric(quantity, 0)[:-2]]] for quantity in QUANTITIES}


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
    """Add a finished run to TensorBoard's HParams: its name and choice per config group, and its final metrics."""
    choices = {group: option for group, option in summary.choices.items() if group not in UNCHARTED}
    arm = {"arm": summary.label, "seed": summary.seed, **choices}
    if learning_rate is not None:  # a user's optimizer may have none
        arm["optim.lr"] = learning_rate
    logger = TensorBoard(folder)
    final = {f"final/{name}": summary.metrics[name] for name in FINAL if name in summary.metrics}
    logger.log_hyperparams(arm, final | {"tokens": summary.metrics["tokens"]})
    logger.finalize("success")


def run_tags(run: Run) -> list[str]:
    """The recipe, the option of every group of the model, and the model's keys that were typed."""
    groups = [group for group in ("arch", *COMPONENTS, "size") if group in run.choices]
    keys = [o for o in run.overrides if belongs(override_key(o), ("model",))]
    return [tag[:LONGEST_TAG] for tag in (*(f"{group}={run.choices[group]}" for group in groups), *keys)]


@contextmanager
def open_loggers(run: Run, checkpoint: Path | None, facts: Facts) -> Iterator[list[Logger]]:
    """metrics.csv and the dashboards of the config, continued from the `checkpoint`; none on other ranks than 0.

    At the end of the context, W&B and Trackio learn how the run has ended.
    """
    if current_rank() != 0:
        yield []
        return
    settings, title = run.cfg.logger, run.title
    telemetry = run.cfg.train.telemetry
    table = MetricsCSV(run.folder.metrics, facts.epochs, run.cfg.model.n_layers if telemetry else 0)
    history = table.forget_after(load_checkpoint(checkpoint, list)["metrics"] if checkpoint else NO_ROWS)
    config: dict[str, Any] = {**OmegaConf.to_container(run.cfg, resolve=True), **facts.to_json()}  # type: ignore[dict-item]
    loggers: list[Logger] = [table]
    with ExitStack() as ends:
        if settings.tensorboard:
            board = TensorBoard(run.folder.path, history)
            if telemetry:
                board.experiment.add_custom_scalars({"telemetry": LAYER_CHARTS})
            loggers.append(board)
        if settings.trackio:
            trackio = TrackioMetrics(run.folder, settings.project, title, run.name, config, history)
            ends.callback(trackio.run.finish)
            loggers.append(trackio)
        if settings.wandb:
            wandb_run = start_wandb(run.folder.path, settings, title, run.name, run_tags(run), config, "train")
            ends.callback(end_wandb, run, wandb_run)
            loggers.append(WandbMetrics(wandb_run, history))
        yield loggers


def end_wandb(run: Run, wandb_run: Any) -> None:
    """Upload the model's files if the config wants that, and end the W&B run as the run has ended."""
    status = run.folder.status
    ended = status and status.status
    if ended == "done" and run.cfg.logger.artifacts:
        log_model(wandb_run, run.folder)
    finish_wandb(wandb_run, exit_code=0 if ended in ("done", "pruned") else 1)
