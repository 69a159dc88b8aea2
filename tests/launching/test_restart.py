"""Real runs through the queue: the numbers of a sequential study, whoever is killed on the way."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import TRAIN, RunTrain, last_of_each
from tests.launching.conftest import Launcher, ended, saved, sessions
from tests.processes import wait_until
from tests.study.test_restart import untimed
from tests.training.tiny import identical, logged, repeatable, trained_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = ("name=climb", "train.tokens=40000", "train.checkpoint_every=10", "trainer=cpu")
STUDY = "{learning_rates: null, measure_speed: false, axes: [norm], seeds: [1, 2]}"
QUEUE = ("hydra/launcher=local_gpus", "hydra.launcher.cpu_slots=2")
RUNS = [f"{arm}/seed={seed}" for seed in (1, 2) for arm in ("vanilla", "+rmsnorm")]


def worker(launcher: int) -> int:
    """The process of a run, which the launcher's server has forked."""
    folder = psutil.Process(launcher).cwd()
    for process in psutil.process_iter():
        with suppress(OSError):  # it has just ended
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{folder}/runs"):
                return process.pid
    raise AssertionError("no run is at work")


def kill_both(launcher: int) -> None:
    os.kill(worker(launcher), signal.SIGKILL)
    os.kill(launcher, signal.SIGKILL)


DEEDS: list[tuple[Callable[[int], None], int]] = [
    (kill_both, -signal.SIGKILL),
    (lambda launcher: os.kill(launcher, signal.SIGKILL), -signal.SIGKILL),
    (lambda launcher: os.kill(launcher, signal.SIGINT), 130),
    (lambda launcher: os.kill(worker(launcher), signal.SIGKILL), 1),
]


def test_after_a_kill_the_same_command_loses_nothing_and_does_nothing_twice(
    start: Callable[..., Launcher], run_train: RunTrain, tiny: list[str], tmp_path: Path
) -> None:
    """A study that an experiment chooses, its launcher and a worker killed, or Ctrl-C pressed, while two runs train."""
    experiment = tmp_path / "mine" / "experiment" / "climb.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(f"# @package _global_\ndefaults: [override /study: ladder]\nstudy: {STUDY}\n")
    overrides = ("--config-dir", "mine", "experiment=climb", *RUN, *QUEUE)
    folder = tmp_path / "runs" / "climb"
    runs = [folder / run for run in RUNS]
    done: dict[Path, int] = {}
    for deed, expected in DEEDS:
        began, launcher = time.time(), start(*overrides, program=(str(TRAIN),))
        wait_until(lambda began=began: saved(runs, began) == 2)
        deed(launcher.pid)
        code, shown = ended(launcher)
        assert code == expected, shown
        statuses = [json.loads(file.read_text())["status"] for file in folder.rglob("status.json")]
        if expected == 130:
            assert statuses.count("interrupted") == shown.count("stopped by the user at step") == 2
        if expected == 1:
            assert sorted(statuses) == ["done"] * 3 + ["failed"]
            assert "failed, killed by SIGKILL; its output is in" in shown
        assert all(file.stat().st_mtime_ns == when for file, when in done.items())
        done = {file: file.stat().st_mtime_ns for file in folder.rglob("summary.json")}
    again = run_train(*tiny, *overrides, cwd=tmp_path)
    assert (again.code, again.err) == (0, "")
    assert "1 done, in" in again.out
    assert all(file.stat().st_mtime_ns == when for file, when in done.items())
    assert sum(map(sessions, runs)) == 7, "each went on from its checkpoint as often as it was stopped, and no other"
    recorded = json.loads((runs[0] / "environment.json").read_text())["command"]
    assert {*recorded} == {str(TRAIN), *last_of_each([*tiny, *overrides])}
    assert "val loss" in (runs[0] / "output.log").read_text()

    settings = ("study=ladder", "study.learning_rates=null", "study.measure_speed=false", "study.seeds=[1,2]")
    one_by_one = run_train(*tiny, *RUN, *settings, "study.axes=[norm]", "hydra/launcher=basic")
    assert (one_by_one.code, one_by_one.err) == (0, "")
    sequential = one_by_one.cwd / "runs" / "climb"
    assert untimed(folder / "summary.csv") == untimed(sequential / "summary.csv")
    for run in RUNS:
        assert repeatable(folder / run) == repeatable(sequential / run)
        assert identical(trained_state(folder / run), trained_state(sequential / run))


def test_two_runs_at_a_time_are_two_processes_each(run_train: RunTrain, tiny: list[str]) -> None:
    """Data parallel inside slots, here on the CPU: ranks find their own run's, and one of them tells."""
    queue = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", *QUEUE)
    both = run_train("--multirun", *tiny, "name=two", "arm=a", "seed=1,2", *queue)
    assert (both.code, both.err) == (0, "")
    for seed in (1, 2):
        alone = run_train(*tiny, "name=two", "arm=a", f"seed={seed}", "trainer=cpu").run
        run = both.cwd / "runs" / "two" / "a" / f"seed={seed}"
        assert logged(run, "val/loss") == pytest.approx(logged(alone, "val/loss"), rel=1e-3)
        assert (run / "output.log").read_text().count("step 78/78") == 2
        assert trained_state(run)["global_step"] == 78
