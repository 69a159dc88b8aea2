"""The config files: each says what it is, the help knows the same groups, and a module is few files away."""

import re
import sys
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

import pytest
import yaml

from llama_lab.config.components import CONF_DIR, package_of, packaged_targets
from llama_lab.model.attention import GroupedQueryAttention
from tests.composing import compose_config, options
from tests.conftest import Command

GROUPS = sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())
OPTIONS = sorted(CONF_DIR.glob("*/*.yaml"))


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_an_option_says_its_package_and_in_one_line_what_it_is(path: Path) -> None:
    package, comment, setting = path.read_text(encoding="utf-8").splitlines()[:3]
    assert re.fullmatch(r"# @package [a-z_.]+", package)
    assert re.fullmatch(r"# \S.{4,118}", comment)
    assert not setting.startswith("#"), "the comment has two lines"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_a_default_which_is_one_of_its_options(group: str) -> None:
    defaults = yaml.safe_load((CONF_DIR / "config.yaml").read_text())["defaults"]
    (option,) = (entry[group] for entry in defaults if isinstance(entry, dict) and group in entry)
    assert (CONF_DIR / group / f"{option}.yaml").is_file() or (group, option) == ("study", None)


def test_a_target_in_a_comment_of_a_config_makes_no_package_ours() -> None:
    assert {package_of(target) for target in packaged_targets()} == {"llama_lab", "torch"}


@pytest.mark.parametrize("group", ["trainer", "logger"])
def test_every_option_of_trainer_and_logger_sets_the_same_keys(group: str) -> None:
    first, *others = (set(compose_config(f"{group}={option}")[group]) for option in options(group))
    assert len(others) > 2
    assert all(keys == first for keys in others)


def test_nine_files_lie_between_a_command_and_the_module_that_it_chooses(command: Command, tiny: list[str]) -> None:
    """Those that call the constructor, and those that read, check and change the settings before."""
    ran: set[str] = set()
    calling: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is GroupedQueryAttention.__init__.__code__:
            sys.setprofile(None)
            caller: FrameType | None = frame
            while caller := caller and caller.f_back:
                calling.add(caller.f_code.co_filename)
        elif event == "call" and frame.f_code.co_flags & CO_OPTIMIZED:  # a function, not the body of a class
            ran.add(frame.f_code.co_filename)

    sys.setprofile(watch)
    assert command(*tiny, "attention=gqa", "model.n_kv_heads=1", "train.tokens=256").code == 0
    package = CONF_DIR.parent / "llama_lab"
    files = {str(Path(name).relative_to(package)) for name in calling | ran if name.startswith(f"{package}/")}
    checking = {name for name in files if name.startswith("config/") or name == "training/prepare.py"}
    between = checking | {name for name in files if str(package / name) in calling}
    assert len(between - {"cli.py", "model/attention.py"}) <= 9, sorted(between)


def test_an_expert_has_keys_that_the_default_expert_lacks(command: Command) -> None:
    ran = command("size=pico", "ffn=moe", "expert=gelu_tanh", "draw=one.svg")
    assert ran.err == ""
    assert (ran.cwd / "one.svg").exists()
