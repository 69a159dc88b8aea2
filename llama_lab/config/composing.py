"""Compose further configs, in a command or outside.

Hydra composes the config of a command. For the other configs of a study or a notebook it takes a tenth of a second
each; so files are read once, and merged here as Hydra would. What is not simple, it still composes itself.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from . import CONF_DIR

OVERRIDE = re.compile(r"override\s+/?([\w/]+)")
Choices = dict[str, str | None]
_folders: list[Path] = [CONF_DIR]


class UncommonError(Exception):
    """A config uses what only Hydra composes."""


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML as OmegaConf does: 1e6 is a number, a date is text, and a key stands once. It is ten times as fast."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises UncommonError for a key that is there twice, which Hydra reports."""
        keys = [key.value for key, _ in node.value]
        if len({*keys}) < len(keys):
            raise UncommonError(str(keys))
        return dict(super().construct_mapping(node, deep))


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in YamlLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, eq=False)
class ConfigFile:
    """A config file, without Hydra's own settings.

    settings: nested, below its package. extends: the configs that are merged before it, such as norm/rmsnorm.
    chooses: by group, the option that it loads, if it is the primary config, or that it overrides.
    """

    settings: dict[str, Any]
    extends: tuple[str, ...]
    chooses: Choices


def read_file(file: Path, folder: Path = CONF_DIR) -> ConfigFile:
    """A file of a folder of configs; it is read again only if it has changed.

    Raises UncommonError where its defaults list holds more than options to extend, options to choose, and `_self_`.
    """
    return _read(file, folder, file.stat().st_mtime_ns)


@lru_cache(maxsize=1024)
def _read(file: Path, folder: Path, modified: int) -> ConfigFile:
    text = file.read_text(encoding="utf-8")
    try:
        content = yaml.load(text, YamlLoader)
    except yaml.YAMLError:
        raise UncommonError(str(file)) from None
    if not isinstance(content, dict):
        raise UncommonError(str(file))
    group = file.parent.relative_to(folder).as_posix().strip(".")
    extends, chooses = read_defaults(content.pop("defaults", []), group)
    content.pop("hydra", None)
    header = re.match(r"#\s*@package\s+(\S+)", text)
    package = header[1] if header else group.replace("/", ".")
    if package not in ("", "_global_"):
        for part in reversed(package.split(".")):
            content = {part: content}
    return ConfigFile(content, extends, chooses)


def read_defaults(defaults: Any, group: str) -> tuple[tuple[str, ...], Choices]:
    """What a defaults list extends and chooses, see `ConfigFile`. group: that of the file; empty for a primary config.

    Raises UncommonError for what else Hydra's grammar allows. `_self_` must come first in a primary config, else last.
    """
    extends: list[str] = []
    chooses: Choices = {}
    for entry in defaults:
        if entry == "_self_":
            if defaults.index(entry) != (len(defaults) - 1 if group else 0):
                raise UncommonError(entry)
        elif isinstance(entry, str) and re.fullmatch(r"/?[\w./-]+", entry):
            extends.append(entry.lstrip("/") if entry.startswith("/") else f"{group}/{entry}")
        elif isinstance(entry, dict) and len(entry) == 1:
            ((key, option),) = entry.items()
            override = OVERRIDE.fullmatch(key)
            is_loaded = group == "" and re.fullmatch(r"\w+", key)
            is_one = option is None or re.fullmatch(r"[\w.+-]+", str(option))
            if not is_one or not (override or is_loaded):
                raise UncommonError(key)
            chooses[override[1] if override else key] = None if option is None else str(option)
        else:
            raise UncommonError(str(entry))
    return tuple(extends), chooses


def with_extended(path: str, folders: Sequence[Path] = (CONF_DIR,)) -> Iterator[ConfigFile]:
    """The config `path`, such as norm/rmsnorm, of the first folder that has it, after those that it extends."""
    folder = next((folder for folder in folders if (folder / f"{path}.yaml").is_file()), None)
    if folder is None:
        raise UncommonError(path)
    config = read_file(folder / f"{path}.yaml", folder)
    for extended in config.extends:
        yield from with_extended(extended, folders)
    yield config


def merged(files: Iterable[ConfigFile]) -> dict[str, Any]:
    """The settings of files, merged in this order; nested and unresolved."""
    settings: dict[str, Any] = {}
    for file in files:
        merge(settings, file.settings)
    return settings


