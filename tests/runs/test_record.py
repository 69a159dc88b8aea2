"""What a run records is read back, from newer versions too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_lab.runs.evaluation import CacheLoss, CacheSize, Evaluation, GenerationSpeed, LengthLoss
from llama_lab.runs.json_file import JsonRecord
from llama_lab.runs.stored import Environment, Git, RunMetadata, Status, Summary

FACTS = RunMetadata(
    name="name", arm="arm", seed=3, choices={"norm": "rmsnorm"}, metrics={"params": 7, "kv_cache/bytes": 8}
)
FIRST = Environment(
    **vars(FACTS), command=["train.py"], versions={"llama-lab": "0.4.0", "torch": "2"}, git=Git("beef", dirty=True)
)
EVALUATION = Evaluation(
    step=5,
    device="cpu",
    metrics={"val/loss": 2.5, "val_tokens": 9},
    lengths=[LengthLoss(4, 2.5, [1.5], [2.5], [9]), LengthLoss(8, note="cannot: out of memory")],
    cache=[CacheSize(1, 4, "int8", 16, 16)],
    cache_losses=[CacheLoss("int8", None)],
    speed=[GenerationSpeed(1, 4, [0.1], [0.2], [0.3])],
    sample="a",
)
STORED = [
    Status("failed", "why"),
    FIRST,
    replace(FIRST, git=None, earlier_sessions=[FIRST, replace(FIRST, device="cuda")]),
    Summary(**vars(FACTS) | {"metrics": FACTS.metrics | {"val/loss": 2.5}}),
    EVALUATION,
    Evaluation(step=5),
]


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored.FILE)
def test_what_is_saved_is_loaded(stored: JsonRecord, tmp_path: Path) -> None:
    stored.save(tmp_path)
    assert type(stored).load(tmp_path) == stored


def test_a_metric_is_a_key_of_its_own_in_a_file_and_in_each_earlier_session() -> None:
    content = replace(FIRST, earlier_sessions=[FIRST]).to_json()
    for session in (content, *content["earlier_sessions"]):
        assert (session["params"], session["kv_cache/bytes"], session["git"]["commit"]) == (7, 8, "beef")
        assert "metrics" not in session


def test_an_evaluation_writes_the_parts_that_were_asked_for_alone() -> None:
    written = Evaluation(step=5, device="cpu", sample="a").to_json()
    assert [*written] == ["step", "device", "precision", "threads", "torch", "sample"]


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_an_environment_of_a_newer_version_is_loaded(tmp_path: Path) -> None:
    versions = {"llama-lab": "0.10.0"}
    session = {"arm": "a", "seed": 1, "versions": versions, "params": 7}
    newer = {"sharding": {"by": "rows"}, "is_new": True, "why": "x", "perf/new": 1.5}
    write(tmp_path, "environment.json", session | newer | {"earlier_sessions": [session]})
    old = Environment(arm="a", seed=1, versions=versions, metrics={"params": 7})
    assert Environment.load(tmp_path) == replace(old, metrics={"params": 7, "perf/new": 1.5}, earlier_sessions=[old])
