"""Searches of tiny runs through the command line: what they find, how they stop and go on, what they refuse."""

import json
import math
import shlex
import signal
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from llama_lab.search.pruning import Planned
from llama_lab.search.settings import SearchSettings
from llama_lab.util.errors import ConfigError
from tests.conftest import TRAIN, Command, Start, last_of_each
from tests.processes import at_work_in, wait_until
from tests.search.searches import SEARCH, SEARCHING, search_refusal, trials
from tests.selection import first
from tests.study.planning import conducted
from tests.training.tiny import identical, repeatable, rows, trained_state

SHORT = ("train.tokens=1500", "train.evaluations=2")
RATES = "optim.lr=tag(log,interval(1e-4,1e-2))"
NORMS = "norm=rmsnorm,layernorm"
PRUNING = (
    *SEARCH,
    "train.tokens=50000",
    "optim.lr=5e-3,1e-9",
    "hydra/sweeper/sampler=grid",
    "hydra.sweeper.seed=1",  # which leaves the order of two as it is
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.pruner.n_startup_trials=1",
)
SLOTS = ("hydra/launcher=local_gpus", "hydra.launcher.cpu_slots=2")


@pytest.mark.slow
def test_the_best_trial_has_the_lowest_loss_and_is_printed_as_its_command(command: Command, tiny: list[str]) -> None:
    wanted = (*tiny, *SEARCH, *SHORT, RATES, NORMS)
    ran = command(*wanted, "hydra.sweeper.n_trials=2")
    assert (ran.code, ran.err) == (0, "")
    found = trials(ran.cwd)
    losses = [rows(ran.cwd / trial["folder"])[-1]["val/loss"] for trial in found]
    assert [float(trial["val/loss"]) for trial in found] == losses
    assert {(trial["status"], trial["evaluations"]) for trial in found} == {("done", "2")}
    best = yaml.safe_load((ran.cwd / "runs" / "found" / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(losses)
    shown = ran.out.splitlines()[-1].strip()
    assert shown == best["command"]
    again = command(*shlex.split(shown)[2:])
    assert again.code == 2, "the command is that of the run, which is there"
    assert f"{found[losses.index(min(losses))]['folder']} already holds a finished run" in again.err

    files = {file: file.stat().st_mtime_ns for file in ran.cwd.rglob("last.ckpt")}
    more = command(*wanted, "hydra.sweeper.n_trials=3")
    assert (more.code, more.err) == (0, "")
    assert trials(ran.cwd)[:2] == found, "more trials go on with the search"
    assert len(trials(ran.cwd)) == 3
    assert all(file.stat().st_mtime_ns == when for file, when in files.items())


@pytest.mark.slow
def test_a_grid_is_hydra_s_own(command: Command, tiny: list[str]) -> None:
    space = (NORMS, "seed=range(1,3)")
    sweep = command(*tiny, "--multirun", "name=found", "trainer=cpu", *SHORT, *space)
    assert (sweep.code, sweep.err) == (0, "")
    runs = {file.parent.relative_to(sweep.cwd) for file in sweep.cwd.rglob("status.json")}
    ran = command(*tiny, *SEARCH, *SHORT, *space, "hydra/sweeper/sampler=grid")
    assert (ran.code, ran.err) == (0, "")
    assert {Path(trial["folder"]) for trial in trials(ran.cwd)} == runs
    assert len(runs) == len(trials(ran.cwd)) == 4
    assert "step 1/" not in ran.out, "every run was there"
    assert {trial["status"] for trial in trials(ran.cwd)} == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "jobs", "stops"), [("qmc", 1, [1, 3]), ("random", 2, [1, 3])])
def test_a_sampler_with_a_seed_proposes_the_same_after_any_stop_and_in_any_batch(
    sampler: str, jobs: int, stops: list[int], command: Command, tiny: list[str]
) -> None:
    chosen = (f"hydra/sweeper/sampler={sampler}", "hydra/sweeper/pruner=hyperband")
    refused = ("model.n_heads=3", RATES, NORMS, *chosen)  # the trials fail at once
    proposed = {}
    for name, batch, ends in (("once", 1, [3]), ("other", jobs, stops)):
        for end in ends:
            counts = (f"hydra.sweeper.n_jobs={batch}", f"hydra.sweeper.n_trials={end}")
            command(*tiny, *SEARCH, *refused, f"name={name}", *counts)
        proposed[name] = [(trial["optim.lr"], trial["norm"]) for trial in trials(Path(), name)]
    assert proposed["once"] == proposed["other"]
    assert len(set(proposed["once"])) == 3


