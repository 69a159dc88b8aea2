"""From a composed config to a Run: all checks that need neither data nor model."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from llama_lab.config.components import CONV, check_idle, check_own_options, of_layers
from llama_lab.config.grammar import format_value, override_key, override_value, settled_keys
from llama_lab.config.layers import unchanged
from llama_lab.config.schema import ENCODERS, KEYS, UNNAMED, belongs, check_kinds, default_settings, groups
from llama_lab.util.errors import ConfigError

from .logger_check import check_logger

if TYPE_CHECKING:
    from llama_lab.devices.site import Site

    from .run import Run

OWN_PROCESSES = ("local_gpus", "slurm", "ray")  # launchers that start each run in processes of its own
OF_ESTIMATES = ("estimate", "an estimate; add estimate=true")
# The key that asks for what a setting belongs to.
OF_MODES = {
    "device": OF_ESTIMATES,
    "estimate_mfu": OF_ESTIMATES,
    "draw_against": ("draw", "a picture; add draw=FILE.svg"),
}
# Of the settings that have no default.
EXAMPLES = {
    "data.files": "data.files=[book.txt]",
    "data.path": "data.path=roneneldan/TinyStories",
    "tokenizer.path": "tokenizer.path=gpt2",
    "run": "run=runs/llama/base/seed=1",
}


def requested_run(
    cfg: DictConfig, choices: Mapping[str, str | None], overrides: list[str], site: "Site | None" = None
) -> "Run":
    """The run for a composed config, its choice per group and overrides. Raises ConfigError; reads only `resume`.

    site: where it trains; default: on this machine, in this process.
    """
    check_run(cfg, choices)
    if cfg.draw:
        raise ConfigError(
            f"draw={cfg.draw}: draws one architecture and trains nothing; leave it out here: a study's report has "
            f"pictures of its arms"
        )
    check_measuring(cfg, overrides)
    from llama_lab.runs.folder import arm_name
    from llama_lab.runs.naming import short_name

    from .run import new_run  # after the checks: torch and lightning take seconds to import

    name = folder_name("name", cfg.name, str(choices["arch"]))
    settled = settled_keys()
    arm = folder_name("arm", cfg.arm, arm_name(overrides, settled))
    ours = {group: str(option) for group, option in choices.items() if option is not None and group in groups()}
    is_swept = any(not belongs(override_key(o), (*UNNAMED, *settled)) for o in overrides)
    label = short_name(ours["arch"], overrides, settled if is_swept else None) if cfg.arm is None else arm
    return new_run(cfg, name, arm, overrides, ours, site.hardware if site else None, label)


def with_recorded(arguments: list[str]) -> list[str]:
    """The arguments, of which `from=` or `resume=FOLDER` bring the overrides of the run there.

    Those typed take their place. Raises ConfigError for a `from=` without a run.
    """
    arguments = with_settings_of(arguments)
    typed = {override_key(argument): argument for argument in arguments}
    folder = override_value(typed["resume"]) if "resume" in typed else None
    if not isinstance(folder, str):
        return arguments
    from llama_lab.runs.folder import read_overrides

    recorded: list[str] = []
    with suppress(ConfigError):  # damage is reported with the folder's other files
        recorded = read_overrides(Path(folder))
    return [*arguments, *(o for o in recorded if override_key(o) not in (*typed, "overwrite"))]


def with_settings_of(arguments: list[str]) -> list[str]:
    """The arguments with, in the place of `from=RUN`, what that run's user had typed, and says so.

    Without what is typed now, and what says where that run is. Raises ConfigError.
    """
    named = [argument for argument in arguments if override_key(argument) == "from"]
    if not named:
        return arguments
    if len(named) > 1:
        raise ConfigError(f"{named[1]}: settings come from one run; leave it out, or type what should differ")
    from llama_lab.runs.folder import OVERRIDES, read_overrides

    folder = Path(str(override_value(named[0])))
    if not (folder / OVERRIDES).is_file():
        example = "name the folder of one that was trained here, such as from=runs/llama/base/seed=1"
        raise ConfigError(f"from={folder}: holds no run; {example}")
    left_out = {*map(override_key, arguments), "name", "arm", "runs_dir", "resume", "overwrite"}
    taken = [override for override in read_overrides(folder) if override_key(override) not in left_out]
    print(f"from={folder}: {' '.join(taken) or 'the defaults'}", file=sys.stderr)
    place = arguments.index(named[0])  # after flags, which Hydra wants first
    return [*arguments[:place], *taken, *arguments[place + 1 :]]


def check_run(cfg: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Raise ConfigError for missing groups or settings, wrong types, and settings without an effect."""
    check_own_options()
    if missing := [group for group in groups() if group not in choices]:
        raise ConfigError(
            f"~{missing[0]}: a run needs a choice of {missing[0]}; leave this out for the default, or see --help"
        )
    check_objective(cfg, choices)
    check_complete(cfg)
    defaults = default_settings(choices)
    check_kinds(cfg, defaults)
    check_idle(cfg.model)
    check_logger(cfg.logger, defaults)
    if "study" in cfg:
        raise ConfigError(f"study={choices['study']}: takes the place of a sweep, one study per command")
    for key, (mode, what) in OF_MODES.items():
        if not cfg[mode] and cfg[key] != defaults[key]:
            raise ConfigError(f"{key}={cfg[key]}: is for {what}, or leave it out")
    asked = [f"{mode}={format_value(cfg[mode])}" for mode in ("draw", "estimate", "measure") if cfg[mode]]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]}: {asked[1]} does something else; give one of them")


