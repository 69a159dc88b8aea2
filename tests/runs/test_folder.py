"""A run's folder: its name, who may write into it, and when a run may start or go on there."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from llama_lab import __version__
from llama_lab.config.schema import UNNAMED
from llama_lab.runs.folder import LOCK, RunFolder, arm_name, locked, read_overrides, write_yaml
from llama_lab.runs.stored import Environment
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config
from tests.conftest import Command
from tests.refusals import check_refused, refusing

# Names of arms

KEYS = st.from_regex(r"[a-z_]{1,12}(\.[a-z_]{1,12}){0,3}", fullmatch=True).filter(
    lambda key: key.split(".")[0] not in {root.split(".")[0] for root in (*UNNAMED, "arch")}
)
VALUES = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=150),
    st.sampled_from(["rope", "1e-3", "[a.txt,b/c.txt]", "[a.txt,b_c.txt]", "a b", "a_b", "..", "/etc/passwd"]),
)


def two_of_one_key(key: str, one: str, other: str) -> tuple[list[str], list[str]]:
    return [f"{key}={one}"], [f"{key}={other}"]


OVERRIDES = st.lists(st.builds("{}={}".format, KEYS, VALUES), max_size=6, unique_by=lambda o: o.split("=")[0])


def test_overrides_are_read_as_they_were_typed(tmp_path: Path) -> None:
    typed = ["optim.lr=${train.x}", r"data.prompt=\${", "seed=3"]
    write_yaml(typed, tmp_path / "overrides.yaml")
    assert read_overrides(tmp_path) == typed


@given(OVERRIDES)
def test_an_arm_s_name_is_a_short_file_name_on_every_system(overrides: list[str]) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9=.+_-]{0,99}", arm_name(overrides))


@given(OVERRIDES, st.randoms(use_true_random=False))
def test_an_arm_s_name_does_not_depend_on_the_order_of_the_overrides(overrides: list[str], order: object) -> None:
    shuffled = sorted(overrides, key=lambda _: order.random())  # type: ignore[attr-defined]
    assert arm_name(shuffled) == arm_name(overrides)


@given(st.tuples(OVERRIDES, OVERRIDES) | st.builds(two_of_one_key, KEYS, VALUES, VALUES))
@example((["data.files=[a b.txt]"], ["data.files=[a_b.txt]"]))
def test_different_overrides_make_different_arms(two: tuple[list[str], list[str]]) -> None:
    some, others = two
    assume(set(some) != set(others))
    assert arm_name(some) != arm_name(others)


WATCHING = "name=mine seed=7 runs_dir=/elsewhere overwrite=true resume=runs/llama/base/seed=1 train.log_every=3"
WATCHING += " train.prompt=def train.recompute=block trainer.profile=true logger.project=mine trainer=ddp"
WATCHING += " data.cache_dir=/scratch +hydra.verbose=true"


def test_where_and_how_a_run_is_watched_makes_no_arm() -> None:
    for override in WATCHING.split():
        assert arm_name(["norm=layernorm", override]) == "norm=layernorm"
        assert arm_name([override]) == "base"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["position=sinusoidal", "norm=layernorm"], "norm=layernorm-position=sinusoidal"),
        (["optim.lr=1e-3", "+model.extra=2"], "model.extra=2-optim.lr=1e-3"),
        (["seeds=3"], "seeds=3"),  # only begins like an unnamed one
        (["data.cache_directory=x"], "data.cache_directory=x"),
        (["name=mine", "arch=gpt2"], "arch=gpt2"),  # another arm than llama2's under that name
    ],
)
def test_ordinary_overrides_are_readable_in_the_name(overrides: list[str], name: str) -> None:
    assert arm_name(overrides) == name


# What may be done in a folder

OURS = Environment(versions={"llama-lab": __version__})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "seed=1")


CHOSEN = {"norm": "rmsnorm", "schedule": "cosine", "logger": "tensorboard"}


def choices(*overrides: str) -> dict[str, str]:
    """The options of these groups that overrides choose."""
    chosen = dict(override.split("=", 1) for override in overrides)
    return {group: chosen.get(group, option) for group, option in CHOSEN.items()}


def begun(folder: RunFolder, *overrides: str, status: str) -> None:
    """Leave a run in a folder, with a checkpoint and that status."""
    environment = replace(OURS, choices=choices(*overrides))
    with locked(folder.path):
        folder.begin(compose_config("size=pico", *overrides), list(overrides), environment)
        torch.save({"state_dict": {}, "global_step": 0}, folder.checkpoint)
        folder.write_status(status, "why")  # type: ignore[arg-type]


def check(folder: RunFolder, *overrides: str) -> None:
    folder.check(compose_config("size=pico", *overrides), choices(*overrides))


def check_refusal(folder: RunFolder, fault: str, *overrides: str) -> None:
    """To train there is refused with a line that begins so, which changes nothing."""
    before = contents(folder.path)
    with refusing(fault):
        check(folder, *overrides)
    assert contents(folder.path) == before


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and time."""
    return {str(f): (f.read_bytes(), f.stat().st_mtime_ns) for f in path.rglob("*") if f.is_file()}