@pytest.mark.slow
def test_a_trial_that_fails_or_diverges_does_not_end_the_search(command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, *SEARCH, *SHORT, "model.n_heads=2,3", "optim.lr=1e-3,1e30", "hydra/sweeper/sampler=grid")
    assert ran.code == 0
    ended = {(trial["model.n_heads"], trial["optim.lr"]): trial for trial in trials(ran.cwd)}
    assert {key: trial["status"] for key, trial in ended.items()} == {
        ("2", "0.001"): "done",
        ("2", "1e+30"): "diverged",
        ("3", "0.001"): "failed",
        ("3", "1e+30"): "failed",
    }
    assert "model.n_heads=3" in ended["3", "0.001"]["message"]
    assert ran.out.splitlines()[-1].endswith("model.n_heads=2 optim.lr=0.001")


@pytest.mark.slow
def test_a_search_of_which_all_trials_fail_is_an_error(command: Command, tiny: list[str]) -> None:
    ran = command(
        *tiny, *SEARCH, *SLOTS, "model.n_heads=3,5", "hydra/sweeper/sampler=grid", "hydra/sweeper/pruner=halving"
    )
    assert ran.code == 1
    assert ran.out.startswith("trials 0 and 1 (2 in all)\n"), "a trial for each slot"
    assert ran.err.startswith("error: no trial of runs/found finished: 2 failed; trial 1: model.n_heads=")
    assert ran.err.endswith("search other values, under another name=\n")


@pytest.mark.slow
def test_a_search_starts_over_once(command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (*tiny, *SEARCH, *SHORT, NORMS, "hydra/sweeper/sampler=grid")  # a run for each of two norms
    command(*wanted)
    marks = [Path(trial["folder"]) / "mine" for trial in trials(Path())]
    for mark in marks:
        mark.touch()
    reported = []
    report = Planned.report
    monkeypatch.setattr(
        Planned, "report", lambda self: reported.append((self.run.folder.path / "mine").exists()) or report(self)
    )
    command(*wanted, "overwrite=true", "hydra.sweeper.n_trials=1")
    assert sorted(mark.exists() for mark in marks) == [False, True]
    ran = command(*wanted)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("everything is in") == 1, "the first trial's run was trained again"
    assert not any(mark.exists() for mark in marks)
    assert not any(reported), "no evaluation of an earlier run is the trial's"
    again = command(*wanted[:-1], "overwrite=true", "hydra.sweeper.n_trials=3")  # of two norms, so one comes again
    assert again.out.count("everything is in") == len({trial["folder"] for trial in trials(Path())})
    assert len(trials(Path())) == 3
    assert "overwrite" not in again.out.splitlines()[-1], "the best as a command must not delete it"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), SLOTS])
def test_a_bad_learning_rate_is_pruned(launcher: tuple[str, ...], command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, *PRUNING, *launcher)
    assert (ran.code, ran.err) == (0, "")
    good, bad = trials(ran.cwd)
    assert (good["optim.lr"], good["status"], bad["status"]) == ("0.005", "done", "pruned")
    assert int(good["evaluations"]) == 4 > int(bad["evaluations"])
    assert f"trial 1: optim.lr=1e-09: pruned at evaluation {bad['evaluations']}" in ran.out
    assert "best of 2 trials: 1 done, 1 pruned" in ran.out
    folder = ran.cwd / bad["folder"]
    assert json.loads((folder / "status.json").read_text())["status"] == "pruned"
    assert rows(folder)[-1]["step"] < 195
    assert not (folder / ".prune").exists()


STOPPED = (
    *SEARCH,
    "hydra.sweeper.n_trials=3",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.sampler.n_startup_trials=1",
    "hydra/sweeper/pruner=none",
    "train.tokens=10240",
    "train.checkpoint_every=5",
    RATES,
    NORMS,
)


