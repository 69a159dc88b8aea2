"""Kinds of settings in config.json: each translates theirs to ours (`read`) and ours to theirs (`write`).

Our settings are flat: the model node of a resolved config with dotted keys, `{"dim": 64, "norm.eps": 1e-5}`. Theirs are
a config.json with dotted keys.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]
Derived = Callable[[Settings], Any]  # a value that follows from others of our settings

MODEL = "llama_lab.model"
INFINITY = {"__float__": "Infinity"}  # as transformers writes it


def flatten(node: Mapping[str, Any], prefix: str = "") -> Settings:
    """A nested dict with dotted keys. Lists, and empty dicts, are values."""
    flat: Settings = {}
    for key, value in node.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def nest(flat: Settings) -> dict[str, Any]:
    """The nested dict of dotted keys; the inverse of `flatten`."""
    node: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        place = node
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return node


class Setting:
    """Base class: translates one or a few of their settings; a kind has at least `names`, or a `name`."""

    name: str

    @property
    def names(self) -> Sequence[str]:
        """Their settings that it reads, those below them too: in `name`, with `|` between them."""
        return self.name.split("|")

    def read(self, config: Settings, ours: Settings) -> Settings:
        """Our settings by their flat `config`, after those that were read before. Raises ValueError."""
        return {}

    def write(self, ours: Settings) -> Settings:
        """Their flat settings."""
        return {}


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """One name, or several that stand for one thing."""
    return (names,) if isinstance(names, str) else names


def derive(value: Any, ours: Settings) -> Any:
    """A value, or the result of the function that derives it."""
    return value(ours) if callable(value) else value


def numbers(name: str, value: Any) -> Any:
    """A setting of theirs that is a number, or a list of them, or null. Raises ValueError.

    A list becomes a tuple: in flat settings, a list has a value for each layer.
    """
    return tuple(number(name, item) for item in value) if isinstance(value, list | tuple) else number(name, value)


def number(name: str, value: Any) -> Any:
    """A setting of theirs that is a number, a boolean or null. Raises ValueError: a list could hold code to run."""
    if not isinstance(value, bool | int | float | None):
        raise ValueError(f"{name}={value!r}: is no number")
    return value


def real(value: Any) -> Any:
    """A number as a float."""
    return float(value) if type(value) is int else value


@dataclass(frozen=True)
class Value(Setting):
    """A setting with the same meaning in both.

    name: theirs, and after `|` names that transformers puts before it. ours: one key, or several with the same value.
    default: transformers' own, where it is absent, or null unless `nullable`; None for a number that may be any.
    """

    name: str
    ours: str | tuple[str, ...]
    default: Any | Derived
    nullable: bool = False

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        theirs = [(name, config[name]) for name in self.names if name in config]
        found = [number(name, value) for name, value in theirs if self.nullable or value is not None]
        value = found[-1] if found else derive(self.default, ours)
        return dict.fromkeys(as_tuple(self.ours), self.as_ours(value, ours))

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; their classes refuse a whole number where they declare a float."""
        value = self.as_theirs(ours.get(as_tuple(self.ours)[0]), ours)
        return {self.names[0]: real(value) if isinstance(self.default, float | None) else value}

    def as_ours(self, value: Any, ours: Settings) -> Any:
        """Their value in our terms."""
        return value

    def as_theirs(self, value: Any, ours: Settings) -> Any:
        """The inverse of `as_ours`."""
        return value