@pytest.mark.parametrize("status", ["running", "interrupted", "failed", "diverged"])
def test_an_unfinished_run_goes_on_with_the_same_settings(status: str, folder: RunFolder) -> None:
    begun(folder, "model.dropout=0.1", status=status)
    check(folder, "model.dropout=0.1")
    elsewhere = ("logger=none", "trainer.devices=2", "runs_dir=elsewhere")
    check(folder, "model.dropout=0.1", *elsewhere, "train.recompute=block", "trainer.profile=true")
    check(folder, "model.dropout=0.1", "data.cache_dir=/new")


@pytest.mark.parametrize(
    ("before", "now", "new", "old"),
    [
        ("train.tokens=2e6", "train.tokens=1e6", "train.tokens=1000000.0", "train.tokens=2000000.0"),
        ("data.seed=1", "trainer.precision=bf16-true", "trainer.precision=bf16-true", "trainer.precision=auto"),
        ("data.val_tokens=1000", "data.val_tokens=null", "data.val_tokens=None", "data.val_tokens=1000"),
        ("schedule=wsd", "schedule=cosine", "schedule=cosine", "schedule=wsd"),
        ("optim.lr=3", "optim.lr=5", "optim.lr=5", "optim.lr=3"),
        ("model.norm.eps=1", "optim.lr=0.002", "model.norm.eps=1e-05", "model.norm.eps=1"),
        ("logger=wandb", "model.norm.eps=1", "model.norm.eps=1", "model.norm.eps=1e-05"),
    ],
)
def test_an_unfinished_run_refuses_other_settings(before: str, now: str, new: str, old: str, folder: RunFolder) -> None:
    begun(folder, before, status="interrupted")
    check(folder, before)
    for more in ([], [f"resume='{folder.path}'"]):
        if not more or "train.tokens" not in now:
            check_refusal(folder, f"{new}: the run in {folder.path} has {old};", now, *more)


@pytest.mark.parametrize("fact", ["data_hash", "tokenizer_hash", "precision"])
def test_a_checkpoint_of_other_data_or_precision_is_not_gone_on_with(fact: str, folder: RunFolder) -> None:
    begun(folder, status="interrupted")
    old, new = (replace(OURS, **{fact: value}) for value in ("old", "new"))
    old.save(folder.path)
    before = contents(folder.path)
    with refusing(f"{fact}=new"):
        folder.begin(compose_config("size=pico"), [], new)
    assert contents(folder.path) == before
    assert folder.begin(compose_config("size=pico"), [], old) == folder.checkpoint


