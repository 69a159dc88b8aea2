"""Keys and values as overrides set them, in Hydra's grammar, and as people read them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

QUOTED = r"""(['"])((?!\1)[^\\]|\\.)*\1"""  # as a whole: not `"a" or "b"`
CONSTANTS = {None: "null", True: "true", False: "false"}


def written(value: object) -> str:
    """A value in Hydra's grammar, which reads it as it was: text in quotes only where it would be something else."""
    if isinstance(value, str):
        return value if is_plain(value) else quote(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{written(own)}' for key, own in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(written, value))}]"
    return CONSTANTS[value] if value is None or isinstance(value, bool) else str(value)


def shown(value: object) -> str:
    """A value of an axis as people read it, also in names: 1000000, 0.1, null, [1,2]."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(shown, value))}]"
    return value if isinstance(value, str) else written(value)


def is_plain(text: str) -> bool:
    """Whether Hydra reads a text as itself, also in a list."""
    try:
        return text != "" and OverridesParser.create().parse_override(f"key={text}").value() == text
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


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config: `{"train.tokens": 2e6}`; lists are values."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        k: v for key, child in node.items() for k, v in flatten(child, f"{prefix}.{key}" if prefix else key).items()
    }
