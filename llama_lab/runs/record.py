"""One run as a study sees it: what its folder tells, and nothing else."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from llama_lab.config.components import flatten
from llama_lab.config.trust import stored_config
from llama_lab.errors import ConfigError

from .folder import RESOLVED
from .metrics import read_metrics

MISSING = "missing"


@dataclass(frozen=True)
class Record:
    """A run's folder, read. Losses are in nats per token.

    status: running, interrupted, done, diverged, failed; "missing" for a run that a study lists but that left nothing.
    message: why, in one line. config: the resolved config, on one level (`{"train.tokens": 2e6}`). facts: everything
    else known at its start: `choices` (the option of each config group), costs (`params`, `params_non_embedding`,
    `flops_per_token`, `train_flops_per_token`, `kv_cache/bytes_per_token`, `kv_cache/bytes`), `device`, `devices` (of
    all nodes), `sharded`, `precision`, `attention_kernel`, `data_hash`, `tokenizer_hash`, `vocab_size`,
    `bytes_per_token`, `unigram_entropy`, `versions`, `python`, `platform`, `cpu_threads`, `gpus`, `git` (`commit`,
    `dirty`; None outside a checkout), `command`; `earlier_sessions`, the same of each session that it went on from.
    summary: the last value of every metric, empty unless done. metrics: the rows of metrics.csv, one per logged step;
    a row holds what was logged at that step, with `step`, `tokens` and `seconds` always. evaluation: what eval.json
    tells, empty if that is nothing, or not of the run as it ended; of the parts that were asked for: `lengths` (see
    `llama_lab/evaluation/lengths.py`), `speed` (seconds, see `llama_lab/evaluation/speed.py`), `cache` (`formula_bytes`
    and `measured_bytes`), and what they were measured on and with (`device`, `precision`, `threads`, `torch`).
    """

    path: Path
    arm: str
    seed: int
    status: str
    message: str
    config: dict[str, Any]
    facts: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, float]]
    evaluation: dict[str, Any]

    @property
    def done(self) -> bool:
        """Whether the run came to its end."""
        return self.status == "done"

    @property
    def lengths(self) -> list[dict[str, Any]]:
        """What was measured at several context lengths; empty if nothing was."""
        found: list[dict[str, Any]] = self.evaluation.get("lengths", [])
        return found


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run that has begun."""
    return all((path / name).is_file() for name in ("status.json", RESOLVED, "environment.json"))


def read_record(path: Path) -> Record:
    """Read a run's folder. Raises ConfigError if it holds no run."""
    if not is_run(path):
        raise ConfigError(f"{path}: holds no run; name folders of runs or studies, such as runs/llama/base/seed=1")
    status = _read_json(path / "status.json")
    config = flatten(OmegaConf.to_container(stored_config(path / RESOLVED), resolve=True))
    facts = _read_json(path / "environment.json")
    metrics = path / "metrics.csv"
    summary = _read_json(path / "summary.json") if status["status"] == "done" else {}
    return Record(
        path=path,
        arm=facts["arm"],
        seed=facts["seed"],
        status=status["status"],
        message=status["message"],
        config=config,
        facts=facts,
        summary=summary,
        metrics=read_metrics(metrics) if metrics.exists() else [],
        evaluation=_evaluation(path, summary),
    )


def _evaluation(path: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """What eval.json tells, if it is of the run as it ended."""
    file = path / "eval.json"
    found = _read_json(file) if file.exists() else {}
    return found if summary and found.get("step") == summary.get("step") else {}


def missing_record(path: Path, arm: str, seed: int) -> Record:
    """A run that a study lists, but that left nothing behind."""
    return Record(path, arm, seed, MISSING, "never began", {}, {}, {}, [], {})


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content
