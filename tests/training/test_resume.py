"""A run that was stopped, however and wherever, goes on with the same command to the same last bit."""

import shlex
import shutil
import signal
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
from tests.selection import first
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
    "between two checkpoints": at(Monitor, "on_train_batch_end", 10),
    "during an evaluation": at(Monitor, "on_validation_start", 6),
    "at an evaluation and checkpoint": at(Monitor, "on_validation_start", 12),
    "at a checkpoint": at(Monitor, "on_train_batch_end", 8),
    "before an evaluation": at(Monitor, "on_train_batch_end", 6),
    "after an evaluation": at(Monitor, "on_validation_end", 6),
}


@pytest.mark.parametrize("moment", first(2, STOPS))
def test_a_run_asked_to_stop_goes_on_as_if_it_had_not_been(moment: str, whole: Path, overrides: list[str]) -> None:
    stopped(STOPS[moment], stop, *overrides)
    assert ends_as_the_whole_run(whole, *overrides)


CUTS: dict[str, Moment] = {
    "between two checkpoints": at(Monitor, "on_train_batch_end", 11),
    "while the checkpoint is written": stopping.while_writing_the_checkpoint,
    "between an evaluation and its checkpoint": at(Monitor, "on_validation_end", 12),
    "before the first checkpoint": at(Monitor, "on_train_batch_end", 2),
    "during an evaluation": at(Monitor, "on_validation_start", 12),
    "after an evaluation and its checkpoint": at(Checkpointing, "on_validation_end", 12),
    "before the first checkpoint is moved": stopping.while_replacing_the_checkpoint(2),
    "after the first checkpoint is moved": stopping.while_replacing_the_checkpoint(3),
    "after the last step": at(Monitor, "on_validation_end", 24),
}


@pytest.mark.parametrize("moment", first(3, CUTS))
def test_a_run_that_dies_goes_on_to_the_same_end(moment: str, whole: Path, overrides: list[str]) -> None:
    run = stopped(CUTS[moment], cut, *overrides)
    if run.folder.metrics.exists():
        with run.folder.metrics.open("a") as file:
            file.write("22,97")  # and a row half written
    assert ends_as_the_whole_run(whole, *overrides)


OWN = {"pairs": ["family=encoder_decoder"], "masked": MASKED, "recurrent": RECURRENT}


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(2, OWN))
def test_a_run_of_its_own_kind_that_dies_goes_on_to_the_same_end(
    kind: str, overrides: list[str], tmp_path: Path
) -> None:
    shared = on_pairs(overrides, tmp_path) if kind == "pairs" else overrides
    own = [*shared, *OWN[kind]]
    whole = trained(*own, f"runs_dir={tmp_path / 'whole'}")
    stopped(CUTS["between two checkpoints"], cut, *own)
    assert ends_as_the_whole_run(whole, *own)


