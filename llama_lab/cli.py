"""The command line: Hydra composes, we train, and what a person did wrong is told in one line."""

import argparse
import difflib
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from llama_lab.config import CONF_DIR, flatten, register_resolvers
from llama_lab.errors import ConfigError, FinishedRunError
from llama_lab.kinds import check_kinds, default_settings

if TYPE_CHECKING:
    from llama_lab.training.folder import RunFolder

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
USER_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)


def train_command() -> None:
    """`python train.py`, and `llama-lab-train` where the package is installed. HYDRA_FULL_ERROR=1 shows tracebacks."""
    register_resolvers()
    os.environ.setdefault("LLAMA_LAB_TRACEBACK", os.environ.get("HYDRA_FULL_ERROR", "0"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # so that Hydra hands errors over instead of printing them
    try:
        hydra.main(str(CONF_DIR), "config", version_base="1.3")(train_job)()
    except USER_ERRORS as error:
        if wants_traceback():
            raise
        exit_with(error)
    except ValueError as error:  # Hydra's own, which names no group
        emptied = [o for o in sys.argv[1:] if o.endswith("=null") and o.removesuffix("=null") in groups()]
        if not emptied or not str(error).startswith("Config group override"):
            raise
        exit_with(ConfigError(f"{emptied[0]}: a run needs one; leave it out for the default, or see --help"))
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; the same command goes on, from the last checkpoint if there is one\n")
        sys.exit(INTERRUPTED)


def eval_command() -> None:
    """`python eval.py RUN`, and `llama-lab-eval` where the package is installed."""
    register_resolvers()
    parser = argparse.ArgumentParser(
        description="Read the whole validation set with a run's last checkpoint, and write eval.json into its folder."
    )
    parser.add_argument("run", type=Path, help="a run's folder, such as runs/llama/base/seed=1")
    folder = parser.parse_args().run
    from llama_lab.training.evaluate import evaluate  # takes seconds to import

    try:
        result = evaluate(folder)
    except ConfigError as error:
        exit_with(error)
    print(
        f"val loss {result['val/loss']:.4f} nats/token, {result['val/bits_per_byte']:.4f} bits per byte, over "
        f"{result['val_tokens']:,} tokens, after {result['step']:,} steps"
    )


def train_job(cfg: DictConfig) -> None:
    """A whole command, or one job of a sweep."""
    in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        run_one(cfg, in_sweep)
    except FinishedRunError as error:
        if not in_sweep:
            exit_with(error)
        print(f"{' '.join(HydraConfig.get().overrides.task)}: done before, passed over")
    except USER_ERRORS as error:
        if not in_sweep and not wants_traceback():
            exit_with(error)
        # Hydra goes on with the rest of a sweep, and in the end tells of the first failure alone.
        sys.stderr.write(f"error: {' '.join(HydraConfig.get().overrides.task)}: {one_line(error)}\n")
        raise


def run_one(cfg: DictConfig, in_sweep: bool) -> None:
    """Train one run and tell how it ended; exits with a status other than 0 unless it is done, or one of a sweep."""
    job = HydraConfig.get()
    check_groups(job.runtime.choices)
    check_complete(cfg)
    check_kinds(cfg, default_settings(job.runtime.choices))
    if in_sweep and (cfg.trainer.devices, cfg.trainer.num_nodes) != (1, 1):
        raise ConfigError(
            f"trainer.devices={cfg.trainer.devices}: a sweep in one process trains on one device, since the processes "
            f"of the others would start the sweep again; set trainer.devices=1"
        )
    from llama_lab.training.folder import arm_name
    from llama_lab.training.hardware import current_rank
    from llama_lab.training.run import plan, train  # after the checks: torch and lightning take seconds to import

    overrides = list(job.overrides.task)
    run = plan(cfg, run_name(cfg.name, job.runtime.choices["arch"]), arm_name(overrides), overrides)
    outcome = train(run)
    if current_rank() == 0:
        sys.stderr.write(closing_words(outcome, run.folder))
    if outcome == "interrupted":
        sys.exit(INTERRUPTED)
    if outcome == "diverged" and not in_sweep:
        sys.exit(FAILED)


def run_name(name: str | int | None, recipe: str) -> str:
    """The folder of a run's arms: the user's name, or the recipe's. Raises ConfigError for one that leads elsewhere."""
    if name is not None and not re.fullmatch(r"(?!\.+$)[\w.=+-]+", str(name)):
        raise ConfigError(f"name={name}: names a folder below runs_dir; use letters, digits and . _ = + - only")
    return recipe if name is None else str(name)


def closing_words(outcome: str, folder: "RunFolder") -> str:
    """What a person should know of a run that did not come to its end."""
    if outcome == "interrupted":
        return f"stopped; go on with the same command:\n  {shlex.join(['python', *sys.argv])}\n"
    if outcome == "diverged":
        message = folder.read_json("status.json")["message"]
        return (
            f"diverged: {message}; try a lower optim.lr, a longer schedule.warmup, or train.grad_clip=1.0; "
            f"the record is in {folder.path}\n"
        )
    return ""


def wants_traceback() -> bool:
    """Whether the user set HYDRA_FULL_ERROR=1, before we did."""
    return os.environ["LLAMA_LAB_TRACEBACK"] == "1"


def exit_with(error: BaseException) -> NoReturn:
    """Tell a user's error in one line, and exit."""
    sys.stderr.write(f"error: {one_line(error)}\n")
    sys.exit(USER_ERROR)


def check_groups(choices: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a group of ours that was taken away."""
    for group in groups():
        if group not in choices:
            raise ConfigError(
                f"~{group}: a run needs a choice of {group}; leave this out for the default, or see --help"
            )


def groups() -> list[str]:
    """The config groups, by name."""
    return sorted(p.name for p in CONF_DIR.iterdir() if p.is_dir())


def check_complete(cfg: DictConfig) -> None:
    """Raise ConfigError for a mandatory value that is missing, or an interpolation that cannot be resolved."""
    try:
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except (MissingMandatoryValue, InterpolationResolutionError) as error:
        message = str(error).splitlines()[0]
        if missing := re.search(r"Missing mandatory value: (\S+)", message):
            raise ConfigError(f"{missing[1]}=???: needs a value, such as {missing[1]}=[book.txt]") from None
        raise ConfigError(message.rpartition("resolving interpolation: ")[2]) from None  # a resolver's, wrapped


def one_line(error: BaseException) -> str:
    """What went wrong, naming the key, the value and the fix where Hydra knows them."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return (
            f"{group}={option}: no such option{suggestion(option, error.options)}; choose {' | '.join(error.options)}"
        )
    message = str(error)
    if isinstance(error, OverrideParseException):
        reason = message.splitlines()[0]
        return f"{error.override}: cannot be read, {reason}; write key=value, and quote what is special: 'key=[a,b]'"
    if match := re.match(r"Could not override '([^'@]+)", message.removeprefix("In 'config': ")):
        return unknown_option(match[1]) if match[1] == "experiment" else unknown_key(match[1])
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


def unknown_key(key: str) -> str:
    """The message for a key or group that does not exist, with the nearest one that does."""
    near = suggestion(key, known_keys())
    return f"{key}={typed_value(key)}: no such key{near}; `--cfg job` shows them all, `--help` the groups"


def unknown_option(group: str) -> str:
    """The message for an option of a group that has none of our own."""
    return f"{group}={typed_value(group)}: no such option; name the folder that holds {group}/ with --config-dir"


def typed_value(key: str) -> str:
    """What the command line sets a key to."""
    return next((o.partition("=")[2] for o in sys.argv[1:] if o.lstrip("+~").partition("=")[0] == key), "")


def known_keys() -> list[str]:
    """Every key of the config as the command line's group choices compose it, and every group."""
    choices = [o for o in sys.argv[1:] if o.partition("=")[0] in groups()]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = hydra.compose("config", overrides=choices)
    return [*groups(), *flatten(OmegaConf.to_container(cfg))]


def suggestion(wrong: str, known: Sequence[str]) -> str:
    """` (did you mean ...?)` if something known is close."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
