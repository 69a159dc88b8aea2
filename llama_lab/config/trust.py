"""Read stored configs, which may be malicious, and check that their targets are trusted.

Hydra calls whatever `_target_` names, so a config can run any installed code. All targets of a stored config are
checked before anything is built from it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import read_stamped

from .components import package_of, packaged_targets, targets, targets_below
from .grammar import escape


@dataclass(frozen=True)
class Trust:
    """Targets that a stored config may name, in addition to those of the packaged configs.

    packages: every function and class that they define is trusted. targets: further trusted ones.
    """

    packages: tuple[str, ...] = ()
    targets: frozenset[str] = frozenset()

    @classmethod
    def of_command(cls, packages: tuple[str, ...] = ()) -> "Trust":
        """Trust `packages`, and the targets in the command's --config-dir."""
        return cls(packages, search_path_targets())

    def check(self, cfg: DictConfig | ListConfig | dict[str, Any], stored: str, option: Callable[[str], str]) -> None:
        """Raise ConfigError for a target that is not trusted. Call it before anything in `cfg` is built.

        stored: the start of the message. option: maps a package to the override or flag that trusts it.
        """
        for _, target in targets(cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg)):
            if target not in packaged_targets() | self.targets and not self._has(target):
                problem = f"{stored} names {target}, which is none of our components and could run any code"
                raise ConfigError(f"{problem}; if you trust it, add {option(package_of(target))}")

    def _has(self, target: str) -> bool:
        """Whether the target is defined in a trusted package, not only imported there."""
        for package in self.packages:
            if target.startswith(f"{package}."):
                try:
                    module = str(getattr(resolve_name(target), "__module__", ""))
                except Exception as error:  # importing a module can raise anything
                    problem = f"cannot be imported, {first_line(error)}"
                    raise ConfigError(
                        f"{target}: {problem}; install {package}, or have PYTHONPATH name its folder"
                    ) from error
                if module == package or module.startswith(f"{package}."):
                    return True
        return False


def search_path_targets() -> frozenset[str]:
    """The targets in the YAML files that the command line adds by --config-dir or hydra.searchpath."""
    if not HydraConfig.initialized():
        return frozenset()
    sources = HydraConfig.get().runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file" and source.path]
    return frozenset().union(*(targets_below(folder) for folder in folders))


def stored_config(file: Path) -> DictConfig:
    """Read a stored config with every `${...}` as text, so that it cannot read environment variables.

    Raises ConfigError for a file that holds none.
    """
    return DictConfig(with_text(stored_settings(file), escape))


def stored_settings(file: Path) -> dict[str, Any]:
    """The same as plain containers, which takes a tenth of the time."""
    try:
        return read_settings(file)
    except Exception as error:  # of YAML or OmegaConf, without a common base
        damage = f"{file}: is damaged, {first_line(error)}"
        raise ConfigError(f"{damage}; restore the file, or train the run again with overwrite=true") from error


def read_settings(file: Path) -> dict[str, Any]:
    """The same, but raises YAML's errors, and ValueError for a file that holds no settings, or was altered."""
    settings: dict[str, Any] = with_text(_settings(read_stamped(file)), unescape)
    return settings


@cache  # a report reads the config of each of its runs several times, and parsing it takes longest
def _settings(text: str) -> dict[str, Any]:
    content = OmegaConf.load(StringIO(text))
    if not content or not isinstance(content, DictConfig):
        raise ValueError("it holds no settings")
    stored: Any = OmegaConf.to_container(content)
    return {str(key): value for key, value in stored.items()}


def with_text(node: Any, change: Callable[[str], str]) -> Any:
    """A plain container with `change` applied to every string that is not a key."""
    if isinstance(node, dict):
        return {key: with_text(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [with_text(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def unescape(text: str) -> str:
    """Text from a YAML file as OmegaConf reads it, but with interpolations that are not escaped as they stand."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\\\$\{", lambda found: "\\" * (len(found[1]) // 2) + "${", text)