def test_resume_may_change_the_budget_of_a_finished_run_and_nothing_that_it_computes(folder: RunFolder) -> None:
    begun(folder, status="done")
    check(folder, f"resume='{folder.path}'", "train.tokens=3e6", "train.evaluations=5")
    check_refusal(folder, "optim.lr=1", f"resume='{folder.path}'", "train.tokens=3e6", "optim.lr=1")


def test_resume_gives_an_unfinished_run_no_smaller_budget_than_it_was_begun_with(folder: RunFolder) -> None:
    begun(folder, "train.tokens=2e6", status="interrupted")
    check_refusal(folder, "train.tokens=1000000.0", f"resume='{folder.path}'", "train.tokens=1e6")
    for enough in ("2e6", "3e6"):
        check(folder, f"resume='{folder.path}'", f"train.tokens={enough}")


@pytest.mark.parametrize("status", ["done", "interrupted"])
def test_a_run_is_not_deleted_that_is_to_be_trained_further(status: str, folder: RunFolder) -> None:
    begun(folder, status=status)
    check_refusal(folder, "overwrite=true", f"resume='{folder.path}'", "train.tokens=3e6", "overwrite=true")


def test_overwrite_starts_over_whatever_the_folder_held(folder: RunFolder) -> None:
    begun(folder, status="done")
    (folder.path / "tensorboard").mkdir()
    (folder.path / "tensorboard" / "events").touch()
    for damaged in ("status.json", "resolved.yaml", "overrides.yaml", "environment.json"):
        (folder.path / damaged).write_text("{")
    cfg = compose_config("size=pico", "optim.lr=1", "overwrite=true")
    folder.check(cfg, {})
    with locked(folder.path):
        assert folder.begin(cfg, ["optim.lr=1"], Environment()) is None
    files = {str(f.relative_to(folder.path)) for f in folder.path.rglob("*") if f.is_file()}
    assert files - {LOCK} == {"status.json", "resolved.yaml", "overrides.yaml", "environment.json"}


@pytest.mark.parametrize("library", ["llama-lab", "torch"])
def test_a_run_with_other_kernels_says_so(library: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    begun(folder, status="interrupted")
    cfg = compose_config("size=pico")
    old, new = (Environment(versions=OURS.versions | {library: version}) for version in ("0.4.0", "0.5.0"))
    old.save(folder.path)
    with locked(folder.path):
        folder.begin(cfg, [], old)
        assert capsys.readouterr().err == ""
        folder.begin(cfg, [], new)
    assert capsys.readouterr().err.startswith(f"{library} 0.5.0 goes on with a run of 0.4.0: its kernels may differ")


@pytest.mark.parametrize("overrides", [[], ["overwrite=true"]])
def test_a_folder_of_other_files_is_refused_and_left_alone(overrides: list[str], folder: RunFolder) -> None:
    folder.path.mkdir()
    (folder.path / "thesis.tex").write_text("years of work")
    check_refusal(folder, "name: ", *overrides)


@pytest.mark.slow
def test_a_recipe_that_differs_is_told_as_what_the_command_chose(command: Command, tiny: list[str]) -> None:
    run = [*tiny, "arm=a", "name=n", "train.tokens=256"]
    first = command(*run, "arch=gpt2")
    (first.run / "status.json").write_text('{"status": "interrupted", "message": ""}')
    ran = command(*run, "arch=llama")
    check_refused(ran, "arch=llama: the run in runs/n/a/seed=1 has arch=gpt2; ")


@pytest.mark.process
def test_two_processes_cannot_train_in_one_folder_which_a_killed_one_does_not_hold(folder: RunFolder) -> None:
    folder.path.mkdir()
    code = "import sys, filelock; f = filelock.FileLock(sys.argv[1]); f.acquire(); print('held', flush=True); input()"
    arguments = [sys.executable, "-c", code, str(folder.path / LOCK)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=r"another process .*; wait, or choose another name"), locked(folder.path):
            pytest.fail("both hold it")
        other.kill()
    with locked(folder.path):
        assert os.listdir(folder.path) == [LOCK]
