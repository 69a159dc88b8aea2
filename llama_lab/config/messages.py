"""User errors as one line that names the key, the value and the fix."""

import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.util.errors import USER_ERROR, ConfigError, suggestion

from . import CONF_DIR
from .grammar import flatten, override_key
from .keys import groups, homes, nearest, options
from .trust import package_of

USER_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)
RENAMED = {
    "plan": "estimate",
    "plan_mfu": "estimate_mfu",
    "logger.wandb_project": "logger.project",
}  # keys of earlier versions


def exit_with(error: BaseException, config: str = "config") -> NoReturn:
    """Print a user error in one line and exit with status 2. config: the name of the config being composed."""
    sys.stderr.write(f"error: {one_line(error, config)}\n")
    sys.exit(USER_ERROR)


def one_line(error: BaseException, config: str = "config", typed: Sequence[str] | None = None) -> str:
    """A user error as one line, with the key, the value and the fix as far as Hydra's error has them.

    typed: the overrides; default: those of the command line.
    """
    typed = sys.argv[1:] if typed is None else typed
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return (
            f"{group}={option}: no such option{suggestion(option, error.options)}; choose {' | '.join(error.options)}"
        )
    message = str(error)
    if config == "eval" and message.startswith("In 'data/"):  # which chooses its tokenizer
        return f"data={typed_value('data', typed)}: is a probe, and an imported model has other tokens; choose a text"
    if isinstance(error, OverrideParseException):
        reason = message.splitlines()[0]
        return f"{error.override}: cannot be read, {reason}; write key=value, and quote what is special: 'key=[a,b]'"
    if match := re.match(r"Could not override '([^'@]+)", message.removeprefix(f"In '{config}': ")):
        if (key := match[1]) != "experiment":
            return unknown_key(key, config, typed)
        return f"{key}={typed_value(key, typed)}: no such option; name the folder that holds {key}/ with --config-dir"
    return " ".join(message.split()) or f"the config cannot be read, {type(error).__name__}"


def is_unreadable(error: BaseException) -> bool:
    """Whether Hydra or its parsers raised the error, over a config file that they cannot read or nest without end."""
    packages = [package_of(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = packages[-100 if isinstance(error, RecursionError) else -1 :]
    return not {"hydra", "omegaconf", "yaml", "codecs"}.isdisjoint(innermost)


def unknown_key(key: str, config: str, typed: Sequence[str]) -> str:
    """The message for a key or group that does not exist, with the option that has it, or the closest key."""
    problem = f"{key}={typed_value(key, typed)}: no such key"
    if config != "config":
        return f"{problem}{suggestion(key, known_keys(config, typed))}; `--cfg job` shows them all, `--help` the groups"
    if key in RENAMED:
        return f"{problem} any more; it is called {RENAMED[key]}"
    if having := homes(key):
        return f"{problem} here, it belongs to {' and '.join(having)}; choose that, or leave this out"
    near = nearest(key, known_keys(config, typed))
    hint = f" (did you mean {near}?)" if near else ""
    return f"{problem}{hint}; `--cfg job` shows them all, `--help` the groups"


def typed_value(key: str, typed: Sequence[str]) -> str:
    """The value of a key among overrides; empty if it is not there."""
    return next((o.partition("=")[2] for o in typed if override_key(o) == key), "")


def known_keys(config: str, typed: Sequence[str]) -> list[str]:
    """Every key of the config with the group choices among overrides, and every group."""
    parts = (o.partition("=") for o in typed)
    ours = [(group, option) for group, _, option in parts if group in groups() and option in options(group)]
    choices = [f"{group}={option}" for group, option in ours if config == "config"]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = hydra.compose(config, overrides=choices)
    return [*(groups() if config == "config" else []), *flatten(OmegaConf.to_container(cfg))]
