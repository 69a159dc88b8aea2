"""`kill -9` at any moment, from the first line to the last file: the same command ends at the same last bit."""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import TRAIN, last_of_each
from tests.preloaded import PreloadedPython
from tests.processes import wait_until
from tests.training.tiny import identical, repeatable, trained_state

SPANS = ("family=encoder_decoder", "objective=span")
KILLS = {(): 24, SPANS: 8}
RUN = ("train.evaluations=6", "train.checkpoint_every=4", "train.log_every=3", "logger=tensorboard", "data.cache_dir=c")
FOLDER = Path("runs", "llama")

Moment = Callable[[Path], Callable[[], bool]]
"""From a run's working directory to whether it is time; made as the process starts."""


def after(seconds: float) -> Moment:
    """A while after the start."""

    def make(cwd: Path) -> Callable[[], bool]:
        end = time.monotonic() + seconds
        return lambda: time.monotonic() > end

    return make


def as_soon_as(pattern: str) -> Moment:
    """When a file is written, or a folder made, that the pattern names."""

    def stamps(cwd: Path) -> set[tuple[Path, int]]:
        found = set()
        for file in cwd.glob(pattern):
            with suppress(FileNotFoundError):  # replaced just now
                found.add((file, file.stat().st_mtime_ns))
        return found

    def make(cwd: Path) -> Callable[[], bool]:
        stale = stamps(cwd)
        return lambda: bool(stamps(cwd) - stale)

    return make


BUILD = as_soon_as("c/*.building")
CHECKPOINT = as_soon_as("runs/llama/*/*/checkpoints/last.tmp")
ROW = as_soon_as("runs/llama/*/*/metrics.csv")
SAMPLE = as_soon_as("runs/llama/*/*/sample.txt")


def phase(cwd: Path, began: float) -> str:
    """What a process that began then was doing when it died, as its files tell."""
    if any(cwd.glob("c/*.building")):
        return "build"
    (folder,) = [*cwd.glob("runs/llama/*/*"), None][:1]
    if folder is None or not (folder / "metrics.csv").exists() or (folder / "metrics.csv").stat().st_mtime < began:
        return "start"
    if (folder / "checkpoints" / "last.tmp").exists():
        return "checkpoint"
    return "end" if "\n78," in (folder / "metrics.csv").read_text() else "training"


def conduct(preloaded: PreloadedPython, command: list[str], cwd: Path, moment: Moment) -> str | None:
    """Start the command and kill it at the moment; in which phase, or None if it came to its end before."""
    due, began = moment(cwd), time.time()
    output = (cwd / "output").open("w")
    process = preloaded.start(
        command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    wait_until(lambda: process.poll() is not None or due(), pause=0.0005)
    os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    if process.wait() == -signal.SIGKILL:
        return phase(cwd, began)
    assert process.returncode == 0, (cwd / "output").read_text()
    return None


def never(cwd: Path) -> Callable[[], bool]:
    return lambda: False


TIMED = ("seconds", "rows", "checksum")  # checksums of what holds times


def result(cwd: Path) -> dict[str, Any]:
    """All that a run leaves and no clock makes."""
    (folder,) = (cwd / FOLDER).glob("*/*")
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
@pytest.mark.parametrize("family", KILLS)
def test_kills_at_random_moments_change_nothing(
    family: tuple[str, ...], tiny: list[str], preloaded: PreloadedPython, tmp_path: Path
) -> None:
    command = [str(TRAIN), *last_of_each([*tiny, *RUN, *family])]
    whole = tmp_path / "whole"
    whole.mkdir()
    began = time.monotonic()
    assert conduct(preloaded, command, whole, never) is None
    took = time.monotonic() - began
    expected = result(whole)
    assert [len(expected["rows"]), len(expected["tensorboard"]["val/loss"])] == [33, 6]

    def killed_again_and_again(number: int) -> list[str]:
        """One run, until it has come to its end; what it was doing each time."""
        draw = random.Random(number)
        cwd = tmp_path / str(number)
        cwd.mkdir()
        moments = [after(draw.uniform(0.0, 0.15) * took), draw.choice((BUILD, after(draw.uniform(0.05, 0.5) * took)))]
        moments += [draw.choice((CHECKPOINT, ROW, after(draw.uniform(0.3, 0.9) * took))) for _ in range(5)]
        phases: list[str | None] = []
        for moment in [*moments, SAMPLE, never]:
            if not any('"done"' in file.read_text() for file in cwd.glob("runs/llama/*/*/status.json")):
                phases.append(conduct(preloaded, command, cwd, moment))
        found = result(cwd)
        wrong = [name for name in expected if not identical(found[name], expected[name])]
        assert not wrong, f"run {number}, killed in {phases}"
        return [phase for phase in phases if phase]

    phases: Counter[str] = Counter()
    numbers = itertools.count()
    with ThreadPoolExecutor(2) as pool:
        while phases.total() < KILLS[family]:
            for found in pool.map(killed_again_and_again, (next(numbers), next(numbers))):
                phases.update(found)
    assert phases.keys() >= {"start", "build", "training", "checkpoint", "end"}, phases


SWEEPS = (
    ["--multirun", "seed=1,2"],
    ["study=ladder", "study.learning_rates=null", "study.axes=[norm]", "study.seeds=[1]", "study.measure_speed=false"],
)


@pytest.mark.slow
def test_commands_that_start_at_once_build_once(tiny: list[str], preloaded: PreloadedPython, tmp_path: Path) -> None:
    draw = random.Random(1)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x): return {draw.getrandbits(64)} * x\n\n" for i in range(30_000)))  # 1.2 MB
    shared = [*tiny, f"data.files=[{text}]", "data.document_chars=5000", "data.cache_dir=c", "tokenizer=bpe"]
    command = [str(TRAIN), *last_of_each([*shared, "train.tokens=2560"])]
    assert conduct(preloaded, command, tmp_path, BUILD) == "build"
    processes = [
        preloaded.start(
            [*command, *more, f"runs_dir=runs{number}"],
            executable=preloaded.executable,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, more in enumerate(SWEEPS)
    ]
    wait_until(lambda: any(tmp_path.glob("c/*/index.json")))
    shown = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted("tokenising" in text for text in shown) == [False, True]
    assert not any(tmp_path.glob("c/*.building"))
    hashes = {json.loads(file.read_text())["data_hash"] for file in tmp_path.rglob("environment.json")}
    assert len(hashes) == 1
