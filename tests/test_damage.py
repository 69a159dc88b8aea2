"""Every file of a run, a study and a token folder, damaged in every way: named in one line, or nothing is different."""

import csv
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from llama_lab.cli import compare_command, eval_command, train_command
from llama_lab.runs.folder import RunFolder
from llama_lab.training.monitor import Monitor
from tests.conftest import Command, Ran
from tests.training.stopping import Power, at, cut
from tests.training.tiny import repeatable

# Kinds of damage, each of a file's path.


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


def change_key(file: Path, value: Any = None) -> None:
    """Change the key that a result depends on most, or remove it, and nothing else of a file."""

    def change(content: dict[str, Any]) -> None:
        key = next(key for key in ("val/loss", "arms", "model", "status", "data_hash", *content) if key in content)
        del content[key]
        content.update({} if value is None else {key: value})

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


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


UNREADABLE: set[tuple[int, int]] = set()  # files, so that one which takes their place is readable
OPENED: set[str] = set()  # what was opened to be read


def identity(file: str | os.PathLike[str]) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_ino, found.st_mtime_ns


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Keep what is read, and refuse what is not to be readable: to root, who runs these tests in places, all is."""
    if event != "open" or not isinstance(file := arguments[0], str | os.PathLike):
        return
    _, mode, flags = arguments
    if not set(mode or "") & set("wax") and flags & os.O_ACCMODE == os.O_RDONLY:
        OPENED.add(os.fspath(file))
    if UNREADABLE and os.path.exists(file) and identity(file) in UNREADABLE:
        raise PermissionError(13, "Permission denied", str(file))


sys.addaudithook(watch)

KINDS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "flipped at its begin": partial(flip, place=0.05),
    "flipped": partial(flip, place=0.5),
    "flipped at its end": partial(flip, place=0.98),
    "a key renamed": rename_key,
    "a key removed": change_key,
    "of another type": partial(change_key, value=[{"a": "b"}]),
    "a folder": make_folder,
    "missing": Path.unlink,
    "unreadable": lambda file: UNREADABLE.add(identity(file)),
}
OF_KEYS = ("a key renamed", "a key removed", "of another type")

RUN_FILES = ["status.json", "environment.json", "resolved.yaml", "overrides.yaml", "metrics.csv"]
RUN_FILES += ["tokenizer.json", "tokenizer_config.json", "checkpoints/last.ckpt"]
FINISHED = [*RUN_FILES, "summary.json", "sample.txt", "eval.json"]
FILES = {
    "finished": FINISHED,
    "interrupted": [*RUN_FILES, "checkpoints/before_last.ckpt"],
    "study": ["study.yaml", "summary.csv", "report.html", *(f"vanilla/seed=1/{name}" for name in FINISHED[:-1])],
    "tokens": ["index.json", "train.bin", "val.bin", "tokenizer.json"],
    "downloaded": ["checksums.json", "train.jsonl"],
    "shared": ["checksums.json", "tokenizer.json"],
}
CACHED = {"tokens": "cache/*/index.json", "downloaded": "mix/texts/*/*.jsonl", "shared": "mix/tokenizer-*/*r.json"}
ACTIONS = {
    "finished": ("evaluate", "repeat", "compare"),
    "interrupted": ("resume",),
    "study": ("compare", "evaluate", "the study again"),
    "tokens": ("evaluate", "resume"),
    "downloaded": ("tokenise",),
    "shared": ("tokenise",),
}


EVERY = "in every way"


def kinds_of(name: str) -> list[str]:
    keyed = name.endswith((".json", "resolved.yaml", "study.yaml", "metrics.csv"))
    return [kind for kind in KINDS if keyed or kind not in OF_KEYS]


def damages() -> Iterator[Any]:
    """Every kind of damage to every file under every action. The quick part has one of each file."""
    for i, (target, name) in enumerate((target, name) for target, names in FILES.items() for name in names):
        kinds, actions = kinds_of(name), ACTIONS[target]
        yield pytest.param(target, name, actions[i % len(actions)], kinds[3 * i % len(kinds)])  # each twice
        yield from (pytest.param(target, name, action, EVERY, marks=pytest.mark.matrix) for action in actions)


BUDGET = ("train.tokens=5120", "train.evaluations=2", "train.checkpoint_every=4")  # 20 steps
RUN = ("arm=base", "train.eval_lengths=[1]")
STUDY = ("study=ladder", "study.axes=[norm]", "study.seeds=[1]", "study.learning_rates=null", "name=study")
STUDY += ("study.measure_speed=false",)
MIX = ("data=mix", "data.mix={far: 0.5, near: 0.5}", "tokenizer.vocab_size=300", "name=mix", "overwrite=true")


@dataclass(frozen=True)
class World:
    """Runs, a study and tokens in `path`, and how they were while they were whole."""

    path: Path
    whole: Path
    run: Callable[..., Ran]
    train: Command
    mix: Command

    def folder(self, target: str) -> Path:
        """The folder of FILES."""
        if target in CACHED:
            (whole,) = self.whole.glob(CACHED[target])
            return self.path / whole.parent.relative_to(self.whole)
        return self.path / "runs" / ("study" if target == "study" else f"{target}/base/seed=1")

    def restore(self) -> None:
        """Undo whatever a test did."""
        UNREADABLE.clear()
        shutil.rmtree(self.path)
        shutil.copytree(self.whole, self.path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@pytest.fixture
def world(place: Path, corpus: Path, tiny: list[str], in_process: Callable[..., Ran]) -> World:
    """The world, which the first test makes."""
    path = place / "world"
    shared = (*tiny, *BUDGET, f"data.cache_dir={path}/cache", f"runs_dir={path}/runs")
    command = partial(in_process, train_command, "train.py", "hydra/launcher=basic")
    train = partial(command, *shared)
    far, near = f"{{data: hub, path: text, data_files: 'file://{corpus}'}}", f"{{data: text, files: ['{corpus}']}}"
    parts = (f"data.parts={{far: {far}, near: {near}}}", f"data.cache_dir={path}/mix")
    mix = partial(command, *(one for one in shared if not one.startswith(("data", "tokenizer"))), *RUN, *MIX, *parts)
    world = World(path, place / "whole", in_process, train, mix)
    if not world.whole.exists():
        assert train(*RUN, "name=finished").code == 0
        with at(Monitor, "on_train_batch_end", 14)(cut), pytest.raises(Power):
            train(*RUN, "name=interrupted")
        RunFolder(world.folder("interrupted")).write_status("running")
        assert train(*STUDY).code == 0
        assert world.mix().code == 0
        shutil.copytree(path, world.whole)
    return world


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


def act(world: World, target: str, action: str) -> tuple[Ran, Callable[[], object]]:
    """Do what people do with a target; what reads the result."""
    folder, out = world.folder("finished" if target == "tokens" else target), world.path / "out"
    if action == "evaluate":
        ran = world.run(eval_command, "eval.py", f"run={folder}", "eval.parts=[loss]")
        return ran, partial(evaluated, folder)
    if action == "compare":
        return world.run(compare_command, "llama-lab-compare", str(folder), "--out", str(out)), partial(table, out)
    if action == "the study again":
        return world.train(*STUDY), partial(table, folder)
    if action == "tokenise":
        for index in (world.path / "mix").glob("*/index.json"):
            shutil.rmtree(index.parent)
        return world.mix(), partial(losses, world.folder("mix"))
    name = "interrupted" if action == "resume" else "finished"
    return world.train(*RUN, f"name={name}"), partial(losses, world.folder(name))


class Whole(NamedTuple):
    """What an action makes of a whole world: its exit status, its result, and the files that it read."""

    code: int
    result: object
    read: frozenset[str]


WHOLE: dict[tuple[str, str], Whole] = {}


def of_whole(world: World, target: str, action: str) -> Whole:
    """What an action makes of a whole world."""
    if (target, action) not in WHOLE:
        OPENED.clear()
        ran, result = act(world, target, action)
        read = frozenset(OPENED)
        assert ran.code == 0 or "already holds a finished run" in ran.err, ran.err
        WHOLE[target, action] = Whole(ran.code, result(), read)
        world.restore()
    return WHOLE[target, action]


@pytest.mark.parametrize(("target", "name", "action", "kind"), damages())
def test_damage_is_named_or_changes_nothing(target: str, name: str, action: str, kind: str, world: World) -> None:
    whole = of_whole(world, target, action)
    for each in every_kind(world, target, name, action) if kind == EVERY else [kind]:
        try:
            KINDS[each](world.folder(target) / name)
            ran, result = act(world, target, action)
            UNREADABLE.clear()
            check(ran, result, whole, name, each)
        finally:
            world.restore()


def every_kind(world: World, target: str, name: str, action: str) -> list[str]:
    """What a file that an action does not read holds, does not matter; a study's runs are read as others are."""
    kinds = kinds_of(name)
    if str(world.folder(target) / name) not in of_whole(world, target, action).read:
        return ["missing"]
    if "/seed=" in name:
        place = FILES[target].index(name) * len(ACTIONS[target]) + ACTIONS[target].index(action)
        return [kinds[place % len(kinds)]]
    if (name, action) == ("study.yaml", "compare"):
        kinds.remove("missing")  # a folder of runs without one is compared, too
    return kinds


def check(ran: Ran, result: Callable[[], object], whole: Whole, name: str, kind: str) -> None:
    """One line that names the file and the remedy, or the result of a whole world."""
    assert "Traceback" not in ran.err + ran.out, (kind, ran.err)
    if "already holds a finished run" in ran.err:
        assert ran.code == whole.code, kind
    elif ran.code == 0:
        assert result() == whole.result, f"{kind}: another result, {ran.err}"
    else:
        line = [line for line in ran.err.splitlines() if "could not be evaluated, see above" not in line][-1]
        assert re.match(r"(error|failed)\b", line), (kind, ran.err)
        named = name.replace("tokenizer_config", "tokenizer")  # which the two files are together
        assert Path(name).name in ran.err or Path(named).name in ran.err, (kind, ran.err)
        assert ";" in line, f"{kind}: no remedy, {ran.err}"