@dataclass(frozen=True)
class Positive(Value):
    """A number that they cannot have as 0."""

    def as_ours(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        if not value:
            raise ValueError(f"{self.name}={value}: no switch; it must be positive")
        return value


@dataclass(frozen=True)
class Reciprocal(Value):
    """A number by which they divide and we multiply."""

    def as_ours(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        return 1 / value

    def as_theirs(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        return 1 / value


@dataclass(frozen=True)
class Quotient(Value):
    """A number of theirs that is divided by one that follows from our settings; of null comes 1."""

    nullable: bool = True
    by: Derived = lambda ours: 1

    def as_ours(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        return 1.0 if value is None else value / self.by(ours)

    def as_theirs(self, value: Any, ours: Settings) -> Any:
        """See `Value`; a whole number where the default is one."""
        product = (1.0 if value is None else value) * self.by(ours)
        return round(product) if isinstance(self.default, int) else product


@dataclass(frozen=True)
class Multiple(Quotient):
    """A whole number of theirs that is so many times one that follows from our settings."""

    nullable: bool = False

    def as_ours(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        times, rest = divmod(value, self.by(ours))
        if rest or times < 1:
            raise ValueError(f"{self.name}={value}: no switch; it must be a multiple of {self.by(ours)}")
        return times

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; nothing for a model without it."""
        return super().write(ours) if as_tuple(self.ours)[0] in ours else {}


@dataclass(frozen=True)
class ScoreScale(Value):
    """What multiplies the scores; null where it is the usual 1 / sqrt(head_dim).

    default: None for the usual one. of_width: theirs is the whole number whose root divides.
    """

    ours: str | tuple[str, ...] = "attention.scale"
    default: float | None = None
    of_width: bool = False

    def as_ours(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        scale = value**-0.5 if value is not None and self.of_width else value
        return None if scale is None or equal(scale, usual_scale(ours)) else scale

    def as_theirs(self, value: Any, ours: Settings) -> Any:
        """See `Value`."""
        scale = value or (None if self.default is None else usual_scale(ours))
        return round(scale**-2) if scale is not None and self.of_width else real(scale)


@dataclass(frozen=True)
class Choice(Setting):
    """A setting of theirs whose values are components or several settings of ours, some of them derived.

    name: theirs, and after `|` names that transformers puts before it.
    """

    name: str
    default: Any
    ours: Mapping[Any, Settings]

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        value = next((config[name] for name in reversed(self.names) if name in config), self.default)
        if not isinstance(value, str | bool | int | None) or value not in self.ours:
            raise ValueError(f"{self.name}={value}: no switch; choose of {', '.join(map(str, self.ours))}")
        return {key: derive(chosen, ours) for key, chosen in self.ours[value].items()}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; the default where it fits, and for what they do not have, which `obstacles` then finds."""
        values = [
            value
            for value, chosen in self.ours.items()
            if all(equal(ours.get(key), derive(wanted, ours)) for key, wanted in chosen.items())
        ]
        return dict.fromkeys(self.names, values[0] if values and self.default not in values else self.default)


@dataclass(frozen=True)
class Fixed(Setting):
    """A setting of theirs for which only one value is supported; others are refused by name."""

    name: str
    value: Any | Derived

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        wanted, found = derive(self.value, ours), config.get(self.name)
        if found is not None and not equal(found, wanted):
            raise ValueError(f"{self.name}={found}: no switch; only {self.name}={wanted} is expressed")
        return {}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.name: derive(self.value, ours)}


@dataclass(frozen=True)
class DenseLayers(Setting):
    """The layers without experts, or how many of the first: all of ours. default: transformers' own."""

    name: str
    default: int | Sequence[int]

    def layers(self, config: Settings) -> Sequence[int]:
        """The layers without experts, of those that there are, and more."""
        dense = config.get(self.name, self.default)
        return range(dense) if isinstance(dense, int) else dense or ()

    def written(self, dense: Sequence[bool]) -> Settings:
        """Theirs of whether each layer has no experts: the first of them, up to one that has."""
        listed = [layer for layer, is_dense in enumerate(dense) if is_dense]
        return {self.name: [*dense, False].index(False) if isinstance(self.default, int) else listed}

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        if not {*range(ours["n_layers"])} <= {*self.layers(config)}:
            raise ValueError(f"{self.name}={config.get(self.name, self.default)}: no switch for the experts of the "
                             f"other layers")  # fmt: skip
        return {}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return self.written([True] * ours["n_layers"])


@dataclass(frozen=True)
class DenseByKind(DenseLayers):
    """The layers without experts by the kind of each, or in older files how many of the first."""

    def layers(self, config: Settings) -> Sequence[int]:
        """See `DenseLayers`."""
        listed, older = self.names
        kinds = config.get(listed)
        if kinds is None:
            return range(config.get(older, self.default))
        return [layer for layer, kind in enumerate(kinds) if kind != "sparse"]

    def written(self, dense: Sequence[bool]) -> Settings:
        """See `DenseLayers`."""
        return {self.names[0]: ["dense" if is_dense else "sparse" for is_dense in dense]}


@dataclass(frozen=True)
class Unread(Setting):
    """Settings without influence on the logits, and the value with which they are `written`, if at all."""

    name: str
    written: Any | Derived = None

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {} if self.written is None else dict.fromkeys(self.names, derive(self.written, ours))


def usual_scale(ours: Settings) -> float:
    """1 / sqrt(head_dim)."""
    return float(ours.get("head_dim", ours["dim"] / ours["n_heads"]) ** -0.5)


def below(config: Settings, names: Iterable[str]) -> Settings:
    """The flat settings of these names, and below them."""
    names = set(names)
    return {key: value for key, value in config.items() if key in names or key.partition(".")[0] in names}


def equal(a: Any, b: Any) -> bool:
    """Whether two settings are equal, floats but for rounding."""
    numbers = {type(a), type(b)} <= {int, float}
    return math.isclose(a, b, rel_tol=1e-6) if numbers else bool(a == b)


def shown(value: Any) -> str:
    """A setting as a user types it, a component by its class."""
    if isinstance(value, str) and value.startswith((f"{MODEL}.", "torch.")):
        return value.rpartition(".")[2]
    if isinstance(value, tuple):
        return str(list(value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
