"""`--help NAME ...`: a group, an option or a key, explained by the comments of the YAML files that set it.

PyYAML drops comments, but its nodes have line numbers, from which the comments behind and above are found.
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.util.errors import ConfigError, suggestion

from .grammar import override_key
from .messages import nearest
from .schema import flatten

WIDTH = 80
COLUMN = 34  # the widest column of names; a longer name has a line of its own
HELP = ("--help", "-h")
COMMENT = re.compile(r":?\s*(?:[|>][-+]?)?\s*#\s*(.*)")  # behind a key or its value


def read_help(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What a command with `--help` asks about, and the command that composes it, in which a study is not run.

    arguments: flags first. `--help` alone asks about nothing, and the command stays as it is.
    """
    words = get_args_parser().parse_args(arguments).overrides
    names = [word for word in words if not word.startswith(("~", "hydra"))]
    if not names:
        return [], [*arguments]
    flags = [flag for flag in arguments[: len(arguments) - len(words)] if flag not in (*HELP, "--multirun", "-m")]
    return names, [*flags, *(word for word in words if "=" in word or word.startswith("~")), "hydra.mode=RUN"]


def explain(cfg: DictConfig, config: str, names: Sequence[str]) -> None:
    """Print what each name is. config: the name of the composed config. Raises ConfigError for an unknown name."""
    composed = Composed(cfg, config)
    pages = ["\n".join(page(composed, name)) for name in names]
    sys.stdout.write("\n\n".join(pages) + "\n")


@dataclass(frozen=True)
class File:
    """A config file. path: without suffix, below a folder of the search path. package: where its keys go."""

    path: str
    package: str
    text: str

    @property
    def about(self) -> str:
        """Its first comment: what an option is."""
        found = re.match(r"(?:#\s*@package.*\n)?#\s*(?!@package)(.*)", self.text)
        return found[1] if found else ""

    @property
    def chosen(self) -> list[str]:
        """The groups of which it chooses an option."""
        return re.findall(r"^\s*-\s*override\s+/([\w/]+)\s*:", self.text, re.MULTILINE)

    @cached_property
    def comments(self) -> dict[str, str]:
        """The keys that it sets, and the comment on each: behind the value, or above the key; empty without one."""
        lines = self.text.splitlines()
        return {key: comment(lines, name, value) for key, name, value in nodes(yaml.compose(self.text), self.package)}


class Composed:
    """A composed config with the files that it was composed from."""

    def __init__(self, cfg: DictConfig, config: str) -> None:
        self.cfg, self.config = cfg, config
        self.loader = GlobalHydra.instance().config_loader()
        typed = HydraConfig.get().overrides
        self.overrides = [*typed.hydra, *typed.task]  # of Hydra's, hydra.searchpath counts
        chosen = HydraConfig.get().runtime.choices
        self.choices = {group: option for group, option in chosen.items() if option and not group.startswith("hydra/")}
        self.groups = self.loader.list_groups("") if config == "config" else []
        self.written = flatten(OmegaConf.to_container(cfg))
        self.keys = [key for key in self.written if not key.startswith("hydra.")]
        self.file = cache(self._file)
        found = self.loader.compute_defaults_list(config, self.overrides, RunMode.RUN).defaults
        self.defaults = [one for one in found if one.config_path and not one.config_path.startswith("hydra/")]
        self.files = [self.file(str(one.config_path), one.package) for one in self.defaults]

    def options(self, group: str) -> dict[str, File]:
        """The options of a group, the user's own included."""
        names = self.loader.get_group_options(group, ObjectType.CONFIG, self.config, self.overrides)
        return {name: self.file(f"{group}/{name}", None) for name in sorted(names)}

    def option(self, group: str) -> File:
        """The chosen option of a group."""
        return self.options(group)[self.choices[group]]

    def keys_of(self, file: File) -> list[str]:
        """The keys that a file sets, those of the files in its defaults list included."""
        paths = {file.path}
        while more := {one.config_path for one in self.defaults if one.parent in paths} - paths:
            paths |= more
        found = {key for own in self.files if own.path in paths for key in own.comments}
        return [key for key in self.written if key in found]

    def comment(self, key: str) -> str:
        """The comment on a key or the node that holds it: of the last file that has one, or another option's."""
        having = [file for file in self.files if key in file.comments]
        groups = {file.path.rpartition("/")[0] for file in having} - {""}
        others = [file for group in sorted(groups) for file in self.options(group).values()]
        found = [text for file in (*having[::-1], *others) if (text := file.comments.get(key, ""))]
        above = key.rpartition(".")[0]
        return found[0] if found else self.comment(above) if above else ""

    def value(self, key: str) -> Any:
        """A key's value; unresolved if it is missing or depends on a missing one."""
        try:
            value = OmegaConf.select(self.cfg, key, throw_on_missing=True)
        except (OmegaConfBaseException, ConfigError):
            return self.written[key]
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    def _file(self, path: str, package: str | None) -> File:
        """A file of the first folder of the search path that has it. package: default: what its first line says."""
        text = ""
        for source in HydraConfig.get().runtime.config_sources:
            if source.schema in ("file", "pkg"):
                folder = Path(source.path) if source.schema == "file" else resources.files(source.path)
                if (file := folder.joinpath(f"{path}.yaml")).is_file():
                    text = file.read_text(encoding="utf-8")
                    break
        if package is None:
            header = re.match(r"#\s*@package\s+(\S+)", text)
            package = header[1].replace("_global_", "") if header else path.rpartition("/")[0].replace("/", ".")
        return File(path, package, text)


