"""Every file of a run, a study and a token folder, damaged in every way: named in one line, or nothing is different."""

import csv
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_lab.cli import compare_command, eval_command, train_command
from tests.conftest import Command, Ran, RunTrain
from tests.training.tiny import killed_after, repeatable

# Kinds of damage, each of a file's path.


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path, place: float) -> None:
    """Change one bit of a letter or digit, so that text stays text."""
    content = bytearray(file.read_bytes())
    letters = [i for i, byte in enumerate(content) if bytes([byte]).isalnum()]
    content[letters[int(place * (len(letters) - 1))]] ^= 1
    file.write_bytes(content)


def rename_key(file: Path) -> None:
    text = file.read_text()
    keys = ["train/loss"] if file.suffix == ".csv" else re.findall(r"^ *[\"']?([\w/]+)[\"']?:", text, re.MULTILINE)
    key = keys[len(keys) // 2]
    file.write_text(text.replace(key, "x" + key[1:], 1))


def change_keys(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file holds, and nothing else of it."""
    if file.suffix == ".csv":
        with file.open(newline="") as opened:
            rows: list[dict[str, Any]] = list(csv.DictReader(opened))
        for row in rows:
            change(row)
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return
    text = file.read_text()
    content = yaml.safe_load(text)
    if isinstance(content, list):
        content[0] = {content[0]: 1}
    else:
        change(content)
    stamp = text.partition("\n")[0] + "\n" if text.startswith("#") else ""
    file.write_text(json.dumps(content) if file.suffix == ".json" else stamp + yaml.safe_dump(content))


def main_key(content: dict[str, Any]) -> str:
    """The key of the file's content that a result depends on most."""
    return next(key for key in ("val/loss", "arms", "model", "status", "data_hash", *content) if key in content)


def remove_key(content: dict[str, Any]) -> None:
    del content[main_key(content)]


def change_type(content: dict[str, Any]) -> None:
    content[main_key(content)] = [{"a": "b"}]


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


UNREADABLE: set[tuple[int, int]] = set()  # files, so that one which takes their place is readable


def identity(file: str | os.PathLike[str]) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    if not UNREADABLE or event != "open" or not isinstance(file := arguments[0], str | os.PathLike):
        return
    if os.path.exists(file) and identity(file) in UNREADABLE:
        raise PermissionError(13, "Permission denied", str(file))


sys.addaudithook(refuse)  # to root, who runs these tests in places, every file is readable

KINDS: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "emptied": empty,
    "flipped at its begin": partial(flip, place=0.05),
    "flipped": partial(flip, place=0.5),
    "flipped at its end": partial(flip, place=0.98),
    "a key renamed": rename_key,
    "a key removed": partial(change_keys, change=remove_key),
    "of another type": partial(change_keys, change=change_type),
    "a folder": make_folder,
    "missing": Path.unlink,
    "unreadable": lambda file: UNREADABLE.add(identity(file)),
}
OF_KEYS = ("a key renamed", "a key removed", "of another type")

RUN_FILES = [
    "status.json",
    "environment.json",
    "resolved.yaml",
    "overrides.yaml",
    "metrics.csv",
    "tokenizer.json",
    "tokenizer_config.json",
    "checkpoints/last.ckpt",
]
FINISHED = [*RUN_FILES, "summary.json", "sample.txt", "eval.json"]
FILES = {
    "finished": FINISHED,
    "interrupted": [*RUN_FILES, "checkpoints/before_last.ckpt"],
    "study": ["study.yaml", "summary.csv", "report.html", *(f"vanilla/seed=1/{name}" for name in FINISHED[:-1])],
    "tokens": ["index.json", "train.bin", "val.bin", "tokenizer.json"],
}
CASES = [
    (target, name, kind)
    for target, names in FILES.items()
    for i, name in enumerate(names)
    for j, kind in enumerate(KINDS)
    if kind not in OF_KEYS or name.endswith((".json", "resolved.yaml", "study.yaml", "metrics.csv"))
    if "/seed=" not in name or (i + j) % 3 == 0  # a study's runs are read as others are
]
QUICK = {
    ("finished", "metrics.csv", "flipped"),
    ("finished", "summary.json", "a key renamed"),
    ("finished", "resolved.yaml", "truncated"),
    ("interrupted", "metrics.csv", "emptied"),
    ("interrupted", "metrics.csv", "flipped at its begin"),
    ("study", "study.yaml", "a key removed"),
    ("study", "study.yaml", "emptied"),
    ("tokens", "train.bin", "flipped"),
}

BUDGET = ("train.tokens=5120", "train.evaluations=2", "train.checkpoint_every=4")  # 20 steps
RUN = ("arm=base", "train.eval_lengths=[1]")
STUDY = (
    "study=ladder",
    "study.axes=[norm]",
    "study.seeds=[1]",
    "study.learning_rates=null",
    "study.measure_speed=false",
    "name=study",
)


@dataclass(frozen=True)
class World:
    """Runs, a study and tokens in `path`, and what each command makes of them while they are whole."""

    path: Path
    whole: Path
    shared: tuple[str, ...]

    def folder(self, target: str) -> Path:
        """The folder of FILES."""
        if target == "tokens":
            (whole,) = (self.whole / "cache").glob("*/index.json")
            return self.path / "cache" / whole.parent.name
        return self.path / "runs" / ("study" if target == "study" else f"{target}/base/seed=1")

    def restore(self) -> None:
        """Undo whatever a test did."""
        shutil.rmtree(self.path)
        shutil.copytree(self.whole, self.path)


@pytest.fixture(scope="module")
def world(tiny: list[str], tmp_path_factory: pytest.TempPathFactory, run_train: RunTrain) -> World:
    path = tmp_path_factory.mktemp("damage") / "world"
    path.mkdir()
    shared = (*tiny, *BUDGET, f"data.cache_dir={path / 'cache'}", f"runs_dir={path / 'runs'}")
    assert run_train(*shared, *RUN, "name=finished").code == 0
    killed = run_train(*shared, *RUN, "name=interrupted", script=killed_after(14, path))
    assert killed.code == -signal.SIGKILL, killed.err
    assert run_train(*shared, *STUDY).code == 0
    shutil.copytree(path, path.with_name("whole"))
    return World(path, path.with_name("whole"), shared)


@pytest.fixture
def whole(world: World) -> Iterator[World]:
    """The world, which is whole again after the test."""
    yield world
    UNREADABLE.clear()
    world.restore()


def losses(folder: Path) -> object:
    """Every row of a run that no clock makes, and its last loss."""
    summary = json.loads((folder / "summary.json").read_text())
    return repeatable(folder), summary["val/loss"], summary["step"]


def table(folder: Path) -> object:
    """The rows of a report, without what differs by chance."""
    with (folder / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not re.search("second|memory|mfu", k)} for row in rows]


