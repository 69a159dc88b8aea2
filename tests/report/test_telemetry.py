"""A report shows what was logged of every layer, over depth and training."""

from dataclasses import replace
from pathlib import Path

import pytest

from llama_lab.analysis.depth_profiles import telemetry
from llama_lab.report import tables
from llama_lab.report.charts import training
from llama_lab.runs.record import Record
from tests.analysis import results
from tests.conftest import Command


def record(seed: int, rows: dict[int, list[float]]) -> Record:
    """A run that logged these gradient norms, one for each layer, at these tokens, and other rows between."""
    metrics = []
    for tokens, norms in rows.items():
        of_layers = {f"telemetry/ffn_grad_norm/layer_{i:02d}": norm for i, norm in enumerate(norms)}
        metrics += [{"tokens": tokens, "train/loss": 1.0} | of_layers, {"tokens": tokens, "val/loss": 1.0}]
    return Record(Path(), "an arm", seed, "done", metrics=[*metrics, {"tokens": 7.0, "val/loss": 1.0}])


def test_layers_are_means_over_the_runs_at_the_steps_that_all_have_logged() -> None:
    found = telemetry("an arm", [record(1, {1: [1, 2], 5: [3, 4], 9: [5, 6]}), record(2, {1: [3, 2], 9: [7, 8]})])
    assert (found.arm, found.tokens) == ("an arm", [1, 9])
    assert found.values == {"ffn_grad_norm": [[2, 2], [6, 7]]}


def test_of_many_steps_four_are_shown_with_the_first_and_the_last() -> None:
    found = telemetry("an arm", [record(1, {step: [step] for step in range(1, 101)})])
    assert found.tokens == [1, 34, 67, 100]


def test_runs_without_it_are_left_out_and_arms_of_such_alone_have_none() -> None:
    bare = record(2, {1: []})
    found = telemetry("an arm", [record(1, {1: [1]}), bare])
    assert found.values == {"ffn_grad_norm": [[1]]}
    assert telemetry("an arm", [bare]) is None
    assert telemetry("an arm", []) is None


def test_a_chart_has_a_line_for_each_step_the_stronger_the_later() -> None:
    rows = training.telemetry(results.watched()).rows
    lines: dict[float, list[float]] = {}
    for row in rows:
        if (row["arm"], row["view"]) == ("vanilla", ["gradient norm", "feed-forwards"]):
            lines.setdefault(row["share"], []).append(row["y"])
    assert [*lines] == [0.25, 0.5, 0.75, 1]
    assert [lines[0.25], lines[0.5]] == [[1, 2, 3, 4, 5, 6], [0.5, 1, 1.5, 2, 2.5, 3]]
    assert {row["arm"] for row in rows if row["view"] == ["attention entropy, nats"]} == {"vanilla"}


def test_the_table_has_the_ends_of_depth_and_of_training() -> None:
    table = tables.tables(results.watched())["telemetry"]
    assert table.head[2:] == [
        f"{step} step, {layer} layer" for step in ("First", "Last") for layer in ("first", "last")
    ]
    assert ["vanilla", "attention entropy, nats", "1.00", "6.00", "0.250", "1.50"] in table.rows


@pytest.mark.slow
def test_a_study_with_telemetry_shows_both_arms(tiny: list[str], command: Command) -> None:
    depth = ["study=depth", "study.depths=[3]", "study.warmups=[0.0]", "study.seeds=[1]", "study.measure_speed=false"]
    ran = command(*tiny, *depth, "train.tokens=2560", "train.telemetry=true", "name=deep")
    assert (ran.code, ran.err) == (0, "")
    report = (ran.cwd / "runs" / "deep" / "report.html").read_text(encoding="utf-8")
    assert ">Telemetry</h2>" in report
    for arm in ("postnorm", "prenorm"):
        assert f'"arm":"{arm}-3-warmup=0","view":["gradient norm","feed-forwards"]' in report


def test_what_modules_logged_last_has_a_column_for_each_metric_and_means_over_seeds() -> None:
    ladder = results.ladder()
    rows = [[{"train/loss": 2, "train/gate": 9}, {"train/loss": 1, "train/gate": x}, {"val/loss": 1}] for x in (2, 3)]
    runs = (replace(run, metrics=own) for run, own in zip(ladder.arms[0].records, rows, strict=False))
    watched = replace(ladder, arms=(replace(ladder.arms[0], records=tuple(runs)), *ladder.arms[1:]))
    table = tables.tables(watched)["modules"]
    assert (table.head, table.rows[0]) == (["Arm", "train/gate"], ["vanilla", "2.50"])
    assert "modules" not in tables.tables(ladder)
