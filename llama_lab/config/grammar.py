"""Translation between the command line, Hydra's override grammar, and values as people read them."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from llama_lab.util.errors import ConfigError

from .schema import FOLDERS, PATHS, TEXTS

TYPED = "LLAMA_LAB_COMMAND"  # variable of a launched run: the command line of its launcher, as JSON
ITEM = r"(?:\[[^][]*\]|[^][,])+"  # of a list of paths; brackets inside belong to a glob pattern
STRUCTURE = "[](){},'\""  # of Hydra's lists, calls and quotes
QUOTED = r"""(['"])((?!\1)[^\\]|\\.)*\1"""  # as a whole: not `"a" or "b"`
CONSTANTS = {None: "null", True: "true", False: "false"}


def to_hydra(arguments: Sequence[str]) -> list[str]:
    """Translate the command line to Hydra's grammar. Raises ConfigError for a repeated key or an empty argument."""
    arguments = flags_first(arguments)
    given: dict[str, str] = {}
    for argument in arguments:
        typed, equals, value = argument.partition("=")
        if argument.startswith("-") or not (equals or argument.startswith("~")):
            continue
        if equals and not typed.strip("+~ "):
            raise ConfigError(f"{argument}: names no key; write KEY=VALUE")
        if (key := override_key(argument)) in given:  # Hydra would silently use the last
            earlier = "it" if given[key] == argument else given[key]
            raise ConfigError(f"{argument}: {earlier} is given already; give every key once")
        if equals and value in ("", "''", '""', "{}") and not key.endswith("prompt"):
            raise ConfigError(f"{argument}: is empty and sets nothing; give a value, or leave it out")
        given[key] = argument
    return [quote_argument(argument) for argument in arguments]


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Move flags and their values to the front: argparse does not accept overrides on both sides of a flag."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    return [*flags, *overrides]


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return TYPED in os.environ


def typed_command() -> list[str]:
    """The command that the user typed; in a launched run, the launcher's."""
    return json.loads(os.environ[TYPED]) if is_launched() else sys.argv


def settled_keys() -> set[str]:
    """The keys that the command sets to a single value."""
    typed = [argument for argument in typed_command()[1:] if "=" in argument and not argument.startswith("-")]
    overrides = OverridesParser.create().parse_overrides(typed)
    return {override_key(o) for o, override in zip(typed, overrides, strict=True) if not override.is_sweep_override()}


def typed_flags() -> list[str]:
    """The flags of this command, with their values, except the one that makes it a sweep. See `flags_first`."""
    arguments = sys.argv[1:]
    count = len(arguments) - len(get_args_parser().parse_args(arguments).overrides)
    return [flag for flag in arguments[:count] if flag not in ("-m", "--multirun")]


def quote_argument(argument: str) -> str:
    """Quote the text or path in an argument where Hydra's grammar needs it, unless it is quoted already, or null.

    So `prompt="def main("`, `resume=runs/llama/base/seed=1` and `data.files=[été.txt]` need no quotes beyond the
    shell's.
    """
    typed, equals, value = argument.partition("=")
    key = override_key(argument)
    if argument.startswith("-") or not equals or value == "null" or re.fullmatch(QUOTED, value, re.DOTALL):
        return argument
    if key in FOLDERS:
        value = os.path.expanduser(value)  # as the shell does at the beginning of a word
    if key in TEXTS:
        value = escape(value)
    elif is_parsable(f"{typed}={value}", key in FOLDERS):
        return f"{typed}={value}"
    elif key in PATHS and re.fullmatch(rf"\[{ITEM}(,{ITEM})*\]", value):  # such as [my books/*.txt,b[0-9].txt]
        return f"{typed}=[{','.join(quote(item.strip()) for item in re.findall(ITEM, value[1:-1]))}]"
    elif value.startswith("[") or (set(value) & set(STRUCTURE) and key not in PATHS) or not value.isprintable():
        return argument  # meant for Hydra's grammar; Hydra reports the error
    return f"{typed}={quote(value)}"


def is_parsable(argument: str, is_folder: bool) -> bool:
    """Whether Hydra can parse an argument; for a folder, as text: it would parse 2024 as a number."""
    try:
        value = override_value(argument)
    except HydraException:
        return False
    return not (is_folder and isinstance(value, bool | int | float))


def to_override(value: object) -> str:
    """A value in Hydra's override grammar; text is quoted only where needed."""
    if isinstance(value, str):
        return value if is_plain(value) else quote(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{to_override(own)}' for key, own in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(to_override, value))}]"
    return CONSTANTS[value] if value is None or isinstance(value, bool) else str(value)


def format_value(value: object) -> str:
    """A value as people read it, in messages and names: 1000000, 0.1, null, [1,2]."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(format_value, value))}]"
    return value if isinstance(value, str) else to_override(value)


def is_plain(text: str) -> bool:
    """Whether Hydra parses a text as that text, also inside a list."""
    try:
        return text != "" and override_value(f"key={text}") == text
    except HydraException:
        return False


def quote(text: str) -> str:
    """A text in quotes, unless it has them already."""
    if re.fullmatch(QUOTED, text, re.DOTALL):
        return text
    text = re.sub(r'(\\*)"', r'\1\1\\"', text)
    text = re.sub(r"(\\+)\Z", r"\1\1", text)
    return f'"{text}"'


def override_key(override: str) -> str:
    """The key that an override sets, adds or deletes: `norm` of `+norm=none`."""
    return override.lstrip("+~").partition("=")[0]


def override_value(override: str) -> Any:
    """The value that an override of Hydra's grammar sets."""
    return OverridesParser.create().parse_override(override).value()


def escape(text: str) -> str:
    """Escape interpolations, so that OmegaConf reads `text` back as it is."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
