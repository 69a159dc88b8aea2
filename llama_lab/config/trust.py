"""Configs that are stored in folders, which may be anybody's: what they may name, and how they are read.

Hydra builds whatever a `_target_` names, so a config can run any code that is installed. Before something is built from
a stored one, all of its targets are held against what is known.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from llama_lab.errors import ConfigError, first_line

from .components import CONF_DIR

TARGET = re.compile(r"\b_target_:\s*['\"]?([\w.]+)")  # in a YAML file


@dataclass(frozen=True)
class Trust:
    """What a stored config may name, beside the targets of our own configs.

    packages: whose functions and classes may be built. targets: that may be, too.
    """

    packages: tuple[str, ...] = ()
    targets: frozenset[str] = frozenset()

    @classmethod
    def of_command(cls, packages: tuple[str, ...] = ()) -> "Trust":
        """That of the command line at work: these packages, and the YAMLs of its --config-dir."""
        return cls(packages, search_path_targets())

    def check(self, cfg: DictConfig | ListConfig, stored: str, option: Callable[[str], str]) -> None:
        """Raise ConfigError for a target that is not trusted; to be called before anything of `cfg` is built.

        stored: what the message begins with. option: how the user says that a package is trusted.
        """
        for target in targets(OmegaConf.to_container(cfg)):
            if isinstance(target, str) and (target in packaged_targets() | self.targets or self._has(target)):
                continue
            package = str(target).partition(".")[0]
            raise ConfigError(
                f"{stored} names {target}, which is none of our components and could run any code; if you trust it, "
                f"add {option(package)}"
            )

    def _has(self, target: str) -> bool:
        """Whether a trusted package has the target, and defines it itself."""
        for package in self.packages:
            if target.startswith(f"{package}."):
                try:
                    module = str(getattr(get_object(target), "__module__", ""))
                except Exception as error:  # importing a module can raise anything
                    raise ConfigError(
                        f"{target}: cannot be imported, {first_line(error)}; install {package}"
                    ) from error
                if module == package or module.startswith(f"{package}."):
                    return True
        return False


def targets(node: Any) -> Iterator[Any]:
    """Every `_target_` of a plain container, at any depth."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield value
            yield from targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from targets(value)


@cache
def packaged_targets() -> frozenset[str]:
    """The targets of our own configs."""
    return targets_below(CONF_DIR)


def targets_below(folder: Path) -> frozenset[str]:
    """The targets of the YAML files in a folder, at any depth."""
    return frozenset(t for file in folder.rglob("*.yaml") for t in TARGET.findall(file.read_text(encoding="utf-8")))


def search_path_targets() -> frozenset[str]:
    """The targets of the YAML files that the command line adds to ours, by --config-dir or hydra.searchpath."""
    if not HydraConfig.initialized():
        return frozenset()
    sources = HydraConfig.get().runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file" and source.path]
    return frozenset().union(*(targets_below(folder) for folder in folders))


def stored_config(file: Path) -> DictConfig:
    """A stored config, as `read_stored`. Raises ConfigError for a file that holds none."""
    try:
        return read_stored(file)
    except Exception as error:  # YAML and OmegaConf raise what they like
        raise ConfigError(
            f"{file}: is damaged, {first_line(error)}; restore the file, or train the run again"
        ) from error


def read_stored(file: Path) -> DictConfig:
    """A stored config, every `${...}` in it taken as text: an environment variable is nothing that it may read.

    Raises whatever YAML raises, and ValueError for a file that holds no settings.
    """
    content = OmegaConf.load(file)
    if not isinstance(content, DictConfig):
        raise ValueError("it holds no settings")
    return DictConfig(with_text(OmegaConf.to_container(content), escape_new))


def with_text(node: Any, change: Callable[[str], str]) -> Any:
    """A plain container with all of its strings, but for keys, changed."""
    if isinstance(node, dict):
        return {key: with_text(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [with_text(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def escape(text: str) -> str:
    """The text as OmegaConf reads it back."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def escape_new(text: str) -> str:
    """Text of a YAML file with its interpolations escaped, and those left alone that are already."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\$\{", r"\1\1\\${", text)