def page(composed: Composed, name: str) -> list[str]:
    """The lines that explain a name. Raises ConfigError if there is none like it."""
    key = override_key(name)
    if key in composed.choices and "=" in name:
        file = composed.option(key)
        return [*textwrap.wrap(f"{name}: {file.about}", WIDTH), *file_lines(composed, file)]
    if key in composed.groups:
        options = composed.options(key)
        lines = table([(f"{key}={option}", file.about) for option, file in options.items()])
        if key not in composed.choices:
            return [*lines, "", f"None is chosen; the keys of one: --help {key}={next(iter(options))}"]
        chosen = composed.choices[key]
        return [*lines, "", f"Of {key}={chosen}, which is chosen:", *file_lines(composed, options[chosen])]
    if below := [one for one in composed.keys if one == key or one.startswith(f"{key}.")]:
        return key_lines(composed, below)
    known = [*composed.groups, *composed.keys, *(one.partition(".")[0] for one in composed.keys)]
    near = nearest(key, known) if composed.groups else None
    hint = f" (did you mean {near}?)" if near else suggestion(key, known)
    raise ConfigError(f"--help {key}: no such group, option or key{hint}; `--help` alone lists the groups")


def file_lines(composed: Composed, file: File) -> list[str]:
    """The keys that an option sets, and its choices in other groups, as a recipe makes them."""
    chosen = [group for group in file.chosen if group in composed.choices]
    choices = table([(f"{group}={composed.choices[group]}", composed.option(group).about) for group in chosen])
    return [line for part in (key_lines(composed, composed.keys_of(file)), choices) if part for line in ("", *part)]


def key_lines(composed: Composed, keys: Sequence[str]) -> list[str]:
    """A table of keys with their values and comments; without what only repeats another key of the table."""
    rows = []
    for key in keys:
        comment = composed.comment(key)
        repeats = not comment and str(composed.written[key])[2:-1] in keys
        if key in composed.written and not key.endswith("_partial_") and not repeats:
            rows.append((f"{key}={in_yaml(composed.value(key))}", comment))
    return table(rows)


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and what they are, in two columns."""
    column = max((len(name) for name, what in rows if what and len(name) <= COLUMN), default=COLUMN) + 4
    lines = []
    for name, what in rows:
        wrapped = textwrap.wrap(what, WIDTH, initial_indent=" " * column, subsequent_indent=" " * column)
        if wrapped and len(name) + 4 <= column:
            wrapped[0] = f"  {name}".ljust(column) + wrapped[0][column:]
        else:
            lines.append(f"  {name}")
        lines += wrapped
    return lines


def in_yaml(value: Any) -> str:
    """A value on one line, as a command would have it."""
    if isinstance(value, str | float) and value != "":
        return str(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.rstrip().removesuffix("\n...")


def nodes(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """The keys below a node, each with the nodes of its name and its value; the defaults list is none."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        key = f"{prefix}.{name.value}".lstrip(".")
        if name.value != "defaults":
            yield key, name, value
            yield from nodes(value, key)


def comment(lines: Sequence[str], name: yaml.Node, value: yaml.Node) -> str:
    """The comment behind a key, or the lines of comment above it, as indented as the key, but not the file's head."""
    behind = name.end_mark if value.start_mark.line != value.end_mark.line else value.end_mark
    if found := COMMENT.fullmatch(lines[behind.line][behind.column :]):
        return str(found[1])
    first = name.start_mark.line
    while first and lines[first - 1].startswith(" " * name.start_mark.column + "#"):
        first -= 1
    return " ".join(line.strip("# ") for line in lines[first : name.start_mark.line]) if first else ""
