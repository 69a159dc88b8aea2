"""A run of W&B's: online or offline, never with a prompt."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from llama_lab.runs.folder import OVERRIDES, RESOLVED, TOKENIZER, WANDB_ID, RunFolder
from llama_lab.runs.metrics import METRICS, MetricsLogger
from llama_lab.runs.stored import Environment, Status, Summary
from llama_lab.util.files import replace_text

from .logger_check import wandb_mode

# With the checkpoint, what `eval.py` and `llama_lab.load` read of a run's folder.
MODEL_FILES = (RESOLVED, OVERRIDES, METRICS, TOKENIZER, Environment.FILE, Summary.FILE, Status.FILE)


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


def log_model(run: Any, folder: RunFolder) -> None:
    """Log a finished run's checkpoint as an artifact, with the files that make its download a run's folder again."""
    import wandb

    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=Summary.load(folder.path).to_json())
    for file in (folder.checkpoint, *(folder.path / name for name in MODEL_FILES)):
        artifact.add_file(str(file), name=str(file.relative_to(folder.path)))
    run.log_artifact(artifact)
