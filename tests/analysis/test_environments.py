"""The conditions of a run's earlier sessions are compared, too."""

from pathlib import Path
from typing import Any

import pytest

from tests.analysis.synthetic import FACTS, in_runs, plant_config, plant_facts, warnings_of

COMMIT = FACTS["git"]["commit"]


def warned(folder: Path, config: dict[str, Any] | None = None, **facts: Any) -> list[str]:
    """The warnings of a study one of whose runs has other facts and settings."""
    return warnings_of(folder, in_runs(lambda run: [plant_facts(run, **facts), plant_config(run, **config or {})]))


@pytest.mark.parametrize(
    ("earlier", "sentence"),
    [
        ({"device": "NVIDIA H100"}, "device: NVIDIA H100 then cpu in rmsnorm/seed=2; their speeds cannot be compared"),
        ({"precision": "bf16-mixed"}, "precision: bf16-mixed then 32-true in rmsnorm/seed=2; a part of"),
        ({"git": {"commit": "beef" * 10, "dirty": False}}, "commit: beefbeefbeef then 799d2f66f95e in rmsnorm/seed=2"),
        ({"versions": FACTS["versions"] | {"torch": "2.12.0"}}, "torch: 2.12.0 then 2.13.0+cpu in rmsnorm/seed=2"),
        ({"versions": FACTS["versions"] | {"numpy": "1.26.4"}}, "numpy: 1.26.4 then 2.4.6 in rmsnorm/seed=2."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_earlier_session_under_other_conditions_is_named(
    tmp_path: Path, earlier: dict[str, Any], sentence: str
) -> None:
    (warning,) = warned(tmp_path, earlier_sessions=[FACTS | earlier, FACTS | earlier, FACTS])
    assert warning.startswith(f"Sessions of one run differ in {sentence}")


def test_an_earlier_session_with_uncommitted_changes_is_named(tmp_path: Path) -> None:
    dirty = FACTS | {"git": {"commit": COMMIT, "dirty": True}}
    assert warned(tmp_path, earlier_sessions=[dirty, FACTS]) == [
        "The code had uncommitted changes: rmsnorm/seed=2. The commit does not identify the code."
    ]


def test_runs_that_recompute_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    (warning,) = warned(tmp_path, {"train.recompute": "block"})
    assert warning.startswith("Runs differ in train.recompute: ")
    assert "block in rmsnorm/seed=2" in warning
    assert warning.endswith("; their speeds and memory cannot be compared.")


def test_a_run_resumed_under_the_same_conditions_is_not_named(tmp_path: Path) -> None:
    assert warned(tmp_path, earlier_sessions=[FACTS, FACTS]) == []


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"resume": "runs/ladder/rmsnorm/seed=2"}, {}),
        ({}, {"command": ["train.py", "resume=runs/ladder/rmsnorm/seed=2", "train.tokens=3e6"]}),
        ({}, {"earlier_sessions": [FACTS | {"command": ["train.py", "resume=runs/ladder/rmsnorm/seed=2"]}]}),
    ],
)
def test_a_finished_run_that_was_trained_further_is_named(
    tmp_path: Path, config: dict[str, Any], facts: dict[str, Any]
) -> None:
    (warning,) = warned(tmp_path, config, **facts)
    assert warning.startswith("Trained further with resume=: rmsnorm/seed=2. ")


def test_a_resume_that_is_null_trains_nothing_further(tmp_path: Path) -> None:
    assert warned(tmp_path, {"resume": None}, command=["train.py", "resume=null"]) == []
