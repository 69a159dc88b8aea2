"""Real runs through the queue: the numbers of a sequential study, whoever is killed on the way."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TRAIN, Ran, RunTrain, last_of_each
from tests.launching.tasks import PATIENCE
from tests.preloaded import PreloadedPython
from tests.study.test_restart import untimed
from tests.training.tiny import identical, repeatable, trained_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STUDY = (
    "study=ladder",
    "study.learning_rates=null",
    "study.measure_speed=false",
    "study.axes=[norm]",
    "study.seeds=[1,2]",
    "name=climb",
    "train.tokens=60000",
    "train.checkpoint_every=10",
)
QUEUE = ("trainer=cpu", "hydra/launcher=local_gpus", "hydra.launcher.cpu_slots=2")
RUNS = [f"{arm}/seed={seed}" for seed in (1, 2) for arm in ("vanilla", "+rmsnorm")]


@pytest.fixture(scope="module")
def sequential(run_train: RunTrain, tiny: list[str]) -> Path:
    """The study's folder, its runs trained one after the other in one process."""
    ran = run_train(*tiny, *STUDY, "trainer=cpu", "hydra/launcher=basic")
    assert (ran.code, ran.err) == (0, "")
    return ran.cwd / "runs" / "climb"


def check_same(folder: Path, expected: Path) -> None:
    """Every number that no clock makes is the same, the weights to the last bit."""
    assert untimed(folder / "summary.csv") == untimed(expected / "summary.csv")
    for run in RUNS:
        assert repeatable(folder / run) == repeatable(expected / run)
        assert identical(trained_state(folder / run), trained_state(expected / run))


def test_a_study_over_two_slots_gives_the_numbers_of_one_after_the_other(
    run_train: RunTrain, tiny: list[str], sequential: Path
) -> None:
    ran = run_train(*tiny, *STUDY, *QUEUE)
    assert (ran.code, ran.err) == (0, "")
    folder = ran.cwd / "runs" / "climb"
    check_same(folder, sequential)
    recorded = json.loads((folder / RUNS[0] / "environment.json").read_text())["command"]
    assert recorded == [str(TRAIN), *last_of_each([*tiny, *STUDY, *QUEUE])]
    assert "val loss" in (folder / RUNS[0] / "output.log").read_text()


def test_a_study_that_an_experiment_chooses_is_launched_too(
    run_train: RunTrain, tiny: list[str], tmp_path: Path
) -> None:
    experiment = tmp_path / "mine" / "experiment" / "climb.yaml"
    experiment.parent.mkdir(parents=True)
    study = "{axes: [norm], seeds: [1], learning_rates: null, extend_rates: false, measure_speed: false}"
    experiment.write_text(f"# @package _global_\ndefaults: [override /study: ladder]\nstudy: {study}\n")
    ran = run_train(
        "--config-dir", "mine", "experiment=climb", *tiny, "name=climb", "train.tokens=5000", *QUEUE, cwd=tmp_path
    )
    assert (ran.code, ran.err) == (0, "")
    assert "2 done, in" in ran.out
    assert (tmp_path / "runs" / "climb" / "report.html").exists()


def in_the_middle(folder: Path) -> bool:
    """Whether two runs train and have checkpoints, and the third and fourth still wait."""
    return sum((folder / run / "checkpoints" / "last.ckpt").exists() for run in RUNS) == 2


def children(process: int) -> list[int]:
    """The processes that a process started."""
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def workers(launcher: int) -> list[int]:
    """The processes of the runs, which the launcher's server has forked."""
    return [pid for child in children(launcher) for pid in children(child)]


def kill_worker(launcher: int) -> None:
    os.kill(workers(launcher)[0], signal.SIGKILL)


def kill_launcher(launcher: int) -> None:
    os.kill(launcher, signal.SIGKILL)


def kill_both(launcher: int) -> None:
    kill_worker(launcher)
    kill_launcher(launcher)


def press_ctrl_c(launcher: int) -> None:
    os.kill(launcher, signal.SIGINT)


