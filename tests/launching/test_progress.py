"""How far a queue is, from files, and how it is shown."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from llama_lab.launching.progress import QueueDisplay, RunProgress, latest_metrics, queue_seconds_left, read_progress
from llama_lab.runs.stored import layer_metrics
from llama_lab.training.loggers import MetricsCSV
from llama_lab.training.run import Run
from tests.training.tiny import planned


@pytest.fixture
def run(tmp_path: Path, tiny: list[str]) -> Run:
    """A run of 78 steps."""
    run = planned(*tiny, f"runs_dir={tmp_path}")
    run.folder.path.mkdir(parents=True)
    return run


def log(run: Run, step: int, **metrics: float) -> None:
    MetricsCSV(run.folder.metrics).log_metrics({"tokens": step * 256, "seconds": step * 2.0, **metrics}, step)


def test_a_run_is_where_the_end_of_its_metrics_says(run: Run) -> None:
    assert read_progress(run, 0) == RunProgress(0, None, None)
    run.folder.write_status("running")
    assert read_progress(run, 0) == RunProgress(0, None, None)
    for step in range(1, 70):
        log(run, step, **{"train/loss": 100.0 - step})
    log(run, 70, **{"val/loss": 3.0})
    assert read_progress(run, 0) == RunProgress(70, 31.0, 8 * 2.0)


def test_the_metrics_of_an_earlier_session_are_no_progress(run: Run) -> None:
    log(run, 70, **{"train/loss": 1.0})
    run.folder.write_status("running")
    assert read_progress(run, time.time() + 1) == RunProgress(0, None, None)
    assert read_progress(run, time.time() - 60).step == 70


def test_a_row_that_is_being_written_does_not_count(run: Run) -> None:
    log(run, 1, **{"train/loss": 5.0})
    with run.folder.metrics.open("a") as file:
        file.write("2,512,4.")
    assert latest_metrics(run.folder.metrics)["step"] == 1
    run.folder.metrics.write_text("step,tok")
    assert latest_metrics(run.folder.metrics) == {}


def test_the_columns_of_telemetry_and_of_a_mixture_s_parts_do_not_hide_the_progress(run: Run) -> None:
    table = MetricsCSV(run.folder.metrics, ["a", "b"], 48)
    telemetry = dict.fromkeys(layer_metrics(48), 1 / 3)
    losses = {"train/loss": 4.0, "val/loss": 3.0, "val/loss/a": 2.0, "val/loss/b": 4.0}
    for step in (1, 70):
        table.log_metrics({"tokens": step * 256, "seconds": step * 2.0} | losses | telemetry, step)
    run.folder.write_status("running")
    assert read_progress(run, 0) == RunProgress(70, 4.0, 8 * 2.0)


def test_the_time_left_counts_waiting_runs_at_the_mean_of_the_others() -> None:
    assert queue_seconds_left([], [(5.0, None)], 3, 2) is None
    assert queue_seconds_left([10.0, 20.0], [], 4, 2) == 30.0
    assert queue_seconds_left([], [(6.0, 4.0), (2.0, None)], 0, 2) == 8.0, "the second has the 8 s that the mean says"
    assert queue_seconds_left([10.0], [(1.0, 99.0)], 0, 4) == 99.0, "no queue ends before its longest run"


def show(display: QueueDisplay, run: Run) -> None:
    rows = [("gpu 0", run, RunProgress(39, 4.25, 90.0)), ("gpu 1", run, RunProgress(0, None, None))]
    display.show(rows, {"done": 3, "failed": 0, "running": 2, "waiting": 7, "to follow": 0.4}, 600.0)


def test_a_file_gets_one_plain_line(run: Run) -> None:
    console = Console(file=io.StringIO(), width=80)
    with QueueDisplay(console) as display:
        assert not display.due
        show(display, run)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown == "3 done, 2 running, 7 waiting; about 10 min left; arm/seed=1 50%, arm/seed=1 0%\n"


def test_a_terminal_gets_a_table_of_slots_runs_progress_loss_and_time_left(run: Run) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with QueueDisplay(console) as display:
        display.print_line("arm/seed=9: done")
        show(display, run)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    row = next(line for line in lines if "gpu 0" in line)
    assert re.fullmatch(r".*gpu 0 +arm/seed=1 +[━╸╺ ]+ +50% +4\.250 +2 min", row), row
    assert any(re.fullmatch(r".*all +[━╸╺ ]+ +28% +10 min", line) for line in lines), "3.5 of 12.4 runs"
    assert any("3 done, 2 running, 7 waiting; about 10 min left" in line for line in lines)
    assert any("arm/seed=9: done" in line for line in lines)
