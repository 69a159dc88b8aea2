"""Where the rows of a run go: metrics.csv, TensorBoard, W&B and Trackio."""

import csv
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.grammar import override_key, override_value, settled_keys
from llama_lab.config.schema import COMPONENTS, UNNAMED, belongs
from llama_lab.devices.hardware import current_rank
from llama_lab.runs.checkpoint import load_checkpoint
from llama_lab.runs.folder import OVERRIDES, RESOLVED, TOKENIZER, TRACKIO_ID, WANDB_ID, RunFolder
from llama_lab.runs.metrics import METRICS_CSV, NO_ROWS, Cells, Rows, described, read_cells, with_numbers
from llama_lab.runs.stored import (
    COLUMNS,
    CONSTANT,
    FINAL,
    QUANTITIES,
    Environment,
    RunMetadata,
    Status,
    Summary,
    layer_metric,
    layer_metrics,
)
from llama_lab.util.errors import ConfigError
from llama_lab.util.files import replace_text, replacing

from .logger_check import LONGEST_TAG, wandb_mode
from .run import Run

# On TensorBoard's page "custom scalars": a line for each layer.
LAYER_CHARTS = {quantity: ["Multiline", [layer_metric(quantity, 0)[:-2]]] for quantity in QUANTITIES}
# With the checkpoint, what `eval.py` and `llama_lab.load` read of a run's folder.
MODEL_FILES = (RESOLVED, OVERRIDES, METRICS_CSV, TOKENIZER, Environment.FILE, Summary.FILE, Status.FILE)


class MetricsLogger(Protocol):
    """Takes the rows of a run, on rank 0."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log a row, which has its `tokens`, the x-axis of every plot."""


class MetricsCSV:
    """Appends a row per logged step, on disk at once. Lightning's own CSV logger deletes the old rows on resume.

    parts: names of a mixture's, each with a column for its loss, after the others. layers: whose telemetry is logged.
    A metric of the user's gets its column with its first row.
    """

    def __init__(self, path: Path, parts: Sequence[str] = (), layers: int = 0) -> None:
        self.path = path
        self.columns = (*COLUMNS, *(f"val/loss/{name}" for name in parts), *layer_metrics(layers))
        self.rows = NO_ROWS

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row."""
        cells = {name: str(value) for name, value in {"step": step, **metrics}.items()}
        if self.path.exists() and cells.keys() <= {*self.columns}:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(cells)
        else:
            self._rewrite([*read_cells(self.path), cells])
        self.rows = described([cells], self.rows)

    def forget_after(self, known: Rows) -> list[dict[str, float]]:
        """Drop the rows after a checkpoint: a run that resumes there writes them again. Returns the other metrics.

        These keep their columns, also where the run logs less from now on. known: the rows of the checkpoint. Raises
        ConfigError if these are not the file's first rows.
        """
        try:
            rows = read_cells(self.path)[: known["count"]]
            metrics, self.rows = with_numbers(rows), described(rows)
            what = f"it does not begin with the {known['count']} rows before the checkpoint"
            damage = "" if self.rows == known else what
        except (ValueError, KeyError) as error:
            damage = str(error)
        if damage:
            remedy = "restore it, choose another name, or start over with overwrite=true"
            raise ConfigError(f"{self.path}: is damaged, {damage}; {remedy}")
        if self.path.exists():
            self._rewrite(rows)
        return [{name: value for name, value in row.items() if name != "step"} for row in metrics]

    def _rewrite(self, rows: Sequence[Cells]) -> None:
        """Replace the file by one with these rows, and columns for all that they have."""
        self.columns = tuple(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        with replacing(self.path) as fresh, fresh.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)


class TensorBoard(TensorBoardLogger):
    """Event files in `folder`/tensorboard, with tokens as the step.

    begins: whether it takes the place of all that was logged before. TensorBoard can also declare old events void, but
    finds them by the wall clock.
    """

    def __init__(self, folder: Path, begins: bool = False) -> None:
        if begins:
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        # The purge is for a TensorBoard that is running, and remembers.
        super().__init__(folder, name="", version="tensorboard", purge_step=0 if begins else None)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log one row."""
        super().log_metrics(metrics, int(metrics["tokens"]))


def log_hparams(run: Run, summary: Summary) -> None:
    """Add a finished run to TensorBoard's HParams: name, settings that differ between the command's runs, metrics."""
    shared = (*UNNAMED, *settled_keys())
    typed = {key: override_value(o) for o in run.overrides if not belongs(key := override_key(o), shared)}
    arm = {"arm": summary.label, "seed": summary.seed} | typed
    if "lr" in run.cfg.optim:  # a user's optimizer may have none
        arm["optim.lr"] = run.cfg.optim.lr
    logger = TensorBoard(run.folder.path)
    final = {f"final/{name}": summary.metrics[name] for name in FINAL if name in summary.metrics}
    logger.log_hyperparams(arm, final | {"tokens": summary.metrics["tokens"]})
    logger.finalize("success")