def merge(settings: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Merge `others` into nested settings in place, as OmegaConf does: a missing value (???) replaces none."""
    for key, value in others.items():
        if isinstance(value, Mapping):
            below = settings.get(key)
            settings[key] = below if isinstance(below, dict) else {}
            merge(settings[key], value)
        elif value != "???" or key not in settings:
            settings[key] = value


def config_folders() -> list[Path]:
    """The folders of configs, the packaged one first: those of Hydra's search path, or of its last one."""
    if GlobalHydra.instance().is_initialized():
        sources = GlobalHydra.instance().config_loader().get_sources()
        _folders[:] = [Path(source.path) for source in sources if source.scheme() == "file"]
    return _folders


@contextmanager
def composing() -> Iterator[ConfigLoader]:
    """Context manager: gives Hydra's config loader, with the user's config folders in a command."""
    is_ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_ready else hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def options_of(group: str) -> list[str]:
    """The names of a group's options, including those in the user's own folders."""
    return sorted({file.stem for folder in config_folders() for file in (folder / group).glob("*.yaml")})


def compose(overrides: Sequence[str], config: str = "config") -> tuple[DictConfig, Choices]:
    """The config with these overrides, without Hydra's node, and the choice of every group; Hydra's errors."""
    try:
        return _compose(overrides, config)
    except UncommonError:
        with composing() as loader:
            cfg = loader.load_configuration(config, list(overrides), RunMode.RUN, from_shell=False)
        choices = dict(cfg.hydra.runtime.choices)
        return without(cfg, "hydra"), choices


def _compose(overrides: Sequence[str], config: str) -> tuple[DictConfig, Choices]:
    typed: Choices = {}
    keys: dict[str, Any] = {}
    for override in map(parse_override, overrides):
        key, value = override.key_or_group, override.value()
        is_plain = not (override.is_add() or override.is_force_add() or override.is_delete())
        if not is_plain or override.package is not None or override.is_sweep_override() or of_hydra(key):
            raise UncommonError(override.input_line)
        is_group = any((folder / key).is_dir() for folder in config_folders())
        if is_group and not isinstance(value, dict):
            if not isinstance(value, str):
                raise UncommonError(override.input_line)
            typed[key] = value
        else:
            keys[key] = value
    choices = all_choices(config, typed)
    cfg = OmegaConf.create(merged(chosen_files(config, choices)))
    OmegaConf.set_struct(cfg, True)
    for key, value in keys.items():
        try:
            OmegaConf.update(cfg, key, value)
        except OmegaConfBaseException:
            raise UncommonError(key) from None
    return cfg, choices


def of_hydra(key: str) -> bool:
    """Whether a key or group sets what Hydra does, such as the launcher, and nothing of the run."""
    return re.match(r"hydra\b", key) is not None


@cache
def parse_override(override: str) -> Override:
    """An override in Hydra's grammar. Raises its errors."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def all_choices(config: str, typed: Mapping[str, str | None]) -> Choices:
    """The choice of every group, of which these are typed.

    As in Hydra the later groups of the defaults list come first: what an option chooses in another group wins over the
    primary config, what is typed over both.
    """
    defaults = read_file(CONF_DIR / f"{config}.yaml").chooses
    if unknown := [group for group in typed if group not in defaults]:
        raise UncommonError(unknown[0])
    chosen = dict(typed)
    for group in reversed(defaults):
        option = chosen.setdefault(group, defaults[group])
        for file in reversed(option_files(group, option)):
            for other, its_option in file.chooses.items():
                chosen.setdefault(other, its_option)
    return {group: chosen[group] for group in defaults if not of_hydra(group)}


def option_files(group: str, option: str | None) -> list[ConfigFile]:
    """The files of an option, after those that it extends; none of a group without a choice, and of Hydra's."""
    if option is None or of_hydra(group):
        return []
    return [*with_extended(f"{group}/{option}", config_folders())]


def chosen_files(config: str, choices: Mapping[str, str | None]) -> tuple[ConfigFile, ...]:
    """The files of a config with these choices, in the order in which they are merged."""
    files = [read_file(CONF_DIR / f"{config}.yaml")]
    for group, option in choices.items():
        files += option_files(group, option)
    return tuple(files)


def with_options(choices: Mapping[str, str | None], config: str = "config") -> DictConfig:
    """The config with these options and no key changed; it is shared, so copy it before you change it."""
    try:
        return _shared(chosen_files(config, all_choices(config, choices)))
    except UncommonError:
        return compose([f"{group}={option}" for group, option in choices.items() if option], config)[0]


@lru_cache(maxsize=256)
def _shared(files: tuple[ConfigFile, ...]) -> DictConfig:
    return OmegaConf.create(merged(files))


def run_config(cfg: DictConfig, choices: Mapping[str, Any]) -> tuple[DictConfig, dict[str, Any]]:
    """A run's config and choices, without Hydra's node and what is the study's alone; changes `cfg` in place."""
    return without(cfg, "hydra", "study", "match"), {**choices, "study": None}


def without(cfg: DictConfig, *keys: str) -> DictConfig:
    """Delete these keys from a config in place, if present, and return it."""
    with flag_override(cfg, ["struct", "readonly"], False):
        for key in keys:
            cfg.pop(key, None)
    return cfg
