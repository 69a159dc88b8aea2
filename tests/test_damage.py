"""A damaged file of a run, a study or a token folder is named in one line, or nothing is different."""

import csv
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from llama_lab.cli import compare_command, eval_command, train_command
from llama_lab.data.open import open_dataset
from llama_lab.runs.folder import RunFolder
from llama_lab.training.monitor import Monitor
from llama_lab.util.errors import ConfigError
from tests.conftest import Ran
from tests.training.stopping import Power, at, cut
from tests.training.tiny import planned, repeatable


def flip(file: Path) -> None:
    """Change one bit of the letter or digit in the middle, so that text stays text."""
    content = bytearray(file.read_bytes())
    letters = [place for place, byte in enumerate(content) if chr(byte).isalnum() and byte < 128]
    content[letters[len(letters) // 2]] ^= 1
    file.write_bytes(content)


def fail_to_read(file: Path) -> None:
    """A file that opens and cannot be read, as on a failing disk; root may read all others."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def change_key(file: Path, value: Any = None) -> None:
    """Remove the key that a result depends on most, or give it another value; JSON is YAML, too."""
    text = file.read_text()
    content = yaml.safe_load(text)
    key = next(key for key in ("val/loss", "arms", "model", "status", "data_hash", *content) if key in content)
    content[key] = value
    if value is None:
        del content[key]
    stamp = [line for line in text.splitlines() if line.startswith("#")]
    file.write_text("\n".join([*stamp, json.dumps(content)]))


KINDS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "flipped": flip,
    "a folder": make_folder,
    "missing": Path.unlink,
    "unreadable": fail_to_read,
    "a key removed": change_key,
    "of another type": partial(change_key, value=[{"a": "b"}]),
}
OF_KEYS = ("a key removed", "of another type")

# Every file that commands read, and these; the first is the quickest.
RUN, STOPPED = "runs/study/vanilla/seed=1", "runs/stopped/base/seed=1"
READ_BY: dict[str, tuple[str, ...]] = {
    f"{RUN}/status.json": ("compare", "evaluate", "repeat"),
    f"{RUN}/environment.json": ("compare", "evaluate", "repeat"),
    f"{RUN}/resolved.yaml": ("compare", "evaluate", "repeat"),
    f"{RUN}/overrides.yaml": ("compare", "repeat"),
    f"{RUN}/metrics.csv": ("compare", "repeat"),
    f"{RUN}/summary.json": ("compare", "repeat"),
    f"{RUN}/eval.json": ("compare", "evaluate"),
    f"{RUN}/tokenizer.json": ("evaluate",),
    f"{RUN}/tokenizer_config.json": ("evaluate",),
    f"{RUN}/checkpoints/last.ckpt": ("evaluate",),
    "runs/study/study.yaml": ("compare", "repeat"),
    f"{STOPPED}/checkpoints/last.ckpt": ("resume",),
    f"{STOPPED}/metrics.csv": ("resume",),
    f"{STOPPED}/status.json": ("resume",),
    "cache/*/index.json": ("evaluate", "resume"),
    "cache/*/tokenizer.json": ("evaluate", "resume"),
    "cache/*/train.bin": ("evaluate", "resume"),
    "cache/*/val.bin": ("evaluate", "resume"),
    "mix/texts/*/checksums.json": ("tokenise",),
    "mix/texts/*/train.jsonl": ("tokenise",),
    "mix/tokenizer-*/checksums.json": ("tokenise",),
    "mix/tokenizer-*/tokenizer.json": ("tokenise",),
}
LEFT_OUT = {
    ("runs/study/study.yaml", "compare", "missing"),  # a folder of runs is compared, too
    (f"{STOPPED}/metrics.csv", "resume", "unreadable"),  # an input/output error, which is not told in a line
}


def damages() -> Iterator[Any]:
    """Every file under every command that reads it, in every way; the quick line has each file and each way once."""
    for number, (file, actions) in enumerate(READ_BY.items()):
        has_keys = file.endswith((".json", ".yaml")) and "overrides" not in file
        kinds = [kind for kind in KINDS if has_keys or kind not in OF_KEYS]
        for action in actions:
            for kind in kinds:
                if (file, action, kind) in LEFT_OUT:
                    continue
                is_quick = action == actions[0] and kind == kinds[number % len(kinds)]
                yield pytest.param(file, action, kind, marks=() if is_quick else pytest.mark.matrix)


BUDGET = ("train.tokens=2048", "train.evaluations=2", "train.checkpoint_every=2", "train.eval_lengths=[1]")  # 8 steps
STOPPED_RUN = ("name=stopped", "arm=base")
STUDY = ("study=ladder", "study.axes=[norm]", "study.seeds=[1]", "study.learning_rates=null", "name=study")
STUDY += ("study.measure_speed=false",)
MIX = ("data=mix", "data.mix={far: 0.5, near: 0.5}", "tokenizer.vocab_size=300")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@pytest.fixture
def act(place: Path, in_process: Callable[..., Ran], tiny: list[str], corpus: Path) -> Callable[[str], object]:
    """Does an action in `world`, a copy of `whole`, which the first test makes; what comes of it.

    That is what the action wrote and no clock makes, or the last line of its error.
    """
    world, whole = place / "world", place / "whole"
    study = world / "runs" / "study"
    places = (f"data.cache_dir={world}/cache", f"runs_dir={world}/runs", "hydra/launcher=basic")
    train = partial(in_process, train_command, "train.py", *tiny, *BUDGET, *places)
    far, near = f"{{data: hub, path: text, data_files: 'file://{corpus}'}}", f"{{data: text, files: ['{corpus}']}}"
    mix = (*MIX, f"data.parts={{far: {far}, near: {near}}}", f"data.cache_dir={world}/mix")

    def make() -> None:
        assert train(*STUDY).code == 0
        with at(Monitor, "on_train_batch_end", 5)(cut), pytest.raises(Power):
            train(*STOPPED_RUN)
        RunFolder(world / STOPPED).write_status("running")
        open_dataset(planned(*mix).cfg)
        for index in world.glob("mix/*/index.json"):
            shutil.rmtree(index.parent)
        world.rename(whole)

    def act(action: str) -> object:
        if action == "tokenise":
            try:
                return open_dataset(planned(*mix).cfg).index.data_hash
            except ConfigError as error:
                return f"error: {error}"
        ran = {
            "compare": partial(in_process, compare_command, "llama-lab-compare", str(study)),
            "evaluate": partial(in_process, eval_command, "eval.py", f"run={world / RUN}", "eval.parts=[loss]"),
            "repeat": partial(train, *STUDY),
            "resume": partial(train, *STOPPED_RUN),
        }[action]()
        assert "Traceback" not in ran.out + ran.err
        if ran.code:
            return ran.err.splitlines()[-1]
        if action == "resume":
            return repeatable(world / STOPPED)
        if action == "evaluate":
            return json.loads((world / RUN / "eval.json").read_text())["val/loss"]
        with (study / "summary.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [{key: row[key] for key in row if not re.search("second|memory|mfu", key)} for row in rows]

    if not whole.exists():
        make()
    renew(place)
    return act


def renew(place: Path) -> None:
    """Undo whatever was done."""
    shutil.rmtree(place / "world", ignore_errors=True)
    shutil.copytree(place / "whole", place / "world")


OF_WHOLE: dict[str, object] = {}


@pytest.mark.parametrize(("file", "action", "kind"), damages())
def test_damage_is_named_or_changes_nothing(
    file: str, action: str, kind: str, act: Callable[[str], object], place: Path
) -> None:
    if action not in OF_WHOLE:
        OF_WHOLE[action] = act(action)
        renew(place)
    (damaged,) = (place / "world").glob(file)
    KINDS[kind](damaged)
    found = act(action)
    if found != OF_WHOLE[action]:
        assert re.match(r"(error|failed)\b.*;", str(found)), "an error with its remedy"
        assert damaged.name.replace("_config", "") in str(found).replace("_config", "")