@pytest.fixture(scope="module")
def undisturbed(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a search of three trials was never stopped."""
    ran = conducted(tmp_path_factory.mktemp("undisturbed"), environment, *tiny, *STOPPED)
    assert (ran.code, ran.err) == (0, "")
    return ran.cwd


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "launcher", "code"), first(1, [(signal.SIGINT, SLOTS, 130), (signal.SIGKILL, (), -signal.SIGKILL)])
)
def test_a_search_that_is_stopped_goes_on_as_if_it_had_not_been(
    number: signal.Signals,
    launcher: tuple[str, ...],
    code: int,
    start: Start,
    environment: dict[str, str],
    tiny: list[str],
    tmp_path: Path,
    undisturbed: Path,
) -> None:
    process = start(str(TRAIN), *last_of_each([*tiny, *STOPPED, *launcher]), cwd=tmp_path)
    wait_until(lambda: len(list((tmp_path / "runs").rglob("last.ckpt"))) == 2)
    process.send_signal(number)
    assert process.wait() == code, process.err.read_text()
    wait_until(lambda: not at_work_in(tmp_path))
    again = conducted(tmp_path, environment, *tiny, *STOPPED)
    assert (again.code, again.err) == (0, "")
    assert trials(tmp_path) == trials(undisturbed)
    sessions = []
    for trial in trials(tmp_path):
        ours, theirs = tmp_path / trial["folder"], undisturbed / trial["folder"]
        assert repeatable(ours) == repeatable(theirs)
        assert identical(trained_state(ours), trained_state(theirs))
        sessions.append(len(json.loads((ours / "environment.json").read_text())["earlier_sessions"]))
    assert sessions == [0, 1, 0], "the second went on from its checkpoint"


@pytest.mark.slow
def test_what_a_kill_leaves_of_the_journal_does_not_matter(command: Command, tiny: list[str]) -> None:
    wanted = (*tiny, *SEARCH, "model.n_heads=3", RATES)
    command(*wanted, "hydra.sweeper.n_trials=1")
    journal = Path("runs/found/optuna.journal")
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"wor')
    Path(f"{journal}.lock").symlink_to(journal)
    ran = command(*wanted, "hydra.sweeper.n_trials=2")
    assert "no trial of runs/found finished: 2 failed" in ran.err
    journal.write_bytes(b"{}\n" + journal.read_bytes())
    damaged = command(*wanted, "hydra.sweeper.n_trials=2")
    assert damaged.code == 2
    assert damaged.err.startswith(
        "error: name=found: runs/found/optuna.journal is damaged, KeyError: 'op_code'; restore"
    )
    anew = command(*wanted, "hydra.sweeper.n_trials=1", "overwrite=true")
    assert "no trial of runs/found finished: 1 failed" in anew.err


@pytest.mark.slow
def test_a_search_can_be_kept_in_a_database(command: Command, tiny: list[str]) -> None:
    wanted = (*tiny, *SEARCH, "model.n_heads=3", RATES, "hydra.sweeper.storage=sqlite:///search.db")
    for count, anew in ((2, False), (1, True)):
        ran = command(*wanted, f"hydra.sweeper.n_trials={count}", f"overwrite={anew}")
        assert f"finished: {count} failed" in ran.err
    elsewhere = command(*wanted, "hydra.sweeper.n_trials=1", "runs_dir=elsewhere")
    assert "no trial of elsewhere/found finished: 1 failed" in elsewhere.err, "a search of its own"
    for folder in ("runs/found", "elsewhere/found"):
        study = optuna.load_study(study_name=str(Path(folder).absolute()), storage="sqlite:///search.db")
        assert len(study.trials) == 1


GRID = "hydra/sweeper/sampler=grid"
SWEEPER = "hydra.sweeper"


@pytest.mark.parametrize(
    ("overrides", "message"),
    first(
        5,
        [
            ("norm=rmsnorm", "hydra/sweeper=optuna: there is nothing to search; give a space, such as norm="),
            (f"{RATES} {GRID}", f"{RATES}: an interval has no grid"),
            (f"{RATES} resume=runs/a", "resume=runs/a: a search trains runs of its own"),
            ("train.log_every=5,10", "train.log_every=5,10: makes no difference to what is trained"),
            (f"{RATES} hydra/launcher=ray", f"{SWEEPER}.n_jobs=null: hydra/launcher=ray has no slots to fill"),
            (f"{RATES} {SWEEPER}.metric=val/los", f"{SWEEPER}.metric=val/los: no such metric (did you mean val/loss"),
            (
                "family=decoder,encoder_decoder",
                f"{SWEEPER}.metric=val/loss: trials predict unlike tokens, whose losses",
            ),
            (f"{RATES} {SWEEPER}.sampler=grid", f"{SWEEPER}.sampler=grid: choose it as {GRID}"),
            (
                f"{RATES} {SWEEPER}.pruner.n_startup_trials=1.5",
                f"{SWEEPER}.pruner.n_startup_trials=1.5: must be a whole",
            ),
            (
                f"{RATES} hydra/sweeper/pruner=medin",
                "hydra/sweeper/pruner=medin: no such option (did you mean median?)",
            ),
        ],
    ),
)
def test_what_cannot_be_searched_is_refused_before_anything_trains(
    overrides: str, message: str, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert search_refusal(*tiny, *SEARCHING, *overrides.split()).startswith(message)
    assert not [file for file in tmp_path.rglob("*") if file.name in ("status.json", "search.csv")]


def test_a_setting_of_the_search_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^hydra\.sweeper\.n_trials=0: must be a positive whole number"):
        SearchSettings(n_trials=0)
    with pytest.raises(ConfigError, match=r"^hydra\.sweeper\.storage=a\.db: must be an Optuna URL"):
        SearchSettings(storage="a.db")


def test_a_search_needs_a_sweep_of_trainings(command: Command, evaluating: Command, tiny: list[str]) -> None:
    for ran in (command(*tiny, "hydra/sweeper=optuna"), evaluating("run=here", "hydra/sweeper=optuna")):
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert ran.err.startswith("error: hydra/sweeper=optuna: starts many runs, and this is one; add --multirun")
    ran = evaluating("--multirun", "run=here", "top_k=range(1,3)", "hydra/sweeper=optuna")
    assert ran.err == "error: hydra/sweeper=optuna: searches over training, with train.py; leave it out\n"


@pytest.mark.slow
def test_another_search_in_the_same_folder_is_refused(command: Command, tiny: list[str]) -> None:
    command(*tiny, *SEARCH, "model.n_heads=3", RATES, "hydra.sweeper.n_trials=1")
    for other in ("train.tokens=4000", "hydra/sweeper/sampler=qmc", "hydra.sweeper.seed=2"):
        ran = command(*tiny, *SEARCH, "model.n_heads=3", RATES, other, "hydra.sweeper.n_trials=1")
        assert ran.code == 2
        assert ran.err.startswith(f"error: {other}: the search in runs/found has ")
    assert "name=found" not in command(*tiny, *SEARCH[:2], "model.n_heads=3", RATES, "hydra.sweeper.n_trials=1").err
    assert len(list(Path("runs").iterdir())) == 2, "a search without a name has one of its settings"


def test_without_optuna_its_pip_line_is_told(
    command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "optuna" else 1)
    ran = command(*tiny, *SEARCH, RATES)
    assert (ran.code, ran.err) == (2, "error: hydra/sweeper=optuna: needs Optuna; pip install 'llama-lab[optuna]'\n")


@pytest.mark.slow
def test_a_job_returns_its_validation_loss_to_any_sweeper(
    command: Command, tiny: list[str], returned: list[Any]
) -> None:
    sweep = (*tiny, *SHORT, "--multirun", "name=found", "trainer=cpu", "optim.lr=1e-3,1e30")
    ran = command(*sweep)
    assert ran.code == 0
    done, diverged = returned
    (record,) = ran.cwd.glob("runs/found/*/seed=1/summary.json")
    assert (done, diverged) == (json.loads(record.read_text())["val/loss"], math.inf)
    command(*sweep)
    assert returned[2] == done, "also of a run that was there"
