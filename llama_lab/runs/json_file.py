"""Dataclasses stored in JSON files with checksums."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import ALTERED, checksum, replace_text

T = TypeVar("T")


@dataclass(frozen=True)
class JsonRecord:
    """A dataclass stored as the JSON file `FILE` in a run's folder.

    Keys are field names, except that the field `metrics` is flattened: it holds all numbers whose keys are no field.
    Other unknown keys, of newer versions, are ignored.
    The key `checksum` is that of all others. NEEDS: metrics that every file has.
    """

    FILE: ClassVar[str]
    NEEDS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, folder: Path, needs: Collection[str] = ()) -> Self:
        """Read the file. Raises ConfigError if it is missing, damaged, or has not all of the keys `needs`."""
        with reading(folder, cls.FILE):
            content = json.loads((folder / cls.FILE).read_text(encoding="utf-8"))
            expected = content.pop("checksum", None) if isinstance(content, dict) else None
            if expected is not None and expected != checksum(json.dumps(content)):
                raise ValueError(ALTERED)
            stored = from_json(cls, content)
            if missing := [key for key in (*cls.NEEDS, *needs) if key not in content]:
                raise KeyError(missing[0])
            return stored

    def save(self, folder: Path) -> None:
        """Replace the file in one move."""
        content = self.to_json()
        content = {"checksum": checksum(json.dumps(content)), **content}
        replace_text(folder / self.FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return asdict(self, dict_factory=_with_flat_metrics)


def _with_flat_metrics(items: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(items)
    metrics: dict[str, Any] = content.pop("metrics", {})
    return content | metrics


def from_json(kind: type[T], content: Any) -> T:
    """An instance of a dataclass from what `json.loads` or `yaml.safe_load` returns; see `JsonRecord`.

    Raises ValueError or TypeError if it is no object, lacks a field without a default, or has one of another type.
    """
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    hints = get_type_hints(kind)
    kinds = {one.name: hints[one.name] for one in fields(kind)}  # type: ignore[arg-type]
    values = {name: as_type(kinds[name], value) for name, value in content.items() if name in kinds}
    if "metrics" in kinds:
        values["metrics"] = {k: v for k, v in content.items() if k not in kinds and type(v) in (int, float)}
    return kind(**values)


def as_type(kind: Any, value: Any) -> Any:
    """What JSON or YAML holds as a value of this type. Raises TypeError for another."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return from_json(kind, value)  # type: ignore[arg-type]
    if origin is UnionType:
        return None if value is None and NoneType in parts else as_type(parts[0], value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(as_type(parts[0], one) for one in value)
    if origin is dict and isinstance(value, dict):
        return {key: as_type(parts[1], one) for key, one in value.items()}
    fits = value in parts if origin is Literal else type(value) in ((float, int) if kind is float else (kind,))
    if not (fits or kind is Any):
        raise TypeError(f"{value!r:.40} is not of the type {kind}")
    return value


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turn any error of reading the file `name` of the run in `path` into a ConfigError that names both."""
    try:
        yield
    except Exception as error:  # of yaml, json, tokenizers or the file system
        damage = f"run={path}: its {name} is damaged, {first_line(error)}"
        raise ConfigError(f"{damage}; restore the file, or train the run again with overwrite=true") from error
