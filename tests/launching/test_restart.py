"""Real runs through the queue: the numbers of a sequential study, whoever is killed on the way."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import TRAIN, RunTrain, last_of_each
from tests.launching.conftest import Launch, ended, saved, sessions
from tests.processes import at_work_in, wait_until
from tests.study.planning import conducted
from tests.study.test_restart import untimed
from tests.training.tiny import identical, logged, repeatable, trained, trained_state

pytestmark = pytest.mark.slow

RUN = ("name=climb", "train.tokens=40000", "train.checkpoint_every=10", "trainer=cpu")
STUDY = "{learning_rates: null, measure_speed: false, axes: [norm], seeds: [1, 2]}"
QUEUE = ("hydra/launcher=local_gpus", "hydra.launcher.cpu_slots=2")
RUNS = [f"{arm}/seed={seed}" for seed in (1, 2) for arm in ("vanilla", "+rmsnorm")]


def test_after_a_kill_the_same_command_loses_nothing_and_does_nothing_twice(
    launcher: Launch, run_train: RunTrain, tiny: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """The launcher of a study that an experiment chooses is killed, then Ctrl-C is pressed, while two runs train."""
    experiment = tmp_path / "mine" / "experiment" / "climb.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(f"# @package _global_\ndefaults: [override /study: ladder]\nstudy: {STUDY}\n")
    overrides = ("--config-dir", "mine", "experiment=climb", *RUN, *QUEUE)
    study = tmp_path / "runs" / "climb"
    runs = [study / run for run in RUNS]

    killed = launcher(*overrides, program=(str(TRAIN),))
    wait_until(lambda: saved(runs, 0) == 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: not at_work_in(tmp_path))
    began, stopped = time.time(), launcher(*overrides, program=(str(TRAIN),))
    wait_until(lambda: saved(runs[2:], began) == 2)  # so the first two are done
    stopped.send_signal(signal.SIGINT)
    code, shown = ended(stopped)
    assert code == 130, shown
    statuses = [json.loads(file.read_text())["status"] for file in study.rglob("status.json")]
    assert statuses.count("interrupted") == shown.count("stopped by the user at step") > 0
    done = {file: file.stat().st_mtime_ns for file in study.rglob("summary.json")}
    assert done

    again = run_train(*tiny, *overrides, cwd=tmp_path)
    assert (again.code, again.err) == (0, "")
    assert f"{4 - len(done)} done, in" in again.out
    assert all(file.stat().st_mtime_ns == when for file, when in done.items())
    assert sum(map(sessions, runs)) == 2 + statuses.count("interrupted"), "each went on as often as it was stopped"
    recorded = json.loads((runs[0] / "environment.json").read_text())["command"]
    assert {*recorded} == {str(TRAIN), *last_of_each([*tiny, *overrides])}
    assert "val loss" in (runs[0] / "output.log").read_text()

    axes = ("study=ladder", "study.learning_rates=null", "study.measure_speed=false", "study.axes=[norm]")
    cwd = tmp_path / "one_by_one"
    cwd.mkdir()
    assert conducted(cwd, environment, *tiny, *RUN, *axes, "study.seeds=[1,2]").code == 0
    sequential = cwd / "runs" / "climb"
    assert untimed(study / "summary.csv") == untimed(sequential / "summary.csv")
    for run in RUNS:
        assert repeatable(study / run) == repeatable(sequential / run)
        assert identical(trained_state(study / run), trained_state(sequential / run))


@pytest.mark.matrix
def test_two_runs_at_a_time_are_two_processes_each(run_train: RunTrain, tiny: list[str], tmp_path: Path) -> None:
    """Data parallel inside slots, here on the CPU: ranks find their own run's, and one of them tells."""
    queue = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", *QUEUE)
    short = (*tiny, "train.tokens=5120", "name=two", "arm=a")
    both = run_train("--multirun", *short, "seed=1,2", *queue)
    assert (both.code, both.err) == (0, "")
    for seed in (1, 2):
        alone = trained(*short, f"seed={seed}", "trainer=cpu", f"runs_dir={tmp_path}")
        run = both.cwd / "runs" / "two" / "a" / f"seed={seed}"
        assert logged(run, "val/loss") == pytest.approx(logged(alone, "val/loss"), rel=1e-3)
        assert (run / "output.log").read_text().count("step 20/20") == 2
        assert trained_state(run)["global_step"] == 20