@pytest.mark.slow
def test_a_run_that_a_search_prunes_saves_and_goes_on_to_the_same_end(whole: Path, overrides: list[str]) -> None:
    run = planned(*overrides)
    with at(Monitor, "on_train_batch_end", 14)(run.folder.prune_request.touch):
        assert train_run(run) == "pruned"
    assert run.folder.status == Status("pruned", "stopped by the search at step 14 of 24")
    assert run.folder.final_loss is None
    assert run.folder.prune_request.exists(), "which is of the session before"
    assert ends_as_the_whole_run(whole, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("hook", first(1, ["on_validation_end", "on_train_batch_end"]))
def test_a_run_that_a_callback_ends_saves_and_goes_on_to_the_same_end(
    hook: str, whole: Path, overrides: list[str]
) -> None:
    run = planned(*overrides, ending(hook, 18))
    assert train_run(run) == "interrupted"
    assert run.folder.status == Status("interrupted", "stopped by a callback at step 18 of 24")
    assert trained_state(run.folder.path)["global_step"] == 18
    assert ends_as_the_whole_run(whole, *overrides, ending(hook, 18))


@pytest.mark.slow
def test_a_run_that_a_callback_ends_before_its_first_step_is_not_done(command: Command, tiny: list[str]) -> None:
    ran = command(*tiny, *RUN, ending("on_fit_start", 0))
    assert ran.code == 130
    assert RunFolder(ran.run).status == Status("interrupted", "stopped by a callback at step 0 of 24")
    assert ran.err.startswith("stopped by a callback at step 0 of 24\nstopped; go on with the same command:\n")


def test_a_stopped_command_says_how_to_go_on_without_starting_over(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, *RUN, "train.prompt='a b'"]
    with at(Monitor, "on_train_batch_end", 14)(partial(stop, signal.SIGINT)):
        ran = command(*overrides, "overwrite=true")
    assert ran.code == 130
    assert RunFolder(ran.run).status == Status("interrupted", "stopped by the user at step 14 of 24")
    assert trained_state(ran.run)["global_step"] == 14
    assert ran.err.splitlines()[-2:] == [
        "stopped; go on with the same command:",
        f"  {shlex.join(['python', 'train.py', *last_of_each(overrides)])}",
    ]


def twice(number: signal.Signals) -> None:
    stop(number)
    stop(number)


@pytest.mark.slow
def test_a_second_sigterm_does_not_cut_off_the_checkpoint_of_the_first(whole: Path, overrides: list[str]) -> None:
    stopped(at(Monitor, "on_train_batch_end", 14), partial(twice, signal.SIGTERM), *overrides)
    assert ends_as_the_whole_run(whole, *overrides)


def test_a_second_ctrl_c_stops_at_once_at_the_last_checkpoint(command: Command, tiny: list[str]) -> None:
    with at(Monitor, "on_train_batch_end", 14)(partial(twice, signal.SIGINT)):
        ran = command(*tiny, *RUN, "overwrite=true")
    assert ran.code == 130
    assert RunFolder(ran.run).status.status == "interrupted"
    assert trained_state(ran.run)["global_step"] == 12
    assert "the same command without overwrite=true" in ran.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_loses_nothing_else(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, *RUN, "train.evaluations=5"]  # after steps 5, 10, 15, 20, and at the end
    with at(Monitor, "on_validation_start", 24)(partial(stop, signal.SIGINT)):
        interrupted = command(*overrides)
    assert interrupted.code == 130
    assert trained_state(interrupted.run)["global_step"] == 24
    again = command(*overrides)
    assert (again.code, again.err) == (0, "")
    assert steps_of(again.run, "val/loss") == [5, 10, 15, 20, 24]


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
    assert (nowhere.code, nowhere.err.count("\n")) == (2, 1)
    assert nowhere.err.startswith("error: resume=runs/other: holds no run")


def test_a_finished_run_trains_further_with_more_tokens(whole: Path, tiny: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "name" / "arm" / "seed=1")
    more = (f"runs_dir={tmp_path}", f"resume='{folder}'", "train.tokens=9216")
    assert trained(*tiny, *RUN, *more, arm="another") == folder
    short, further = repeatable(whole), repeatable(folder)
    assert further[: len(short)] == short, "what was logged is history"
    assert [row["step"] for row in further] == sorted(row["step"] for row in further)
    assert steps_of(folder, "val/loss")[:4] == [6, 12, 18, 24]
    assert trained_state(folder)["global_step"] == 36
    peak = planned(*tiny).cfg.optim.lr
    assert short[-2]["optim/lr"] < 0.15 * peak < further[len(short)]["optim/lr"], "the schedule is not the new budget's"


@pytest.mark.slow
def test_a_run_that_fails_after_its_last_step_keeps_its_rows_and_time(tiny: list[str], tmp_path: Path) -> None:
    overrides = (*tiny, "train.tokens=2048", f"runs_dir={tmp_path}")
    failing = patch("llama_lab.training.recording.sample_text", side_effect=RuntimeError("killed while it sampled"))
    run = planned(*overrides)
    with failing, pytest.raises(RuntimeError, match="while it sampled"):
        train_run(run)
    before = rows(run.folder.path)
    assert rows(trained(*overrides)) == before
    assert Summary.load(run.folder.path).metrics["seconds"] == before[-1]["seconds"] > 0
