"""The typed record of a run, read from its folder."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_lab.config.schema import flatten
from llama_lab.config.trust import stored_settings
from llama_lab.util.errors import ConfigError
from llama_lab.util.files import ALTERED

from .evaluation import DocumentLosses, Evaluation
from .folder import RESOLVED, is_run, read_overrides
from .json_file import reading
from .metrics import METRICS_CSV, described, read_cells, with_numbers
from .stored import Environment, Status, Summary, WarmStart

MISSING = "missing"


@dataclass(frozen=True)
class Record:
    """The contents of a run's folder. Losses are in nats per token.

    status: running, interrupted, pruned, done, diverged, failed; "missing" for a run that a study lists but that left
    nothing. message: why, in one line. overrides: what was typed. settings: the resolved config; config: on one level
    (`{"train.tokens": 2e6}`). summary: the last value of every metric, empty unless done. metrics: the rows of
    metrics.csv, one per logged step; a row holds what was logged at that step, with `step`, `tokens` and `seconds`
    always; step 0 only of trained weights. evaluation: empty unless of the run as it ended. documents: its losses by
    held-out document; empty where it has none. start: of a run with `init_from`.
    """

    path: Path
    arm: str
    seed: int
    status: str
    message: str = ""
    overrides: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: Environment = field(default_factory=Environment)
    summary: dict[str, float] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    evaluation: Evaluation = field(default_factory=Evaluation)
    documents: DocumentLosses = field(default_factory=DocumentLosses)
    start: WarmStart | None = None

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return self.status == "done"

    @property
    def folder_name(self) -> str:
        """The unique name of its arm: that of its folder, `llama/norm=layernorm`."""
        return f"{self.environment.name}/{self.arm}"

    @property
    def costs(self) -> dict[str, float]:
        """The costs of its model."""
        return self.environment.metrics


def every_run(path: Path) -> list[Path]:
    """All runs at or below a path. Raises ConfigError as `is_run` does."""
    folders = {file.parent for name in (Status.FILE, RESOLVED) for file in path.rglob(name)}
    return sorted(folder for folder in folders if is_run(folder))


def read_record(path: Path) -> Record:
    """Read a run's folder. Raises ConfigError if it holds no run, or a file is damaged."""
    if not is_run(path):
        raise ConfigError(f"{path}: holds no run; name folders of runs or studies, such as runs/llama/base/seed=1")
    status = Status.load(path)
    environment = Environment.load(path, needs=("arm", "seed"))
    settings = stored_settings(path / RESOLVED)
    ended = Summary.load(path) if status.status == "done" else Summary()
    summary = ended.metrics
    with reading(path, METRICS_CSV):
        rows = read_cells(path / METRICS_CSV)
        if ended.rows and ended.rows != described(rows)["checksum"]:
            raise ValueError(ALTERED)
        metrics = with_numbers(rows)
    evaluation = Evaluation.load(path) if summary and (path / Evaluation.FILE).exists() else Evaluation()
    documents = DocumentLosses.load(path) if summary and (path / DocumentLosses.FILE).exists() else DocumentLosses()
    return Record(
        path=path,
        arm=environment.arm,
        seed=environment.seed,
        status=status.status,
        message=status.message,
        overrides=read_overrides(path),
        settings=settings,
        config=flatten(settings),
        environment=environment,
        summary=summary,
        metrics=metrics,
        evaluation=evaluation if evaluation.step == summary.get("step") else Evaluation(),
        documents=documents,
        start=WarmStart.load(path) if (path / WarmStart.FILE).exists() else None,
    )


def started(records: Iterable[Record]) -> list[Record]:
    """The records whose runs have started."""
    return [record for record in records if record.status != MISSING]


def finished(records: Iterable[Record]) -> list[Record]:
    """The records whose runs are done."""
    return [record for record in records if record.done]


def trained_beside(records: Iterable[Record]) -> bool:
    """Whether another run may have shared a device with one of these, which makes logged speeds incomparable."""
    return any(record.environment.runs_at_once > 1 for record in records)


def missing_record(path: Path, arm: str, seed: int) -> Record:
    """The record of a run that a study lists, but that has no folder."""
    return Record(path, arm, seed, MISSING, "never began")
