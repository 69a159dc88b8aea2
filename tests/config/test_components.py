"""The config files: each says what it is, and the checkout and the help know the same groups."""

import re
from pathlib import Path

import pytest
import yaml

from llama_lab.config.components import CONF_DIR
from tests.composing import compose_config, options

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


@pytest.mark.parametrize("group", ["trainer", "logger"])
def test_every_option_of_trainer_and_logger_sets_the_same_keys(group: str) -> None:
    first, *others = (set(compose_config(f"{group}={option}")[group]) for option in options(group))
    assert len(others) > 2
    assert all(keys == first for keys in others)
