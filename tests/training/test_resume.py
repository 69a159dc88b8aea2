"""A run that was stopped, however and wherever, goes on with the same command to the same last bit."""

import shlex
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Status, Summary
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.command import train_run
from llama_lab.training.monitor import Monitor
from tests.conftest import Command, last_of_each
from tests.training import stopping
from tests.training.stopping import (
    MASKED,
    RECURRENT,
    RUN,
    Moment,
    at,
    cut,
    ending,
    ends_as_the_whole_run,
    stop,
    stopped,
)
from tests.training.tiny import on_pairs, planned, repeatable, rows, steps_of, trained, trained_state


@pytest.fixture
def overrides(tiny: list[str], tmp_path: Path) -> list[str]:
    """The command of a run that is stopped."""
    return [*tiny, *RUN, f"runs_dir={tmp_path}"]


STOPS: dict[str, Moment] = {
    "between two checkpoints": at(Monitor, "on_train_batch_end", 14),
    "at a checkpoint": at(Monitor, "on_train_batch_end", 8),
    "before an evaluation": at(Monitor, "on_train_batch_end", 10),
    "during an evaluation": at(Monitor, "on_validation_start", 10),
    "after an evaluation": at(Monitor, "on_validation_end", 10),
    "at an evaluation and checkpoint": at(Monitor, "on_validation_start", 20),
}


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param(moment, number, marks=[] if (i + j) % 2 else pytest.mark.matrix, id=f"{moment}, {number.name}")
        for i, moment in enumerate(STOPS)
        for j, number in enumerate((signal.SIGINT, signal.SIGTERM))
    ],
)
def test_a_run_asked_to_stop_goes_on_as_if_it_had_not_been(
    moment: str, number: signal.Signals, whole: Path, overrides: list[str]
) -> None:
    stopped(STOPS[moment], partial(stop, number), *overrides)
    assert ends_as_the_whole_run(whole, *overrides)


CUTS: dict[str, Moment] = {
    "before the first checkpoint": at(Monitor, "on_train_batch_end", 2),
    "between two checkpoints": at(Monitor, "on_train_batch_end", 15),
    "during an evaluation": at(Monitor, "on_validation_start", 20),
    "between an evaluation and its checkpoint": at(Monitor, "on_validation_end", 20),
    "after an evaluation and its checkpoint": at(Checkpointing, "on_validation_end", 20),
    "while the checkpoint is written": stopping.while_writing_the_checkpoint,
    "before the first checkpoint is moved": stopping.while_replacing_the_checkpoint(2),
    "after the first checkpoint is moved": stopping.while_replacing_the_checkpoint(3),
    "after the last step": at(Monitor, "on_validation_end", 40),
}


@pytest.mark.parametrize("moment", CUTS)
def test_a_run_that_dies_goes_on_to_the_same_end(moment: str, whole: Path, overrides: list[str]) -> None:
    run = stopped(CUTS[moment], cut, *overrides)
    if run.folder.metrics.exists():
        with run.folder.metrics.open("a") as file:
            file.write("38,97")  # and a row half written
    assert ends_as_the_whole_run(whole, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("own", [RECURRENT, MASKED], ids=["recurrent", "masked"])
def test_a_run_of_its_own_kind_that_dies_goes_on_to_the_same_end(
    own: list[str], overrides: list[str], tmp_path: Path
) -> None:
    whole = trained(*overrides, *own, f"runs_dir={tmp_path / 'whole'}")
    stopped(CUTS["between two checkpoints"], cut, *overrides, *own)
    assert ends_as_the_whole_run(whole, *overrides, *own)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_a_run_on_pairs_that_dies_goes_on_to_the_same_end(family: str, overrides: list[str], tmp_path: Path) -> None:
    own = [*on_pairs(overrides, tmp_path), f"family={family}"]
    whole = trained(*own, f"runs_dir={tmp_path / 'whole'}")
    stopped(CUTS["between two checkpoints"], cut, *own)
    assert ends_as_the_whole_run(whole, *own)


def test_a_run_that_a_search_prunes_saves_and_goes_on_to_the_same_end(whole: Path, overrides: list[str]) -> None:
    run = planned(*overrides)
    with at(Monitor, "on_train_batch_end", 14)(run.folder.prune_request.touch):
        assert train_run(run) == "pruned"
    assert run.folder.status == Status("pruned", "stopped by the search at step 14 of 40")
    assert run.folder.final_loss is None
    assert run.folder.prune_request.exists(), "which is of the session before"
    assert ends_as_the_whole_run(whole, *overrides)


@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 14), ("on_validation_end", 10)])
def test_a_run_that_a_callback_ends_saves_and_goes_on_to_the_same_end(
    hook: str, step: int, whole: Path, overrides: list[str]
) -> None:
    run = planned(*overrides, ending(hook, step))
    assert train_run(run) == "interrupted"
    assert run.folder.status == Status("interrupted", f"stopped by a callback at step {step} of 40")
    assert trained_state(run.folder.path)["global_step"] == step
    assert ends_as_the_whole_run(whole, *overrides, ending(hook, step))


