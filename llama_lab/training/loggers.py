"""The dashboards: TensorBoard and W&B."""

import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import TensorBoardLogger

from .metrics import MetricsLogger


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
    "params",
    "flops_per_token",
    "perf/tokens_per_second",
    "perf/peak_memory_bytes",
    "kv_cache/bytes_per_token",
)


class TensorBoard(TensorBoardLogger):
    """Event files in `folder`/tensorboard, with tokens as the step; old ones after `start_tokens` become void."""

    def __init__(self, folder: Path, start_tokens: int) -> None:
        super().__init__(folder, name="", version="tensorboard", purge_step=start_tokens + 1 if start_tokens else None)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Log at the metrics' tokens, the x-axis of every plot."""
        super().log_metrics(metrics, int(metrics["tokens"]))


def log_hparams(folder: Path, learning_rate: float | None, summary: dict[str, Any]) -> None:
    """Add a finished run to TensorBoard's HParams: its arm and choice per config group, and its final metrics."""
    choices = {group: option for group, option in summary["choices"].items() if group != "logger"}
    arm = {"arm": summary["arm"], "seed": summary["seed"], **choices}
    if learning_rate is not None:  # a user's optimizer may have none
        arm["optim.lr"] = learning_rate
    logger = TensorBoard(folder, start_tokens=0)
    final = {f"final/{name}": summary[name] for name in FINAL if name in summary}
    logger.log_hyperparams(arm, final | {"tokens": summary["tokens"]})
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
    """Begin, or online resume, the W&B run of `folder`; returns it. Prints where it is."""
    import wandb

    mode = wandb_mode()
    # Syncing two offline sessions under one id overwrites the first, so only online runs keep theirs.
    id_file = folder / "wandb_id"
    run_id = id_file.read_text() if mode == "online" and id_file.exists() else secrets.token_hex(4)
    id_file.write_text(run_id)
    run = wandb.init(
        project=project,
        name=name,
        group=group,
        job_type=job_type,
        tags=tags,
        config=config,
        dir=folder,
        id=run_id,
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
    """Logs to a W&B run that `start_wandb` began."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log one row; `step` is left to W&B's own counter, since its metric of that name would be dropped."""
        self.run.log(metrics)
