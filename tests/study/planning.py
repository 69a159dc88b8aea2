"""What a study's sweeper does until it trains, and whole studies for the fixtures of a module, inside this process."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode

from llama_lab.cli import train_command
from llama_lab.config.components import CONF_DIR, register_resolvers, report_component_errors
from llama_lab.config.grammar import to_hydra
from llama_lab.config.messages import USER_ERRORS, one_line
from llama_lab.study.design.command import read_command
from llama_lab.study.design.designs import Composer
from llama_lab.study.design.plan import Plan, plan_study
from tests.conftest import Ran, enter, exit_code, last_of_each

register_resolvers()


@cache
def packaged() -> ConfigLoader:
    """Hydra's config loader of conf/."""
    return ConfigLoaderImpl(create_config_search_path(str(CONF_DIR)))


@contextmanager
def commanding() -> Iterator[None]:
    """Inside, further configs can be composed and built as in a command."""
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"), report_component_errors():
        yield


def planned_study(*overrides: str) -> Plan:
    """The plan of the study that `python train.py *overrides` would train in this process."""
    with commanding():
        cfg = packaged().load_configuration("config", to_hydra(last_of_each(overrides)), RunMode.MULTIRUN)
        _, defaults = Composer().compose()
        command = read_command(cfg, list(cfg.hydra.overrides.task), defaults["arch"])
        return plan_study(command, Composer(command.shared))


def refusal(*overrides: str) -> str:
    """What that study is refused with, in the line that a command prints after `error: `."""
    return refused(lambda: planned_study("hydra/launcher=basic", *overrides), overrides)


def refused(act: Callable[[], object], overrides: Sequence[str]) -> str:
    """What a user is told of an error of `act`, in one line."""
    with pytest.raises(USER_ERRORS) as caught:
        act()
    line = one_line(caught.value, typed=overrides)
    assert "\n" not in line
    return line


def conducted(cwd: Path, environment: Mapping[str, str], *overrides: str) -> Ran:
    """What `python train.py *overrides` leaves in `cwd`, trained inside this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        enter(cwd, environment, patch)
        code = exit_code(train_command, ["train.py", *last_of_each([*overrides, "hydra/launcher=basic"])], patch)
    return Ran(code, out.getvalue(), err.getvalue(), cwd)