@pytest.mark.parametrize(
    ("deed", "code"),
    [(kill_worker, 1), (kill_launcher, -signal.SIGKILL), (kill_both, -signal.SIGKILL), (press_ctrl_c, 130)],
)
def test_after_a_kill_the_same_command_loses_nothing_and_does_nothing_twice(
    deed: Callable[[int], None],
    code: int,
    run_train: RunTrain,
    preloaded: PreloadedPython,
    environment: dict[str, str],
    tiny: list[str],
    tmp_path: Path,
    sequential: Path,
) -> None:
    folder = tmp_path / "runs" / "climb"
    command = [str(TRAIN), *last_of_each([*tiny, *STUDY, *QUEUE])]
    options: dict[str, Any] = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if deed in (kill_worker, kill_both):  # its workers are its children, and new processes
        launcher = preloaded.start(command, **options)
    else:
        launcher = subprocess.Popen([preloaded.executable, *command], env=environment, **options)
    until = time.monotonic() + PATIENCE
    while not in_the_middle(folder):
        assert time.monotonic() < until
        time.sleep(0.01)
    deed(launcher.pid)
    shown, _ = launcher.communicate()
    assert launcher.returncode == code, shown
    statuses = {run: json.loads((folder / run / "status.json").read_text())["status"] for run in RUNS[:2]}
    if deed is press_ctrl_c:
        assert set(statuses.values()) == {"interrupted"}
        assert shown.count("stopped by the user at step") == 2
    if deed is kill_worker:
        assert sorted(statuses.values()) == ["done", "failed"]
        assert "failed, killed by SIGKILL; its output is in" in shown
    done = {file: file.stat().st_mtime_ns for file in folder.rglob("summary.json")}
    again: Ran = run_train(*tiny, *STUDY, *QUEUE, cwd=tmp_path)
    assert (again.code, again.err) == (0, "")
    assert all(file.stat().st_mtime_ns == when for file, when in done.items())
    check_same(folder, sequential)
    sessions = [json.loads((folder / run / "environment.json").read_text())["earlier_sessions"] for run in RUNS]
    went_on = sum(map(len, sessions))
    assert went_on == (1 if deed is kill_worker else 2), "the others went on from their checkpoints, or never began"


def test_seven_kills_at_random_moments_lose_nothing_and_do_nothing_twice(
    run_train: RunTrain, preloaded: PreloadedPython, tiny: list[str], tmp_path: Path, sequential: Path
) -> None:
    """Over four slots: a worker, the launcher, or both, whatever they are doing."""
    folder = tmp_path / "runs" / "climb"
    overrides = last_of_each([*tiny, *STUDY, *QUEUE[:2], "hydra.launcher.cpu_slots=4"])
    command = [str(TRAIN), *overrides]
    draw = random.Random(4)
    deeds = [kill_worker, kill_launcher, kill_both, kill_worker, kill_launcher, kill_both, kill_launcher]
    done: dict[Path, int] = {}
    for deed in deeds:
        launcher = preloaded.start(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
        if deed is not kill_launcher:
            wait_for_workers(launcher)
        time.sleep(draw.uniform(0.3, 2.0))
        assert launcher.poll() is None, "over before it was killed"
        deed(launcher.pid)
        launcher.wait(timeout=PATIENCE)
        assert launcher.returncode == (1 if deed is kill_worker else -signal.SIGKILL)
        assert all(file.stat().st_mtime_ns == when for file, when in done.items())
        done = {file: file.stat().st_mtime_ns for file in folder.rglob("summary.json")}
    again = run_train(*overrides, cwd=tmp_path)
    assert (again.code, again.err) == (0, "")
    assert all(file.stat().st_mtime_ns == when for file, when in done.items())
    check_same(folder, sequential)


def wait_for_workers(launcher: "subprocess.Popen[str]") -> None:
    """Until the launcher has started one."""
    until = time.monotonic() + PATIENCE
    while not workers(launcher.pid):
        assert launcher.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)


def test_two_runs_at_a_time_are_two_processes_each(run_train: RunTrain, tiny: list[str]) -> None:
    """Data parallel inside slots, here on the CPU: ranks find their own run's, and one of them tells."""
    queue = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", *QUEUE[1:])
    both = run_train("--multirun", *tiny, "name=two", "arm=a", "seed=1,2", *queue)
    assert (both.code, both.err) == (0, "")
    for seed in (1, 2):
        alone = run_train(*tiny, "name=two", "arm=a", f"seed={seed}", "trainer=cpu").run
        run = both.cwd / "runs" / "two" / "a" / f"seed={seed}"
        curves = [[row["val/loss"] for row in repeatable(path) if "val/loss" in row] for path in (run, alone)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-3)
        assert (run / "output.log").read_text().count("step 78/78") == 2
        assert trained_state(run)["global_step"] == 78