def evaluated(folder: Path) -> object:
    """The losses of evaluated runs."""
    return [json.loads(file.read_text())["val/loss"] for file in sorted(folder.rglob("eval.json"))]


@dataclass(frozen=True)
class Commands:
    """The commands, inside this process."""

    train: Command
    evaluate: Command
    compare: Callable[..., Ran]


@pytest.fixture
def commands(in_process: Callable[..., Ran]) -> Commands:
    return Commands(
        partial(in_process, train_command, "train.py"),
        partial(in_process, eval_command, "eval.py"),
        partial(in_process, compare_command, "llama-lab-compare"),
    )


Result = Callable[[], object]
"""Reads what a command has left."""


def actions(world: World, target: str, commands: Commands) -> Iterator[tuple[str, Callable[[], Ran], Result]]:
    """What people do with a target: its name, the command, and its result."""
    folder = world.folder(target)
    if target in ("finished", "tokens"):
        finished = world.folder("finished")
        evaluate = partial(commands.evaluate, f"run={finished}", "eval.parts=[loss]")
        yield "evaluate", evaluate, partial(evaluated, finished)
    if target in ("interrupted", "tokens"):
        result = partial(losses, world.folder("interrupted"))
        yield "resume", lambda: commands.train(*world.shared, *RUN, "name=interrupted"), result
    if target == "finished":
        result = partial(losses, folder)
        yield "repeat", lambda: commands.train(*world.shared, *RUN, "name=finished"), result
        out = world.path / "out"
        yield "compare", lambda: commands.compare(str(folder), "--out", str(out)), partial(table, out)
    if target == "study":
        yield "compare", lambda: commands.compare(str(folder)), partial(table, folder)
        evaluate = partial(commands.evaluate, f"run={folder}", "eval.parts=[loss]")
        yield "evaluate", evaluate, partial(evaluated, folder)
        yield "the study again", lambda: commands.train(*world.shared, *STUDY), partial(table, folder)


EXPECTED: dict[tuple[str, str], tuple[int, object]] = {}


def expected(world: World, target: str, action: str, commands: Commands) -> tuple[int, object]:
    """The exit status and the result of a command on a whole world."""
    if (target, action) not in EXPECTED:
        world.restore()
        for name, act, result in actions(world, target, commands):
            ran = act()
            assert ran.code == 0 or "already holds a finished run" in ran.err, ran.err
            EXPECTED[target, name] = ran.code, result()
            world.restore()
    return EXPECTED[target, action]


def slow_unless_quick(case: tuple[str, str, str]) -> Any:
    return pytest.param(*case, id=" ".join(case), marks=[] if case in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("target", "name", "kind"), map(slow_unless_quick, CASES))
def test_damage_is_named_in_one_line_or_changes_nothing(
    target: str, name: str, kind: str, whole: World, commands: Commands
) -> None:
    for action in [name for name, *_ in actions(whole, target, commands)]:
        code, result = expected(whole, target, action, commands)
        KINDS[kind](whole.folder(target) / name)
        ((act, read),) = [rest for found, *rest in actions(whole, target, commands) if found == action]
        ran = act()
        UNREADABLE.clear()
        assert "Traceback" not in ran.err + ran.out, f"{action}: {ran.err}"
        if "already holds a finished run" in ran.err:
            assert ran.code == code
        elif ran.code == 0:
            assert read() == result, f"{action}: another result, {ran.err}"
        else:
            line = [line for line in ran.err.splitlines() if "could not be evaluated, see above" not in line][-1]
            assert re.match(r"(error|failed)\b", line), f"{action}: {ran.err}"
            named = name.replace("tokenizer_config", "tokenizer")  # which the two files are together
            assert Path(name).name in ran.err or Path(named).name in ran.err, f"{action}: {ran.err}"
            assert ";" in line, f"{action}: no remedy, {ran.err}"
        whole.restore()