def start_wandb(
    folder: Path,
    settings: DictConfig,
    name: str,
    group: str,
    tags: Sequence[str],
    config: dict[str, Any],
    job_type: str,
) -> Any:
    """Start or resume the W&B run of `folder`, whose id stays in `wandb_id`; returns it. Prints where it is.

    settings: the config's `logger`. W&B cannot resume offline: there, every session starts at step 0, and of two
    sessions of one id the one that is synced later overwrites the other. So each must hold the whole run, see
    `WandbMetrics`.
    """
    import wandb

    mode = wandb_mode(settings.mode)
    id_file = folder / WANDB_ID
    if not id_file.exists():
        replace_text(id_file, secrets.token_hex(4))
    run = wandb.init(
        project=settings.project,
        entity=settings.entity,
        name=name,
        group=group,
        job_type=job_type,
        tags=list(dict.fromkeys([*tags, *map(str, settings.tags)])),
        notes=settings.notes,
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


def finish_wandb(run: Any, exit_code: int = 0) -> None:
    """End the W&B run. Offline sessions before this one go: it holds what they do, and W&B cannot read killed ones.

    Without it the next run of this process would be merged into this one.
    """
    run.finish(exit_code=exit_code)
    own = Path(run.settings.sync_dir)
    for session in own.parent.glob(f"offline-run-*-{run.id}"):
        if session.name != own.name:
            shutil.rmtree(session)


class WandbMetrics:
    """Logs to a W&B run of `start_wandb`, whose step n is row n of metrics.csv, counted from 0.

    Constants are in the summary alone. It is given all rows from the first one on, and sends those that W&B lacks, so
    that a resumed run shows each once: online, what a kill kept from arriving; offline, all.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self._next = 0
        self._missing = run.step

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log one row; `step` is left to W&B's own counter, since its metric of that name would be dropped."""
        if self._next == 0:
            self.run.summary.update({name: metrics[name] for name in CONSTANT if name in metrics})
        if self._next >= self._missing:
            self.run.log({name: value for name, value in metrics.items() if name not in CONSTANT})
        self._next += 1


class TrackioMetrics:
    """Logs to a new run of Trackio's, a dashboard in W&B's manner in a database on this machine.

    It takes the place of the one whose id `folder` has kept. Trackio can also resume a run, but finds it by its name,
    which need not be unique.
    """

    def __init__(self, folder: Path, project: str, name: str, group: str, config: dict[str, Any]) -> None:
        import trackio

        kept = folder / TRACKIO_ID
        if kept.exists():
            with suppress(ValueError):  # the project was killed before its first row, or deleted since
                for run in trackio.Api().runs(project):
                    if run.id == kept.read_text():
                        run.delete()
        self.run = trackio.init(
            project, name, group, config=config, embed=False, auto_log_cpu=False, auto_log_gpu=False
        )
        replace_text(kept, self.run.id)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log one row at its tokens."""
        self.run.log(metrics, step=int(metrics["tokens"]))


def run_tags(run: Run) -> list[str]:
    """The recipe, the option of every group of the model, and the model's keys that were typed."""
    groups = [group for group in ("arch", *COMPONENTS, "size") if group in run.choices]
    keys = [o for o in run.overrides if belongs(override_key(o), ("model",))]
    return [tag[:LONGEST_TAG] for tag in (*(f"{group}={run.choices[group]}" for group in groups), *keys)]


@contextmanager
def open_loggers(run: Run, checkpoint: Path | None, metadata: RunMetadata) -> Iterator[list[MetricsLogger]]:
    """metrics.csv first, and the dashboards of the config, continued from the `checkpoint`; none on ranks other than 0.

    At the end of the context, they learn how the run has ended.
    """
    if current_rank() != 0:
        yield []
        return
    settings, title, folder = run.cfg.logger, run.title, run.folder
    telemetry = run.cfg.train.telemetry
    layers = run.cfg.model.n_layers + run.cfg.model.get("encoder_layers", 0)
    table = MetricsCSV(folder.metrics, [*metadata.epochs], layers if telemetry else 0)
    history = table.forget_after(load_checkpoint(checkpoint, list)["metrics"] if checkpoint else NO_ROWS)
    config: dict[str, Any] = {**OmegaConf.to_container(run.cfg, resolve=True), **metadata.to_json()}  # type: ignore[dict-item]
    loggers: list[MetricsLogger] = [table]
    with ExitStack() as ends:
        if settings.tensorboard:
            board = TensorBoard(folder.path, begins=True)
            ends.callback(board.finalize, "success")
            if telemetry:
                board.experiment.add_custom_scalars({"telemetry": LAYER_CHARTS})
            loggers.append(board)
        if settings.trackio:
            trackio = TrackioMetrics(folder.path, settings.project, title, run.name, config)
            ends.callback(trackio.run.finish)
            loggers.append(trackio)
        if settings.wandb:
            wandb_run = start_wandb(folder.path, settings, title, run.name, run_tags(run), config, "train")
            ends.callback(end_wandb, folder, wandb_run, settings.artifacts)
            loggers.append(WandbMetrics(wandb_run))
        for row in history:
            for dashboard in loggers[1:]:
                dashboard.log_metrics(row)
        yield loggers


def end_wandb(folder: RunFolder, wandb_run: Any, artifacts: bool) -> None:
    """End the W&B run as the run in `folder` has ended, with the model as an artifact if that is wanted.

    Its files make the artifact's download a run's folder again.
    """
    import wandb

    ended = (status := folder.status) and status.status
    if ended == "done" and artifacts:
        summary = Summary.load(folder.path).to_json()
        artifact = wandb.Artifact(f"model-{wandb_run.id}", type="model", metadata=summary)
        for file in (folder.checkpoint, *(folder.path / name for name in MODEL_FILES)):
            artifact.add_file(str(file), name=str(file.relative_to(folder.path)))
        wandb_run.log_artifact(artifact)
    finish_wandb(wandb_run, exit_code=0 if ended in ("done", "pruned") else 1)
