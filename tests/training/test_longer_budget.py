"""A run that is given more tokens ends as if it had always had them, where its schedule allows that; or says so."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from llama_lab.runs.checkpoint import checkpoint_step, stable
from llama_lab.runs.folder import RunFolder
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.monitor import Monitor
from tests.selection import first
from tests.training.stopping import at, cut, stop, stopped
from tests.training.tiny import identical, planned, repeatable, rows, steps_of, trained, trained_state

# 20 steps or 30, two of them warm-up; with schedule=wsd the last five of 20, or eight of 30, are decay.
SHORT = ("train.tokens=5120", "schedule.warmup=0.1", "train.evaluations=4")
LONG = ("train.tokens=7680", "train.evaluations=5")
RUN = ("train.log_every=3", "train.checkpoint_every=7", "model.dropout=0.1", "schedule.final=0.1")
WSD = (*RUN, "schedule=wsd", "schedule.decay=0.25")
CONSTANT = (*RUN[:-1], "schedule=constant")


Whole = Callable[[tuple[str, ...]], Path]
Short = Callable[[tuple[str, ...], Path], tuple[list[str], Path]]


def extended(folder: Path) -> list[str]:
    return [f"resume='{folder}'", *LONG]


@pytest.fixture(scope="module")
def in_one_go(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder of a run that has the larger budget from the start, and as long a warm-up."""
    settings = [*tiny, *LONG, f"schedule.warmup={2 / 30}"]
    return cache(lambda schedule: trained(*settings, *schedule, f"runs_dir={tmp_path_factory.mktemp('whole')}"))


@pytest.fixture(scope="module")
def short(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Short:
    """The settings and the folder of a run in a folder of runs that has come to the end of the smaller budget."""

    @cache
    def at_its_end(schedule: tuple[str, ...]) -> Path:
        runs_dir = tmp_path_factory.mktemp("short")
        trained(*tiny, *schedule, *SHORT, f"runs_dir={runs_dir}")
        return runs_dir

    def copied(schedule: tuple[str, ...], runs_dir: Path) -> tuple[list[str], Path]:
        shutil.copytree(at_its_end(schedule), runs_dir, dirs_exist_ok=True)
        return [*tiny, *schedule, *SHORT, f"runs_dir={runs_dir}"], runs_dir / "name" / "arm" / "seed=1"

    return copied


@pytest.mark.parametrize("schedule", [CONSTANT, WSD], ids=["constant", "wsd"])
@pytest.mark.slow
def test_a_longer_budget_ends_at_the_same_last_bit_as_if_it_had_been_the_first(
    schedule: tuple[str, ...], short: Short, in_one_go: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = in_one_go(schedule)
    overrides, folder = short(schedule, tmp_path)
    (folder / "wandb_id").write_text("abcd1234")
    other = "schedule.warmup=0.3"  # not 0.1
    trained(*overrides, *extended(folder), other)
    assert (folder / "wandb_id").exists() == (schedule is CONSTANT), "W&B keeps rows that are void"
    assert identical(trained_state(folder), trained_state(whole))
    assert repeatable(folder)[-2:] == repeatable(whole)[-2:], "the last step, and its evaluation"
    rates = [{row["step"]: row["optim/lr"] for row in rows(run) if "optim/lr" in row} for run in (folder, whole)]
    assert {step: rate for step, rate in rates[0].items() if step != 20} == rates[1], "20 was the last, and has a row"
    steps = steps_of(folder, "step")
    assert steps == sorted(steps)
    assert steps_of(folder, "val/loss") == [5, 10, 15, 20 if schedule is CONSTANT else 18, 24, 30]
    assert capsys.readouterr().err == f"{other}: comes too late, the run keeps its warm-up of 2 steps\n"


@pytest.mark.parametrize("step", first(1, ["17", "25"]))
@pytest.mark.slow
def test_a_longer_budget_that_is_killed_goes_on(step: str, short: Short, in_one_go: Whole, tmp_path: Path) -> None:
    overrides, folder = short(WSD, tmp_path)
    more = [*overrides, *extended(folder)]
    stopped(at(Monitor, "on_train_batch_end", int(step)), cut, *more)
    assert identical(trained_state(trained(*more)), trained_state(in_one_go(WSD)))


def test_a_run_with_a_decay_keeps_the_checkpoint_before_it(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, *WSD, *SHORT, f"runs_dir={tmp_path}"]
    last = stopped(at(Checkpointing, "on_validation_end", 15), cut, *overrides).folder.checkpoint
    assert (checkpoint_step(last), checkpoint_step(stable(last))) == (14, 15)
    trained(*overrides)
    assert (checkpoint_step(last), checkpoint_step(stable(last))) == (20, 15)
    assert sorted(file.name for file in last.parent.iterdir()) == ["last.ckpt", "stable.ckpt"]


@pytest.mark.slow
def test_a_run_that_is_given_more_in_its_stable_phase_goes_on_where_it_is(
    tiny: list[str], in_one_go: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*tiny, *WSD, *SHORT, f"runs_dir={tmp_path}"]
    folder = stopped(at(Monitor, "on_train_batch_end", 11), stop, *overrides).folder
    capsys.readouterr()
    more = [*overrides, *extended(folder.path)]
    assert checkpoint_step(folder.checkpoint_for(planned(*more).cfg)) == 11
    trained(*more)
    assert identical(trained_state(folder.path), trained_state(in_one_go(WSD)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("schedule", first(1, ["wsd", "cosine", "linear"]))
@pytest.mark.slow
def test_a_schedule_that_has_seen_the_end_says_that_the_rate_rises_again(
    schedule: str, short: Short, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As wsd has, whose checkpoint before the decay is gone."""
    overrides, folder = short(WSD if schedule == "wsd" else (*RUN, f"schedule={schedule}"), tmp_path)
    stable(RunFolder(folder).checkpoint).unlink(missing_ok=schedule != "wsd")
    trained(*overrides, *extended(folder))
    told = capsys.readouterr().err
    assert told.startswith("train.tokens=7680: the learning rate of the first 20 steps")
    assert "rises again" in told
    assert told.count("\n") == 1
