"""Settings of RoPE in families: theta, rotated fraction of a head, scaling."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .settings import MODEL, Setting, Settings, below, equal, nest, number, numbers, real, usual_scale

ROPE = f"{MODEL}.position.Rope"
PHI3_KINDS = ("longrope",)  # whose class calls it "su" or "yarn", too
ORIGINAL, BETA = "original_max_position_embeddings", "llama_4_scaling_beta"
# Their type of RoPE scaling: our class, and its fields.
SCALINGS = {
    "linear": ("LinearScaling", ("factor",)),
    "yarn": ("YarnScaling", ("factor", "original_max_seq_len", "beta_fast", "beta_slow", "truncate")),
    "longrope": ("LongRopeScaling", ("factor", "original_max_seq_len", "short_factors", "long_factors")),
    "llama3": ("Llama3Scaling", ("factor", "original_max_seq_len", "low_freq_factor", "high_freq_factor")),
}
# Their names of these fields where they have others, and transformers' defaults.
THEIRS = {"original_max_seq_len": ORIGINAL, "short_factors": "short_factor", "long_factors": "long_factor"}
DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@dataclass(frozen=True)
class RotaryPosition(Setting):
    """RoPE: `rope_parameters` of transformers 5, or `rope_scaling`, which goes before it, and the theta of older files.

    Scaling "dynamic" starts beyond max_position_embeddings, where our context ends: it is read as none. NTK-aware
    scaling is a larger theta, and written as that. LongRoPE's context ends where its long factors would act.
    fraction: transformers' own; None for a class that turns whole heads, whatever a file says.
    older: names of theta, and of the fraction if it has one, outside of `rope_parameters`. absent: `rope_parameters` of
    a file without any.
    kinds: the types of scaling that the class has. original: its own ORIGINAL, which goes before that of the scaling.
    """

    theta: float = 10000.0
    fraction: float | None = None
    interleaved: bool = False
    older: Sequence[str] = ("rope_theta", "partial_rotary_factor")
    absent: Settings = field(default_factory=dict)
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
        fraction = rope.pop("partial_rotary_factor", nested.get((*self.older, "")[1], self.fraction))
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
        absent = {"rope_theta": self.theta, **self.absent} if self.absent else {}
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
        for name in fields:
            theirs = THEIRS.get(name, name)
            value = numbers(f"rope_scaling {theirs}", rope.pop(theirs, None))
            value = derived.get(theirs, DEFAULTS.get(name)) if value is None else value
            if value is None:
                raise ValueError(f"rope_scaling type {kind}: has no {theirs}; add it to config.json")
            found[f"position.scaling.{name}"] = value
        neutral = {ORIGINAL: original}
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
                rope |= {THEIRS.get(name, name): ours[f"position.scaling.{name}"] for name in fields}
        older = {name: value for name, value in zip(self.older, (theta, fraction), strict=False) if name in self.names}
        if rope["rope_type"] == "yarn":
            rope |= write_sharpness(ours)
        if rope["rope_type"] != "default":
            older |= {f"rope_scaling.{key}": value for key, value in rope.items()}
        if rope["rope_type"] == "longrope":
            older[ORIGINAL] = rope[ORIGINAL]
        return older | {f"rope_parameters.{key}": value for key, value in rope.items()}


def read_sharpness(rope: dict[str, Any], factor: float) -> Settings:
    """YaRN's attention factor, as a ratio of two scales or one number; removed from `rope`."""
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
    """The inverse of `read_sharpness`; empty for the paper's value."""
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
