"""The config files: each says what it is, the help knows the same groups."""

import re

import pytest
import yaml

from llama_lab.config.components import CONF_DIR, package_of, packaged_targets
from tests.composing import compose_config, options
from tests.conftest import Command


def test_an_option_says_its_package_and_in_one_line_what_it_is() -> None:
    for path in CONF_DIR.glob("*/*.yaml"):
        package, comment, setting = path.read_text(encoding="utf-8").splitlines()[:3]
        assert re.fullmatch(r"# @package [a-z_.]+", package), path
        assert re.fullmatch(r"# \S.{4,118}", comment), path
        assert not setting.startswith("#"), f"the comment of {path} has two lines"


def test_a_group_has_a_default_which_is_one_of_its_options() -> None:
    defaults = yaml.safe_load((CONF_DIR / "config.yaml").read_text())["defaults"]
    for group in (path.name for path in CONF_DIR.iterdir() if path.is_dir()):
        (option,) = (entry[group] for entry in defaults if isinstance(entry, dict) and group in entry)
        assert (CONF_DIR / group / f"{option}.yaml").is_file() or (group, option) == ("study", None)


def test_a_target_in_a_comment_of_a_config_makes_no_package_ours() -> None:
    assert {package_of(target) for target in packaged_targets()} == {"llama_lab", "torch"}


@pytest.mark.parametrize("group", ["trainer", "logger"])
def test_every_option_of_trainer_and_logger_sets_the_same_keys(group: str) -> None:
    first, *others = (set(compose_config(f"{group}={option}")[group]) for option in options(group))
    assert len(others) > 2
    assert all(keys == first for keys in others)


def test_an_expert_has_keys_that_the_default_expert_lacks(command: Command) -> None:
    ran = command("size=pico", "ffn=moe", "expert=gelu_tanh", "draw=one.svg")
    assert ran.err == ""
    assert (ran.cwd / "one.svg").exists()