def check_objective(cfg: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Raise ConfigError for an objective that is for another family of models, or for other data."""
    objective, family = choices["objective"], choices["family"]
    kind = "encoder" if family in ENCODERS else family
    needed = {"prefix": "decoder", "masked": "encoder", "span": "encoder_decoder"}.get(str(objective), kind)
    if kind != needed:
        raise ConfigError(f"objective={objective}: is for family={needed}, not {family}; change one of them")
    if kind == "encoder" and objective != "masked":
        raise ConfigError(f"family={family}: sees what objective={objective} predicts; add objective=masked")
    if kind == "encoder" and cfg.train.prompt:
        raise ConfigError(f"train.prompt={cfg.train.prompt}: an encoder writes no text; leave it out")
    for data in {"probe", "pair_files"} & {*cfg.data}:
        if objective in ("masked", "span"):
            problem = f"a {data.removesuffix('_files')} has targets of its own; leave it out, or choose a text"
            raise ConfigError(f"objective={objective}: {problem}")


def check_effects(configs: Sequence[DictConfig], overrides: Iterable[str]) -> None:
    """Raise ConfigError for what changes nothing, if typed: a `bias`, an option of ffn, heads, a rule of a pattern.

    configs: of the command's runs: what leaves a study's arm as it is may change others. A recipe's pattern may be left
    without effect by another choice, such as one of attention without a window.
    """
    asked = {override_key(override): override for override in overrides}
    if "bias" in asked and all(OmegaConf.merge(cfg, {"bias": None}).model == cfg.model for cfg in configs):
        problem = "changes nothing, since every key of a bias has that already"
        raise ConfigError(f"{asked['bias']}: {problem}; leave it out, or write bias=null")
    feedforwards = [ffn for cfg in configs for ffn in of_layers(cfg.model, "ffn")]
    for key in ("ffn", "expert", "size.mlp_ratio") if not feedforwards else ():
        if key in asked:
            raise ConfigError(f"{asked[key]}: no layer has a feed-forward; leave it out, or choose another block")
    if "expert" in asked and all("expert" not in ffn for ffn in feedforwards):
        raise ConfigError(f"{asked['expert']}: no layer has experts; add ffn=moe, or leave it out")
    heads = [asked[key] for key in ("model.n_heads", "model.head_dim") if key in asked]
    if heads and all(one.get("_target_") == CONV for cfg in configs for one in of_layers(cfg.model, "attention")):
        raise ConfigError(f"{heads[0]}: attention=conv has no heads; choose another attention, or leave it out")
    patterns = {key: override for key, override in asked.items() if key.partition(".")[0] == "pattern"}
    cfg, *others = configs
    if not patterns or any(other.model.layers for other in others):
        return
    typed = tuple(f"{key}." for key in patterns if "." in key)
    idle = [key for key in unchanged(cfg) if f"{key}.".startswith(typed)] if typed else []
    if cfg.pattern and not cfg.model.layers:
        idle = [*patterns.values()]
    if idle:
        raise ConfigError(f"{idle[0]}: changes nothing, since all layers have that already; leave it out")


def check_measuring(cfg: DictConfig, overrides: list[str]) -> None:
    """Raise ConfigError for a setting that the measuring of a study takes from its runs."""
    if cfg.measure is None:
        if cfg.trust and not cfg.init_from:
            stored = "is for configs that are stored; leave it out, or add measure= or init_from="
            raise ConfigError(f"trust={list(cfg.trust)}: {stored}")
        return
    for override in overrides:
        key = override_key(override)
        is_taken = key in KEYS and KEYS[key].measures
        if not is_taken and key.partition(".")[0] not in ("trainer", "hydra", "hydra/launcher"):
            raise ConfigError(f"{override}: measure= trains what the study's runs have trained; leave it out")
    if cfg.trainer.profile:
        raise ConfigError("trainer.profile=true: would slow down what measure= measures; leave it out")


def folder_name(key: str, name: str | int | None, default: str) -> str:
    """The folder name that the user chose, or the default. Raises ConfigError for one with a path in it."""
    if name is None:
        return default
    if len(os.fsencode(str(name))) > 255:
        raise ConfigError(f"{key}={str(name)[:20]}...: is too long for a folder; use at most 255 letters")
    if not re.fullmatch(r"(?!\.+$)[\w.=+-]+", str(name)):
        raise ConfigError(f"{key}={name}: names a folder below runs_dir; use letters, digits and . _ = + - only")
    return str(name)


def check_devices(cfg: DictConfig, launcher: str) -> None:
    """Raise ConfigError for a run of several processes in a sweep, unless its launcher gives each one of its own.

    With any other, `auto` becomes one device, in place. launcher: the option of `hydra/launcher`.
    """
    if launcher not in OWN_PROCESSES:
        for key in ("devices", "num_nodes"):
            if cfg.trainer[key] == "auto":
                cfg.trainer[key] = 1
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    if nodes not in (1, "auto") and launcher != "slurm":
        raise ConfigError(
            f"trainer.num_nodes={nodes}: hydra/launcher={launcher} trains on one machine; set trainer.num_nodes=1, "
            f"or choose hydra/launcher=slurm"
        )
    if devices != 1 and launcher not in OWN_PROCESSES:
        raise ConfigError(
            f"trainer.devices={devices}: hydra/launcher={launcher} trains on one device, since the processes of the "
            f"others would start the sweep again; set trainer.devices=1, or choose hydra/launcher=local_gpus"
        )


def check_single(choices: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a launcher or a sweeper that has one run only. choices: the option of every group."""
    for key, what in (
        ("hydra/launcher", "starts the runs of a sweep or a study, and this is neither; add --multirun or a study"),
        ("hydra/sweeper", "starts many runs, and this is one; add --multirun"),
    ):
        if choices[key] not in (None, "basic"):
            raise ConfigError(f"{key}={choices[key]}: {what}, or leave it out")


def check_complete(cfg: DictConfig) -> None:
    """Raise ConfigError for a mandatory value that is missing, or an interpolation that cannot be resolved."""
    try:
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except (MissingMandatoryValue, InterpolationResolutionError) as error:
        message = str(error).splitlines()[0]
        if missing := re.search(r"Missing mandatory value: (\S+)", message):
            # The message has the whole key of a value that another one reads, and else the end of it.
            key = str(error.full_key) if isinstance(error, MissingMandatoryValue) else missing[1]
            example = EXAMPLES.get(key)  # ??? means the same wherever it is typed
            raise ConfigError(f"{key}=???: needs a value{f', such as {example}' if example else ''}") from None
        raise ConfigError(message.rpartition("resolving interpolation: ")[2]) from None  # a resolver's, wrapped