def test_a_run_that_a_callback_ends_before_its_first_step_is_not_done(command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, *RUN, ending("on_fit_start", 0))
    assert ran.code == 130
    assert RunFolder(ran.run).status == Status("interrupted", "stopped by a callback at step 0 of 40")
    assert ran.err.startswith("stopped by a callback at step 0 of 40\nstopped; go on with the same command:\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_how_to_go_on(number: signal.Signals, command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, *RUN, "train.prompt='a b'"]
    with at(Monitor, "on_train_batch_end", 14)(partial(stop, number)):
        ran = command(*overrides)
    assert ran.code == 130
    assert RunFolder(ran.run).status == Status("interrupted", "stopped by the user at step 14 of 40")
    assert trained_state(ran.run)["global_step"] == 14
    assert ran.err.splitlines()[-2:] == [
        "stopped; go on with the same command:",
        f"  {shlex.join(['python', 'train.py', *last_of_each(overrides)])}",
    ]


def twice(number: signal.Signals) -> None:
    stop(number)
    stop(number)


@pytest.mark.parametrize("press", [stop, twice])
def test_a_stopped_command_that_started_over_is_not_to_do_so_again(
    press: Callable[[signal.Signals], None], command: Command, tiny: list[str]
) -> None:
    with at(Monitor, "on_train_batch_end", 14)(partial(press, signal.SIGINT)):
        ran = command(*tiny, *RUN, "overwrite=true")
    told = ran.err.splitlines()[-1]
    if press == stop:
        assert told == f"  {shlex.join(['python', 'train.py', *last_of_each([*tiny, *RUN])])}"
    else:
        assert told.startswith("stopped; run the same command without overwrite=true to resume")


def test_a_second_sigterm_does_not_cut_off_the_checkpoint_of_the_first(whole: Path, overrides: list[str]) -> None:
    stopped(at(Monitor, "on_train_batch_end", 14), partial(twice, signal.SIGTERM), *overrides)
    assert ends_as_the_whole_run(whole, *overrides)


def test_a_second_ctrl_c_stops_at_once_at_the_last_checkpoint(command: Command, tiny: list[str]) -> None:
    with at(Monitor, "on_train_batch_end", 14)(partial(twice, signal.SIGINT)):
        ran = command(*tiny, *RUN)
    assert ran.code == 130
    status = RunFolder(ran.run).status
    assert status.status == "interrupted"
    assert trained_state(ran.run)["global_step"] == 12
    assert "the same command" in ran.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_loses_nothing_else(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, *RUN, "train.evaluations=3"]  # after steps 14, 28, and at the end, which is no multiple
    with at(Monitor, "on_validation_start", 40)(partial(stop, signal.SIGINT)):
        interrupted = command(*overrides)
    assert interrupted.code == 130
    assert trained_state(interrupted.run)["global_step"] == 40
    again = command(*overrides)
    assert (again.code, again.err) == (0, "")
    assert steps_of(again.run, "val/loss") == [14, 28, 40]


@pytest.mark.slow
def test_a_finished_run_is_found_by_its_folder_and_needs_more_tokens(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, "train.tokens=2560"]
    first = command(*overrides)
    folder = first.run.relative_to(first.cwd)
    enough = command(*tiny, "train.tokens=2560", f'resume="{folder}"')
    assert (enough.code, enough.err[:27]) == (2, "error: train.tokens=2560: t")
    assert command("train.tokens=5120", f'resume="{folder}"').code == 0, "the folder holds the other overrides"
    assert trained_state(first.run)["global_step"] == 20
    assert len(list((first.cwd / "runs").rglob("status.json"))) == 1
    nowhere = command(*tiny, "train.tokens=5120", "resume=runs/other")
    assert (nowhere.code, nowhere.err) == (
        2,
        "error: resume=runs/other: holds no run; name a run's folder, or leave resume out\n",
    )


def test_a_finished_run_trains_further_with_more_tokens(whole: Path, tiny: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "name" / "arm" / "seed=1")
    more = (f"runs_dir={tmp_path}", f"resume='{folder}'", "train.tokens=15360")
    assert trained(*tiny, *RUN, *more, arm="another") == folder
    short, further = repeatable(whole), repeatable(folder)
    assert further[: len(short)] == short, "what was logged is history"
    assert [row["step"] for row in further] == sorted(row["step"] for row in further)
    assert steps_of(folder, "val/loss")[:4] == [10, 20, 30, 40]
    assert trained_state(folder)["global_step"] == 60
    peak = planned(*tiny).cfg.optim.lr
    assert short[-2]["optim/lr"] < 0.15 * peak < further[len(short)]["optim/lr"], "the schedule is not the new budget's"


def test_a_run_that_fails_after_its_last_step_keeps_its_rows_and_time(tiny: list[str], tmp_path: Path) -> None:
    overrides = (*tiny, "train.tokens=5120", f"runs_dir={tmp_path}")
    failing = patch("llama_lab.training.recording.sample_text", side_effect=RuntimeError("killed while it sampled"))
    run = planned(*overrides)
    with failing, pytest.raises(RuntimeError, match="while it sampled"):
        train_run(run)
    before = rows(run.folder.path)
    assert rows(trained(*overrides)) == before
    assert Summary.load(run.folder.path).metrics["seconds"] == before[-1]["seconds"] > 0
