"""What the machine does to a run is told in one line, tears no file, and the same command goes on when it is over."""

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llama_lab.data.build import HoldOut
from llama_lab.data.source import TextFiles
from llama_lab.data.tokenizer import ByteTokenizer
from llama_lab.data.tokens import TokenDataset
from llama_lab.runs.checkpoint import checkpoint_step
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Status
from llama_lab.training import recording
from llama_lab.training.monitor import Monitor
from llama_lab.util.errors import ConfigError
from tests.conftest import Command
from tests.selection import first
from tests.training.stopping import RUN, Moment, at, stop, stopped
from tests.training.tiny import identical, repeatable, rows, steps_of, trained, trained_state


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no block free."""
        with (self.path / "filling").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    def empty(self) -> None:
        """Take that back."""
        (self.path / "filling").unlink()

    def remount(self, mode: str) -> None:
        """Make it read-only (`ro`), or writable again (`rw`)."""
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("needs to mount a file system")
    yield Disk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


def while_sampling(act: Callable[[], object]) -> AbstractContextManager[object]:
    """The moment after training, before the sample."""
    sample = recording.sample_text

    def sample_text(*arguments: Any) -> list[int]:
        act()
        return sample(*arguments)

    return patch.object(recording, "sample_text", sample_text)


DURING_TRAINING = at(Monitor, "on_train_batch_end", 14)
FULL: dict[str, tuple[Moment, list[str]]] = {
    "a checkpoint": (DURING_TRAINING, []),
    "a row of metrics.csv": (DURING_TRAINING, ["train.log_every=1", "train.checkpoint_every=1000"]),
    "an event of TensorBoard": (DURING_TRAINING, ["logger=tensorboard", "train.checkpoint_every=1000"]),
    "the sample": (while_sampling, []),
}


@pytest.mark.process
@pytest.mark.parametrize("file", first(2, FULL))
def test_a_full_disk_is_told_in_one_line_and_the_same_command_ends_as_if_nothing_had_been(
    file: str, command: Command, disk: Disk, tiny: list[str], whole: Path
) -> None:
    moment, more = FULL[file]
    overrides = [*tiny, *RUN, *more, f"runs_dir={disk.path}"]
    with moment(disk.fill):
        ran = command(*overrides)
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: runs_dir={disk.path}: No space left on device"), line
    (status,) = disk.path.rglob("status.json")
    folder = RunFolder(status.parent)
    assert Status.load(folder.path).status in ("running", "failed")
    assert not list(folder.path.rglob("*.tmp"))
    if file == "a checkpoint":
        assert checkpoint_step(folder.checkpoint) == 12
    disk.empty()
    again = command(*overrides)
    assert (again.code, again.err) == (0, "")
    assert identical(trained_state(folder.path), trained_state(whole))
    if not more:
        assert repeatable(folder.path) == repeatable(whole)
    steps = steps_of(folder.path, "train/loss")
    assert steps == sorted(set(steps))


@pytest.mark.process
def test_a_full_disk_for_the_tokens_is_told(command: Command, disk: Disk, tiny: list[str]) -> None:
    overrides = [*tiny, "train.tokens=2560", f"data.cache_dir={disk.path}/cache"]

    disk.fill()
    ran = command(*overrides)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"error: data.cache_dir={disk.path}/cache: No space left on device"), ran.err
    assert {file.suffix for file in disk.path.rglob("*")} <= {".lock", ""}
    disk.empty()
    assert command(*overrides).code == 0
    disk.remount("ro")
    assert command(*overrides, "seed=2").code == 0, "tokens that are there are read"


@pytest.mark.process
def test_a_sweep_goes_on_after_a_read_only_disk(command: Command, disk: Disk, tiny: list[str], tmp_path: Path) -> None:
    disk.remount("ro")
    sweep = command("--multirun", *tiny, "train.tokens=2560", f"runs_dir={disk.path}/runs,{tmp_path}/runs")
    assert sweep.code == 2
    assert sweep.err.count("Read-only file system") == 2, "once when it happens, and once in the end"
    assert "Traceback" not in sweep.err
    assert sweep.run.is_relative_to(tmp_path / "runs")


@pytest.mark.process
@pytest.mark.parametrize("problem", ["No space left on device", "Read-only file system"])
def test_a_run_that_cannot_begin_changes_nothing(problem: str, command: Command, disk: Disk, tiny: list[str]) -> None:
    overrides = [*tiny, "train.tokens=2560", f"runs_dir={disk.path}/runs"]
    assert command(*overrides).code == 0
    before = {file: file.read_bytes() for file in disk.path.rglob("*") if file.is_file()}
    if problem.startswith("Read-only"):
        disk.remount("ro")
    else:
        disk.fill()
    ran = command(*overrides, "seed=2")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith(f"error: runs_dir={disk.path}/runs: {problem}"), ran.err
    assert before == {file: file.read_bytes() for file in before}


def test_a_text_that_vanishes_while_it_is_read_is_named_and_its_return_mends_all(tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for text in texts:
        text.write_text(f"{text} is here. " * 500)
    cache = tmp_path / "cache"

    def build(progress: Callable[[int, int, str], None]) -> TokenDataset:
        source = TextFiles([str(text) for text in texts], document_chars=500)
        return TokenDataset.open_or_build(source, ByteTokenizer(), HoldOut(0.1), cache, progress)

    content = texts[1].read_text()

    def vanish(done: int, total: int, phase: str) -> None:
        if phase == "tokenising":
            texts[1].unlink(missing_ok=True)

    with pytest.raises(ConfigError, match=rf"^data: {texts[1]} disappeared during the build; restore it"):
        build(vanish)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    texts[1].write_text(content)
    assert build(lambda *_: None).index.train.tokens > 0


@pytest.mark.slow
def test_a_clock_that_jumps_back_changes_nothing(
    tiny: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = time.time(), itertools.count()
    monkeypatch.setattr(time, "time", lambda: now - 60 * next(calls))
    overrides = [*tiny, *RUN, "logger=tensorboard", f"runs_dir={tmp_path}"]
    stopped(DURING_TRAINING, stop, *overrides)
    folder = trained(*overrides)
    assert repeatable(folder) == repeatable(whole)
    seconds = [row["seconds"] for row in rows(folder)]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_a_folder_moved_in_training_is_named(command: Command, tiny: list[str], tmp_path: Path) -> None:
    folder, aside = tmp_path / "runs" / "n" / "a" / "seed=1", tmp_path / "aside"
    overrides = [*tiny, *RUN, "logger=tensorboard", "name=n", "arm=a"]
    with DURING_TRAINING(lambda: folder.rename(aside)):
        ran = command(*overrides)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: runs/n/a/seed=1: was moved or deleted while it trained")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    assert command(*overrides).code == 0
    assert trained_state(folder)["global_step"] == 24
