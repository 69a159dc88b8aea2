"""A run that was stopped, however and wherever, goes on with the same command to the same last bit."""

import os
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from llama_lab.runs import checkpoint
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Status, Summary
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.command import train_run
from llama_lab.training.monitor import Monitor
from tests.conftest import Command, last_of_each
from tests.training.tiny import identical, planned, repeatable, rows, trained_state

# 40 steps of two micro-batches; evaluations after steps 10, 20, 30, 40; checkpoints after 4, 8 ... 40.
RUN = [
    "train.tokens=10240",
    "train.micro_batch_size=4",
    "train.log_every=3",
    "train.evaluations=4",
    "train.checkpoint_every=4",
    "model.dropout=0.1",
    "train.ema=0.9",
]


class Power(BaseException):
    """A power cut, as far as one can be had inside a process: nothing that would handle an error knows it."""


def stop(number: signal.Signals) -> None:
    """Ask this process to stop, as Ctrl-C or a cluster does."""
    os.kill(os.getpid(), number)


def cut() -> None:
    raise Power


Moment = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


def at(owner: type, hook: str, step: int, before: bool = False) -> Moment:
    """The moment after (or before) a callback's hook ran at a step."""

    def arrange(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        ran = getattr(owner, hook)

        def run(self: Any, trainer: Any, *rest: Any) -> None:
            due = trainer.global_step == step
            if due and before:
                act()
            ran(self, trainer, *rest)
            if due and not before:
                act()

        monkeypatch.setattr(owner, hook, run)

    return arrange


def while_writing_the_checkpoint(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """The moment when half of a second checkpoint is written."""
    save, saved = L.Trainer.save_checkpoint, []

    def save_checkpoint(trainer: L.Trainer, path: Path) -> None:
        saved.append(path)
        if len(saved) == 2:
            path.write_bytes(b"half")
            act()
        save(trainer, path)

    monkeypatch.setattr(L.Trainer, "save_checkpoint", save_checkpoint)


def while_replacing_the_checkpoint(move: int) -> Moment:
    """The moment before a move of files: the first puts the first checkpoint in its place, two more the second."""

    def arrange(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        replaced = []

        def replace(*paths: Any) -> None:
            replaced.append(paths)
            if len(replaced) == move:
                act()
            os.rename(*paths)

        monkeypatch.setattr(checkpoint.os, "replace", replace)

    return arrange


@pytest.fixture(scope="module")
def whole(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody stops."""
    run = planned(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('whole')}")
    assert train_run(run) == "done"
    return run.folder.path


def ends_as_the_whole_run(whole: Path, *overrides: str) -> bool:
    """Give the same command again; is everything what it would have been?"""
    run = planned(*overrides)
    assert train_run(run) == "done"
    assert repeatable(run.folder.path) == repeatable(whole)
    return identical(trained_state(run.folder.path), trained_state(whole))


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
    moment: str, number: signal.Signals, whole: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*tiny, *RUN, f"runs_dir={tmp_path}"]
    with monkeypatch.context() as patched:
        STOPS[moment](patched, lambda: stop(number))
        assert train_run(planned(*overrides)) == "interrupted"
    assert ends_as_the_whole_run(whole, *overrides)


CUTS: dict[str, Moment] = {
    "before the first checkpoint": at(Monitor, "on_train_batch_end", 2),
    "between two checkpoints": at(Monitor, "on_train_batch_end", 15),
    "during an evaluation": at(Monitor, "on_validation_start", 20),
    "between an evaluation and its checkpoint": at(Monitor, "on_validation_end", 20),
    "after an evaluation and its checkpoint": at(Checkpointing, "on_validation_end", 20),
    "while the checkpoint is written": while_writing_the_checkpoint,
    "before the first checkpoint is moved": while_replacing_the_checkpoint(2),
    "after the first checkpoint is moved": while_replacing_the_checkpoint(3),
    "after the last step": at(Monitor, "on_validation_end", 40),
}


@pytest.mark.parametrize("moment", CUTS)
def test_a_run_that_dies_goes_on_from_its_last_checkpoint_to_the_same_end(
    moment: str, whole: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*tiny, *RUN, f"runs_dir={tmp_path}"]
    run = planned(*overrides)
    with monkeypatch.context() as patched:
        CUTS[moment](patched, cut)
        with pytest.raises(Power):
            train_run(run)
    run.folder.write_status("running")  # as a real power cut leaves it
    if run.folder.metrics.exists():
        with run.folder.metrics.open("a") as file:
            file.write("38,97")  # and a row half written
    assert ends_as_the_whole_run(whole, *overrides)


def test_a_run_that_a_search_prunes_saves_and_goes_on_to_the_same_end(
    whole: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*tiny, *RUN, f"runs_dir={tmp_path}"]
    run = planned(*overrides)
    with monkeypatch.context() as patched:
        at(Monitor, "on_train_batch_end", 14)(patched, run.folder.prune_request.touch)
        assert train_run(run) == "pruned"
    assert run.folder.status == Status("pruned", "stopped by the search at step 14 of 40")
    assert run.folder.final_loss is None
    assert run.folder.prune_request.exists(), "which is of the session before"
    assert ends_as_the_whole_run(whole, *overrides)


def test_a_run_evaluates_once_at_each_of_its_evaluations_whatever_stops_it(whole: Path) -> None:
    assert [row["step"] for row in rows(whole) if "val/loss" in row] == [10, 20, 30, 40]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_says_how_to_go_on_and_exits_with_130(
    number: signal.Signals, command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at(Monitor, "on_train_batch_end", 14)(monkeypatch, lambda: stop(number))
    overrides = [*tiny, *RUN, "train.prompt='a b'"]
    ran = command(*overrides)
    assert ran.code == 130
    status = RunFolder(ran.run).status
    assert status == Status("interrupted", "stopped by the user at step 14 of 40")
    assert trained_state(ran.run)["global_step"] == 14
    assert ran.err.splitlines()[-2:] == [
        "stopped; go on with the same command:",
        f"  {shlex.join(['python', 'train.py', *last_of_each(overrides)])}",
    ]


def test_a_second_sigterm_does_not_cut_off_the_checkpoint_of_the_first(
    whole: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        stop(signal.SIGTERM)
        stop(signal.SIGTERM)

    overrides = [*tiny, *RUN, f"runs_dir={tmp_path}"]
    with monkeypatch.context() as patched:
        at(Monitor, "on_train_batch_end", 14)(patched, twice)
        assert train_run(planned(*overrides)) == "interrupted"
    assert ends_as_the_whole_run(whole, *overrides)


def test_a_second_ctrl_c_stops_at_once_and_the_run_goes_on_from_the_last_checkpoint(
    command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatiently() -> None:
        stop(signal.SIGINT)
        stop(signal.SIGINT)

    at(Monitor, "on_train_batch_end", 14)(monkeypatch, impatiently)
    ran = command(*tiny, *RUN)
    assert ran.code == 130
    status = RunFolder(ran.run).status
    assert status is not None
    assert status.status == "interrupted"
    assert trained_state(ran.run)["global_step"] == 12
    assert "the same command" in ran.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_in_the_evaluation_after_the_last_step_loses_nothing_but_that_evaluation(
    command: Command, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*tiny, *RUN, "train.evaluations=3"]  # after steps 14, 28, and at the end, which is no multiple
    with monkeypatch.context() as patched:
        at(Monitor, "on_validation_start", 40)(patched, lambda: stop(signal.SIGINT))
        stopped = command(*overrides)
    assert stopped.code == 130
    assert trained_state(stopped.run)["global_step"] == 40
    again = command(*overrides)
    assert (again.code, again.err) == (0, "")
    assert [row["step"] for row in rows(again.run) if "val/loss" in row] == [14, 28, 40]


@pytest.mark.slow
def test_a_finished_run_is_found_by_its_folder_and_needs_more_tokens(command: Command, tiny: list[str]) -> None:
    overrides = [*tiny, "train.tokens=2560"]
    first = command(*overrides)
    folder = first.run.relative_to(first.cwd)
    enough = command(*tiny, "train.tokens=2560", f'resume="{folder}"')
    assert (enough.code, enough.err[:27]) == (2, "error: train.tokens=2560: t")
    assert command(*tiny, "train.tokens=5120", f'resume="{folder}"').code == 0
    assert trained_state(first.run)["global_step"] == 20
    assert len(list((first.cwd / "runs").rglob("status.json"))) == 1
    nowhere = command(*tiny, "train.tokens=5120", "resume=runs/other")
    assert (nowhere.code, nowhere.err) == (
        2,
        "error: resume=runs/other: holds no run; name a run's folder, or leave resume out\n",
    )


def test_a_run_does_not_go_on_with_other_data_and_keeps_the_record_of_its_own(
    command: Command, tiny: list[str], corpus: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(corpus.read_text(encoding="utf-8"), encoding="utf-8")
    overrides = [*tiny, "data.files=[text.txt]", "train.tokens=5120", "train.checkpoint_every=10"]
    first = command(*overrides)
    status = first.run / "status.json"
    status.write_text('{"status": "interrupted", "message": ""}')
    before = (first.run / "environment.json").read_text()
    text.write_text(text.read_text(encoding="utf-8")[:-500], encoding="utf-8")
    again = command(*overrides)
    assert again.code == 2
    assert again.err.startswith("error: data_hash=")
    assert (first.run / "environment.json").read_text() == before
    assert '"interrupted"' in status.read_text()


def test_a_finished_run_trains_further_with_resume_and_more_tokens(
    whole: Path, tiny: list[str], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "name" / "arm" / "seed=1")
    short = repeatable(folder)
    run = planned(*tiny, *RUN, f"runs_dir={tmp_path}", f"resume='{folder}'", "train.tokens=15360", arm="another")
    assert train_run(run) == "done"
    further = repeatable(run.folder.path)
    assert further[: len(short)] == short, "what was logged is history"
    assert [row["step"] for row in further] == sorted(row["step"] for row in further)
    assert trained_state(run.folder.path)["global_step"] == 60
    peak = run.cfg.optim.lr
    assert short[-2]["optim/lr"] < 0.15 * peak < further[len(short)]["optim/lr"], "the schedule is not the new budget's"


def test_a_run_that_fails_after_its_last_step_ends_with_the_same_rows_and_its_time(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (*tiny, "train.tokens=5120", f"runs_dir={tmp_path}")

    def failing(*_: object) -> None:
        raise RuntimeError("killed while it sampled")

    with monkeypatch.context() as patch:
        patch.setattr("llama_lab.training.recording.sample_text", failing)
        with pytest.raises(RuntimeError, match="while it sampled"):
            train_run(planned(*overrides))
    run = planned(*overrides)
    before = rows(run.folder.path)
    assert train_run(run) == "done"
    assert rows(run.folder.path) == before
    assert Summary.load(run.folder.path).metrics["seconds"] == before[-1]["seconds"] > 0
