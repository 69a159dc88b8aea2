"""What people call runs: by what differs, without text, devices and folders."""

from pathlib import Path
from typing import Any

import pytest

from llama_lab.config.grammar import settled_keys
from llama_lab.runs.naming import LONGEST, short_name, short_names
from llama_lab.runs.record import Record
from llama_lab.runs.stored import Environment

ALONE = {
    "": "llama",
    "arch=gpt2": "gpt2",
    "norm=layernorm model.position.theta=5e5": "llama position.theta=5e5 norm=layernorm",
    "+model.extra=2 optim.lr=1e-3": "llama extra=2 optim.lr=1e-3",
    "data=text data.files=[/a/b.txt] trainer=ddp trainer.precision=bf16-mixed": "llama",
    "name=mine seed=3 logger=none runs_dir=/scratch norm=none": "llama norm=none",
    "tokenizer.path=/a/long/way/to/tokenizer.json": "llama tokenizer.path=tokenizer.json",
    "init_from=runs/llama/norm=none/seed=1": "llama init_from=norm=none/seed=1",
}
AMONG_OTHERS = {
    "norm=layernorm size=nano train.tokens=3e5": "norm=layernorm",
    "arch=gpt2 size=nano train.tokens=3e5": "gpt2",
    "arch=gpt2 norm=none size=nano": "gpt2 norm=none",
    "size=nano seed=2": "llama",
    "size=nano data.files=[/a/b.txt,/c/d.txt]": "data.files=[b.txt,d.txt]",
}


def test_a_run_is_named_by_recipe_and_settings_and_among_others_by_what_differs() -> None:
    for overrides, name in ALONE.items():
        assert short_name("llama", overrides.split()) == name
    assert short_name("llama", ["init_from='/elsewhere/my run'"]) == "llama init_from=my run"
    for overrides, name in AMONG_OTHERS.items():
        assert short_name("llama", overrides.split(), {"size", "train.tokens"}) == name


def test_a_long_name_is_cut() -> None:
    name = short_name("llama", [f"model.key{i}=1" for i in range(100)])
    assert len(name) == LONGEST
    assert name.endswith("…")


def record(name: str, folder: str, *overrides: str, **config: Any) -> Record:
    environment = Environment(name=name, arm=folder, choices={"arch": "llama"})
    path = Path(name) / folder
    return Record(path, folder, 1, "done", overrides=list(overrides), config=config, environment=environment)


def test_runs_are_named_by_what_differs_among_them() -> None:
    records = [
        record("llama", "base", "size=pico"),
        record("llama", "norm=none-123", "size=pico", "norm=none"),
        record("climb", "+rmsnorm", "size=pico", "arm=+rmsnorm", arm="+rmsnorm"),
    ]
    assert short_names(records) == ["llama", "norm=none", "+rmsnorm"]


def test_arms_that_would_have_one_name_keep_those_of_their_folders() -> None:
    records = [record("one", "base"), record("one", "base"), record("two", "base"), record("two", "n", "norm=none")]
    assert short_names(records) == ["one/base", "one/base", "two/base", "norm=none"]


def test_what_a_command_sweeps_over_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train.py", "--multirun", "norm=none,rmsnorm", "train.tokens=3e5", "data.files=[a,b]", "seed=range(3)"]
    monkeypatch.setattr("sys.argv", command)
    assert settled_keys() == {"train.tokens", "data.files"}
