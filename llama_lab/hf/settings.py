"""The kinds of settings that Hugging Face's models have: each reads theirs as ours, and writes ours as theirs.

Our settings are flat: the model node of a resolved config with dotted keys, `{"dim": 64, "norm.eps": 1e-5}`. Theirs are
a config.json with dotted keys.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Settings = dict[str, Any]
Derived = Callable[[Settings], Any]  # a value that follows from others of our settings

MODEL = "llama_lab.model"


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


class Setting(Protocol):
    """What one or a few of their settings are in our terms."""

    @property
    def names(self) -> Sequence[str]:
        """Their settings that it reads; those below them too."""
        ...

    def read(self, config: Settings, ours: Settings) -> Settings:
        """Our settings by their flat `config`, after those that were read before. Raises ValueError."""
        ...

    def write(self, ours: Settings) -> Settings:
        """Their flat settings."""
        ...


def derive(value: Any, ours: Settings) -> Any:
    """A value, or what it is derived as."""
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
class Value:
    """A setting that both have.

    name: theirs, and after `|` names that transformers puts before it. ours: one key, or several with the same value.
    default: transformers' own, where it is absent, or null unless `nullable`; None for a number that may be any.
    """

    name: str
    ours: str | tuple[str, ...]
    default: Any | Derived
    nullable: bool = False

    @property
    def names(self) -> Sequence[str]:
        """Their names of it."""
        return self.name.split("|")

    @property
    def keys(self) -> tuple[str, ...]:
        """Our keys of it."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        theirs = [(name, config[name]) for name in self.names if name in config]
        found = [number(name, value) for name, value in theirs if self.nullable or value is not None]
        return dict.fromkeys(self.keys, found[-1] if found else derive(self.default, ours))

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; their classes refuse a whole number where they declare a float."""
        value = ours.get(self.keys[0])
        return {self.names[0]: real(value) if isinstance(self.default, float | None) else value}


@dataclass(frozen=True)
class Choice:
    """A setting of theirs whose values are components or several settings of ours, some of them derived."""

    name: str
    default: Any
    ours: Mapping[Any, Settings]

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        value = config.get(self.name, self.default)
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
        return {self.name: values[0] if values and self.default not in values else self.default}


UNSET: Any = object()


@dataclass(frozen=True)
class Fixed:
    """A setting of theirs of which we express one value: anything else is refused by name.

    default: transformers' own, if that is another.
    """

    name: str
    value: Any | Derived
    default: Any = UNSET

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        wanted = derive(self.value, ours)
        found = config.get(self.name)
        if found is None:
            found = wanted if self.default is UNSET else self.default
        if not equal(found, wanted):
            raise ValueError(f"{self.name}={found}: no switch; only {self.name}={wanted} is expressed")
        return {}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.name: derive(self.value, ours)}


@dataclass(frozen=True)
class DenseLayers:
    """The layers without experts, or how many of the first: all of ours. default: transformers' own."""

    name: str
    default: int | Sequence[int]

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        dense = config.get(self.name, self.default)
        if not {*range(ours["n_layers"])} <= {*(range(dense) if isinstance(dense, int) else dense or ())}:
            raise ValueError(f"{self.name}={dense}: no switch for the experts of the other layers")
        return {}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        n_layers = ours["n_layers"]
        return {self.name: n_layers if isinstance(self.default, int) else [*range(n_layers)]}


@dataclass(frozen=True)
class Unread:
    """Settings in files of a family that reach no logits there, and what they are `written` as, if at all."""

    names: Sequence[str]
    written: Any = None

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        return {}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {} if self.written is None else dict.fromkeys(self.names, self.written)


@dataclass(frozen=True)
class Reciprocal:
    """A number of theirs that divides where ours multiplies."""

    name: str
    ours: str
    default: float = 1.0

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.ours: 1 / (number(self.name, config.get(self.name)) or self.default)}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.name: 1 / ours[self.ours]}


