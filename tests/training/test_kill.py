"""`kill -9` at any moment, from the first line to the last file: the same command ends at the same last bit."""

import json
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import TRAIN, Start, last_of_each
from tests.processes import wait_until
from tests.training.tiny import identical, repeatable, trained_state

RUN = ("train.evaluations=6", "train.checkpoint_every=4", "train.log_every=3", "logger=tensorboard", "data.cache_dir=c")
FOLDER = "runs/llama/*/*"
BUILD = "c/*.building"

Moment = Callable[[], bool]
"""Whether it is time."""


def after(seconds: float) -> Moment:
    """A while from now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def as_soon_as(cwd: Path, pattern: str) -> Moment:
    """When a file is written from now on, or a folder made, that the pattern names."""

    def stamps() -> set[tuple[Path, int]]:
        found = set()
        for file in cwd.glob(pattern):
            with suppress(FileNotFoundError):  # replaced just now
                found.add((file, file.stat().st_mtime_ns))
        return found

    stale = stamps()
    return lambda: bool(stamps() - stale)


def killed(start: Start, command: list[str], cwd: Path, due: Moment) -> bool:
    """Start the command, unless it has ended, and kill it when it is time; False if it came to its end before."""
    if any('"done"' in file.read_text() for file in cwd.glob(f"{FOLDER}/status.json")):
        return False
    process = start(*command, cwd=cwd)
    wait_until(lambda: process.poll() is not None or due(), pause=0.0005)
    process.kill_session()
    if process.wait() == -signal.SIGKILL:
        return True
    assert process.wait() == 0, process.err.read_text()
    return False


TIMED = ("seconds", "rows", "checksum")  # checksums of what holds times


def result(cwd: Path) -> dict[str, Any]:
    """All that a run leaves and no clock makes."""
    (folder,) = cwd.glob(FOLDER)
    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith(("perf/", "seconds", "final/perf", "hp_"))]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "state": trained_state(folder),
        "rows": repeatable(folder),
        "tensorboard": {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags},
        "tokens": {file.relative_to(cwd): file.read_bytes() for file in cwd.glob("c/*/*")},
        "cache": sorted(file.name for file in cwd.glob("c/*")),
        "sample": (folder / "sample.txt").read_text(),
        "status": (folder / "status.json").read_text(),
        "summary": {k: v for k, v in summary.items() if k not in TIMED and not k.startswith("perf/")},
        "checkpoints": sorted(file.name for file in (folder / "checkpoints").iterdir()),
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_moments_change_nothing(tiny: list[str], start: Start, tmp_path: Path) -> None:
    command = [str(TRAIN), *last_of_each([*tiny, *RUN])]
    whole, cwd = tmp_path / "whole", tmp_path / "again"
    whole.mkdir()
    cwd.mkdir()
    began = time.monotonic()
    assert not killed(start, command, whole, lambda: False)
    took = time.monotonic() - began
    expected = result(whole)
    assert [len(expected["rows"]), len(expected["tensorboard"]["val/loss"])] == [33, 6]
    kill, draw = partial(killed, start, command, cwd), random.Random()
    assert kill(as_soon_as(cwd, BUILD))
    assert kill(after(draw.uniform(0, 0.1) * took))
    assert kill(as_soon_as(cwd, f"{FOLDER}/metrics.csv"))
    kill(after(draw.uniform(0.1, 0.5) * took))
    kill(as_soon_as(cwd, f"{FOLDER}/checkpoints/last.tmp"))
    kill(after(draw.uniform(0.1, 0.5) * took))
    kill(as_soon_as(cwd, f"{FOLDER}/sample.txt"))
    kill(lambda: False)
    found = result(cwd)
    assert [name for name in expected if not identical(found[name], expected[name])] == []


@pytest.mark.slow
def test_commands_that_start_at_once_build_once(tiny: list[str], start: Start, tmp_path: Path) -> None:
    draw = random.Random(1)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x): return {draw.getrandbits(64)} * x\n\n" for i in range(30_000)))  # 1.2 MB
    shared = [*tiny, f"data.files=[{text}]", "data.document_chars=5000", "data.cache_dir=c", "tokenizer=bpe"]
    command = [str(TRAIN), *last_of_each([*shared, "train.tokens=2560"])]
    assert killed(start, command, tmp_path, as_soon_as(tmp_path, BUILD))
    processes = [start(*command, f"runs_dir=runs{number}", cwd=tmp_path) for number in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted("tokenising" in process.out.read_text() for process in processes) == [False, True]
    assert not any(tmp_path.glob("c/*.building"))
    hashes = {json.loads(file.read_text())["data_hash"] for file in tmp_path.rglob("environment.json")}
    assert len(hashes) == 1