@dataclass(frozen=True)
class Quotient:
    """A number of theirs that is divided by one that follows from our settings; of null comes 1."""

    name: str
    ours: str
    by: Derived
    default: float

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        value = number(self.name, config.get(self.name, self.default))
        return {self.ours: 1.0 if value is None else value / self.by(ours)}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; as a whole number where the default is one."""
        value = ours[self.ours] * self.by(ours)
        return {self.name: round(value) if isinstance(self.default, int) else value}


@dataclass(frozen=True)
class ScoreScale:
    """What multiplies the scores; null where it is the usual 1 / sqrt(head_dim).

    default: transformers' own; None for the usual one. of_width: theirs is the whole number whose root divides.
    """

    name: str
    default: float | None = None
    of_width: bool = False

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        scale = number(self.name, config.get(self.name)) or self.default
        if scale is not None and self.of_width:
            scale **= -0.5
        return {"attention.scale": None if scale is None or equal(scale, usual_scale(ours)) else scale}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        scale = ours.get("attention.scale") or (None if self.default is None else usual_scale(ours))
        return {self.name: round(scale**-2) if scale is not None and self.of_width else real(scale)}


def usual_scale(ours: Settings) -> float:
    """1 / sqrt(head_dim)."""
    return float(ours.get("head_dim", ours["dim"] / ours["n_heads"]) ** -0.5)


ROPE = f"{MODEL}.position.Rope"
PHI3_KINDS = ("longrope",)  # whose class calls it "su" or "yarn", too
ORIGINAL, BETA = "original_max_position_embeddings", "llama_4_scaling_beta"
# Their type of RoPE scaling: our class, and their names of its fields with transformers' defaults.
SCALINGS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "linear": ("LinearScaling", {"factor": ("factor", None)}),
    "yarn": (
        "YarnScaling",
        {
            "factor": ("factor", None),
            "original_max_seq_len": (ORIGINAL, None),
            "beta_fast": ("beta_fast", 32.0),
            "beta_slow": ("beta_slow", 1.0),
        },
    ),
    "longrope": (
        "LongRopeScaling",
        {
            "factor": ("factor", None),
            "original_max_seq_len": (ORIGINAL, None),
            "short_factors": ("short_factor", None),
            "long_factors": ("long_factor", None),
        },
    ),
    "llama3": (
        "Llama3Scaling",
        {
            "factor": ("factor", None),
            "original_max_seq_len": (ORIGINAL, None),
            "low_freq_factor": ("low_freq_factor", None),
            "high_freq_factor": ("high_freq_factor", None),
        },
    ),
}


@dataclass(frozen=True)
class RotaryPosition:
    """RoPE: `rope_parameters` of transformers 5, or `rope_scaling`, which goes before it, and the theta of older files.

    Scaling "dynamic" starts beyond max_position_embeddings, where our context ends: it is read as none. NTK-aware
    scaling is a larger theta, and written as that. LongRoPE's context ends where its long factors would act.
    fraction: transformers' own; None for a class that turns whole heads, whatever a file says.
    older: names of theta and fraction outside of `rope_parameters`. absent: `rope_parameters` of a file without any.
    kinds: the types of scaling that the class has. original: its own ORIGINAL, which goes before that of the scaling.
    """

    theta: float = 10000.0
    fraction: float | None = None
    interleaved: bool = False
    older: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    absent: tuple[tuple[str, Any], ...] = ()
    kinds: Sequence[str] = (*SCALINGS, "dynamic")
    original: int | None = None

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return ("rope_parameters", "rope_scaling", ORIGINAL, *self.older[: 1 if self.fraction is None else 2])

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        nested = nest(below(config, self.names))
        rope = self.merged(nested)
        theta = rope.pop("rope_theta", nested.get(self.older[0], self.theta))
        fraction = rope.pop("partial_rotary_factor", nested.get(self.older[1], self.fraction))
        original = nested.get(ORIGINAL, self.original)
        rope |= {} if original is None else {ORIGINAL: original}
        fraction = 1.0 if self.fraction is None or fraction is None else float(fraction)
        width = ours.get("head_dim") or ours["dim"] // (ours["n_heads"] or 1)
        if int(turned := width * fraction) < int(turned + 1e-3):  # 31.999 is 31 in their classes
            raise ValueError(f"partial_rotary_factor={fraction}: of {width} dimensions is {turned:.8g}, which "
                             f"transformers rounds down; write more digits")  # fmt: skip
        return {
            "position._target_": ROPE,
            "position.theta": float(number("rope_theta", theta)),
            "position.fraction": fraction,
            "position.interleaved": self.interleaved,
            **self.read_scaling(rope, ours),
        }

    def merged(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters in a nested config."""
        given = config.get("rope_parameters")
        absent = {"rope_theta": self.theta, **dict(self.absent)} if self.absent else {}
        return dict(config.get("rope_scaling") or (absent if given is None else given))

    def read_scaling(self, rope: dict[str, Any], ours: Settings) -> Settings:
        """Our settings of the scaling, by what `rope` holds besides theta."""
        older = rope.pop("type", "default")
        kind = rope.pop("rope_type", older)
        if self.kinds == PHI3_KINDS and kind in ("su", "yarn"):
            kind = "longrope"
        if kind == "default" or (kind == "dynamic" and kind in self.kinds):
            if by_layer := [name for name, value in rope.items() if isinstance(value, Mapping)]:
                raise ValueError(f"rope_parameters {', '.join(by_layer)}: no switch for positions by kind of layer")
            return {"position.scaling": None}
        if kind not in self.kinds:
            raise ValueError(f"rope_scaling type {kind}: no switch; we have {', '.join(self.kinds)}")
        scaling, fields = SCALINGS[kind]
        found: Settings = {"position.scaling._target_": f"{MODEL}.position.{scaling}"}
        original = number(f"rope_scaling {ORIGINAL}", rope.get(ORIGINAL)) or ours["max_seq_len"]
        if original < 1:
            raise ValueError(f"rope_scaling {ORIGINAL}={original}: must be at least 1")
        derived = {ORIGINAL: original, "factor": ours["max_seq_len"] / original if kind == "longrope" else None}
        for name, (theirs, default) in fields.items():
            value = numbers(f"rope_scaling {theirs}", rope.pop(theirs, None))
            value = derived.get(theirs, default) if value is None else value
            if value is None:
                raise ValueError(f"rope_scaling type {kind}: has no {theirs}; add it to config.json")
            found[f"position.scaling.{name}"] = value
        neutral = {"truncate": True, ORIGINAL: original}
        if kind == "longrope":
            # Beyond the original context they take other factors, for the whole of a text.
            found["max_seq_len"] = found["position.scaling.max_seq_len"] = min(ours["max_seq_len"], original)
            factor = max(found["position.scaling.factor"], 1.0)
            neutral["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
        if kind == "yarn":
            found |= read_sharpness(rope, found["position.scaling.factor"])
        for theirs, value in rope.items():
            if value is not None and not equal(value, neutral.get(theirs)):
                raise ValueError(f"rope_scaling {theirs}={value}: no switch; only {neutral.get(theirs)} is expressed")
        return found

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; under the older names too, since transformers 4 would take its defaults without a word."""
        if ours.get("position._target_") != ROPE:
            return {}
        theta, fraction = real(ours["position.theta"]), real(ours["position.fraction"])
        rope: Settings = {"rope_type": "default", "rope_theta": theta}
        if self.fraction is not None:
            rope["partial_rotary_factor"] = fraction
        scaling = str(ours.get("position.scaling._target_", "")).removeprefix(f"{MODEL}.position.")
        for kind, (ours_name, fields) in SCALINGS.items():
            if ours_name == scaling:
                rope["rope_type"] = kind
                rope |= {theirs: ours[f"position.scaling.{name}"] for name, (theirs, _) in fields.items()}
        older = {name: value for name, value in zip(self.older, (theta, fraction), strict=True) if name in self.names}
        if rope["rope_type"] == "yarn":
            rope |= write_sharpness(ours)
        if rope["rope_type"] != "default":
            older |= {f"rope_scaling.{key}": value for key, value in rope.items()}
        if rope["rope_type"] == "longrope":
            older[ORIGINAL] = rope[ORIGINAL]
        return older | {f"rope_parameters.{key}": value for key, value in rope.items()}


def read_sharpness(rope: dict[str, Any], factor: float) -> Settings:
    """How much YaRN sharpens the softmax: the ratio of two scales, or one number; taken from `rope`."""
    names = ("mscale", "mscale_all_dim", "attention_factor")
    scale, of_all_dim, whole = (number(f"rope_scaling {name}", rope.pop(name, None)) for name in names)
    if whole is not None:
        if factor <= 1 or whole < 1:
            raise ValueError(f"rope_scaling attention_factor={whole}: no switch; it must be at least 1, as factor is")
        scale, of_all_dim = (whole - 1) / (0.1 * math.log(factor)), 0.0
    elif not (scale and of_all_dim):
        scale, of_all_dim = 1.0, 0.0
    return {"position.scaling.mscale": scale, "position.scaling.mscale_all_dim": of_all_dim}


def write_sharpness(ours: Settings) -> Settings:
    """Their settings of the same; none for the paper's."""
    scale, of_all_dim = ours["position.scaling.mscale"], ours["position.scaling.mscale_all_dim"]
    if scale and of_all_dim:
        return {"mscale": scale, "mscale_all_dim": of_all_dim}
    return {} if scale == 1 else {"attention_factor": 0.1 * scale * math.log(ours["position.scaling.factor"]) + 1}


@dataclass(frozen=True)
class LatentRotary(RotaryPosition):
    """RoPE of latent attention, whose scores YaRN multiplies by the square of what `mscale_all_dim` says."""

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        found = super().read(config, ours)
        rope = self.merged(nest(below(config, self.names)))
        is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        growth = 0.0 if is_plain else 0.1 * math.log(max(rope.get("factor") or 1.0, 1.0))
        sharpness = number("rope_scaling mscale_all_dim", rope.get("mscale_all_dim")) or 0.0
        scale = (sharpness * growth + 1) ** 2 * (ours["attention.nope_dim"] + ours["head_dim"]) ** -0.5
        return found | {"attention.scale": scale if sharpness * growth else None}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        written = super().write(ours)
        scale, factor = ours.get("attention.scale"), written.get("rope_parameters.factor", 1.0)
        if scale and factor > 1 and "attention.nope_dim" in ours:
            sharpness = (scale * (ours["attention.nope_dim"] + ours["head_dim"]) ** 0.5) ** 0.5 - 1
            sharpness = round(sharpness / (0.1 * math.log(factor)), 9)
            written |= {f"{rope}.mscale_all_dim": sharpness for rope in ("rope_parameters", "rope_scaling")}
        return written


@dataclass(frozen=True)
class SteppedRotary(RotaryPosition):
    """RoPE with which `llama_4_scaling_beta` lets scores grow in steps of the original context, from position 0."""

    def merged(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `RotaryPosition`."""
        return {k: v for k, v in super().merged(config).items() if k not in (BETA, "max_position_embeddings")}

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        found = super().read(config, ours)
        rope = RotaryPosition.merged(self, nest(below(config, self.names)))
        beta, step = (number(f"rope_parameters {name}", rope.get(name)) for name in (BETA, ORIGINAL))
        step = found.get("position.scaling.original_max_seq_len", step)
        if beta is None or not step:
            raise ValueError(f"rope_parameters: has no {BETA}, or no {ORIGINAL}, which their class needs; add it")
        if not beta:
            return found | {"attention.temperature": None}
        steps = {"_target_": f"{MODEL}.temperature.StepTemperature", "scale": beta, "step": step, "offset": 0}
        return found | {f"attention.temperature.{key}": value for key, value in steps.items()}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        written = super().write(ours)
        step = ours.get("attention.temperature.step", written.get(f"rope_parameters.{ORIGINAL}", ours["max_seq_len"]))
        beside = {BETA: ours.get("attention.temperature.scale", 0.0), ORIGINAL: step}
        return written | {f"{rope}.{key}": value for rope in ropes(written) for key, value in beside.items()}


@dataclass(frozen=True)
class SteppedLatentRotary(SteppedRotary, LatentRotary):
    """The same of Mistral 4, whose `partial_rotary_factor` is the share of a head that turns; it needs a scaling."""

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        rope = self.merged(nest(below(config, self.names)))
        share = ours["head_dim"] / (ours["attention.nope_dim"] + ours["head_dim"])
        kind, found = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", share)
        if kind == "default" or not equal(found, share):
            raise ValueError(f"rope_parameters: needs a scaling and a share of {share:g}, not {kind} and {found:g}")
        return super().read(config, ours) | {"position.fraction": 1.0}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        written = super().write(ours)
        share = ours["head_dim"] / (ours.get("attention.nope_dim", 0) + ours["head_dim"])
        return written | {f"{rope}.partial_rotary_factor": share for rope in ropes(written)}


def ropes(written: Settings) -> list[str]:
    """The names under which their settings of RoPE are written."""
    return [rope for rope in ("rope_parameters", "rope_scaling") if f"{rope}.rope_type" in written]


@dataclass(frozen=True)
class RotaryOrAlibi(RotaryPosition):
    """Falcon's: RoPE, or with `alibi` ALiBi whose slopes are divided, as the scores are, by the root of head_dim."""

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return ("alibi", *super().names)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        if not config.get("alibi", False):
            return super().read(config, ours)
        slopes = {"position.max_exponent": 8.0, "position.slope_scale": usual_scale(ours)}
        return {"position._target_": f"{MODEL}.position.Alibi", **slopes}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {"alibi": ours.get("position._target_") == f"{MODEL}.position.Alibi", **super().write(ours)}


@dataclass(frozen=True)
class RotaryDim:
    """RoPE as GPT-J has it: neighbouring dimensions are pairs, `rotary_dim` of a head are rotated, theta is 10,000."""

    default: int

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return ("rotary_dim",)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        width = ours["dim"] // ours["n_heads"]
        return {
            "position._target_": ROPE,
            "position.theta": 10000.0,
            "position.fraction": (config.get("rotary_dim", self.default) or width) / width,
            "position.interleaved": True,
            "position.scaling": None,
        }

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {"rotary_dim": round(ours.get("position.fraction", 1.0) * ours["head_dim"])}


@dataclass(frozen=True)
class MultiQuery:
    """One kv head if their `multi_query` is true, and otherwise one per head, whatever `num_kv_heads` is."""

    default: bool = True

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return ("multi_query", "num_kv_heads", "num_key_value_heads")

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        return {"n_kv_heads": 1 if config.get("multi_query", self.default) else ours["n_heads"]}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {"multi_query": ours["n_kv_heads"] == 1, "num_kv_heads": ours["n_kv_heads"]}


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
