"""Layers that differ, in flat settings: the value of such a setting is a list with one entry per layer."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_lab.model.position import rotary_dim

from .rotary import ROPE, RotaryPosition
from .settings import (
    MODEL,
    DenseLayers,
    Setting,
    Settings,
    below,
    derive,
    equal,
    flatten,
    nest,
    number,
    numbers,
    usual_scale,
)

NOPE: Settings = {"position._target_": f"{MODEL}.position.Position"}
BIAS_STEP = 0.001  # of training alone: any other is read as this
ABSENT = "absent"  # of a layer whose component does not have the setting
EXPERT, MIXTURE = "ffn.expert.", f"{MODEL}.experts.MixtureOfExperts"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
GROUPED = f"{MODEL}.attention.GroupedQueryAttention"
# Settings of mixers that are those of the model's norm where they are null
OF_NORM = {"attention.latent_eps": "norm.eps", "attention.norm_eps": "norm.eps"}
OF_NORM["attention.norm_offset"] = "norm.unit_offset"
MIXER, PARTS = "attention._target_", ("attention.", "position.")


def with_layers(node: Mapping[str, Any]) -> Settings:
    """The flat settings of a model node."""
    usual = {key: value for key, value in node.items() if key != "layers"}
    different = node.get("layers") or ()
    layers = []
    for layer in range(node["n_layers"] if different else 1):
        own = dict(usual)
        for one in different:
            own |= {key: value for key, value in one.items() if key != "at"} if layer in one["at"] else {}
        flat = spelt_out(flatten(own))
        flat = {key: tuple(value) if isinstance(value, list) else value for key, value in flat.items()}
        for key in ("position.scaling.short_factors", "position.scaling.long_factors"):
            if isinstance(flat.get(key), float | int):  # one for all frequencies
                flat[key] = (float(flat[key]),) * (rotary_dim(flat["head_dim"], flat["position.fraction"]) // 2)
        layers.append(flat)
    return by_layer(layers)


def spelt_out(own: Settings) -> Settings:
    """A layer's settings with the fraction of a head that turns exactly, and what NTK scaling or a null stands for.

    Those of a mixture of experts are at `experts`, and those of an expert at `ffn`, as of a layer without any.
    """
    if f"{EXPERT}_target_" in own:
        outer = {key: key.replace("ffn.", "experts.", 1) for key in own if key.startswith("ffn.")}
        own = {key.replace(EXPERT, "ffn.") if key.startswith(EXPERT) else outer.get(key, key): own[key] for key in own}
        if own["experts.n_groups"] in (None, own["experts.top_groups"]):
            own["experts.n_groups"] = own["experts.top_groups"] = 1
        if own["experts.balance_bias"] is not None:
            own["experts.balance_bias"] = BIAS_STEP
    if fraction := own.get("position.fraction"):
        turned, width = rotary_dim(own["head_dim"], fraction), own["head_dim"]
        exact = turned / width
        own["position.fraction"] = exact if int(exact * width) == turned else math.nextafter(exact, 1)
        if own.get("position.scaling._target_") == f"{MODEL}.position.NTKScaling":
            own["position.theta"] *= own["position.scaling.factor"] ** (turned / (turned - 2))
            own = {key: value for key, value in own.items() if not key.startswith("position.scaling.")}
            own["position.scaling"] = None
    for key, name in OF_NORM.items():
        if own.get(key, 0) is None:
            own[key] = own.get(name)
    if str(own.get(MIXER)).startswith(f"{MODEL}.attention."):
        own[MIXER] = GROUPED  # the others only check n_kv_heads
    return own


def without_layers(settings: Settings) -> dict[str, Any]:
    """The model node of flat settings, which has `layers`; the inverse of `with_layers`."""
    nodes = [nest(at_layer(settings, layer)) for layer in range(settings["n_layers"])]
    for node in nodes:
        if "experts" in node:
            node["ffn"] = node.pop("experts") | {"expert": node["ffn"]}
    groups: dict[str, list[int]] = {}  # of equal layers, by what they have
    for layer, node in enumerate(nodes):
        groups.setdefault(str(node), []).append(layer)
    most = max(groups.values(), key=len)
    usual = nodes[most[0]]
    layers = [
        {"at": group} | {part: own for part, own in nodes[group[0]].items() if own != usual[part]}
        for group in groups.values()
        if group is not most
    ]
    return usual | {"layers": layers}


def node_key(key: str) -> str:
    """The key of a model node that a flat setting is at."""
    return key.replace("experts.", "ffn.", 1) if key.startswith("experts.") else key


def by_layer(layers: Sequence[Settings]) -> Settings:
    """The settings of each layer as flat settings of all."""
    keys = dict.fromkeys(key for own in layers for key in own)
    columns = {key: [own.get(key, ABSENT) for own in layers] for key in keys}
    return {key: values[0] if all(v == values[0] for v in values) else values for key, values in columns.items()}


def at_layer(settings: Settings, layer: int) -> Settings:
    """The flat settings of one layer."""
    own = {key: value[layer] if isinstance(value, list) else value for key, value in settings.items()}
    return {key: value for key, value in own.items() if value != ABSENT}


def each(settings: Settings, key: str) -> list[Any]:
    """A setting in each layer."""
    return [at_layer(settings, layer).get(key) for layer in range(settings["n_layers"])]


def checked(kinds: list[str], known: Sequence[str], ours: Settings) -> list[str]:
    """The checked `layer_types`. Raises ValueError for an unknown type or a wrong number of layers."""
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"layer_types={kinds}: no switch for {unknown[0]}")
    if len(kinds) != ours["n_layers"]:
        raise ValueError(f"layer_types={kinds}: names {len(kinds)} layers of {ours['n_layers']}; name each")
    return kinds


@dataclass(frozen=True)
class Windows(Setting):
    """Which layers attend through a sliding window.

    default: their `sliding_window` where it is absent. gated: they ignore it unless `use_sliding_window`. every: of a
    file without `layer_types`, every n-th layer sees all; `leading`: the first of n does, not the last. pattern: their
    name of n, if they have one. listed: whether they have `layer_types`; those that are gated or have `every` do.
    nullable: whether they can do without a window if no layer has one.
    """

    default: int | None
    gated: bool = False
    every: int | None = None
    leading: bool = False
    pattern: str = ""
    listed: bool = False
    nullable: bool = False

    @property
    def has_list(self) -> bool:
        """Whether they have `layer_types`."""
        return self.gated or self.listed or self.every is not None

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        switches = ("use_sliding_window", "max_window_layers") if self.gated else ()
        return ("sliding_window", *switches, *["layer_types"] * self.has_list, *[self.pattern] * bool(self.pattern))

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        window = config.get("sliding_window", self.default)
        if self.gated and not config.get("use_sliding_window", False):
            window = None
        if window is not None and window >= ours["max_seq_len"]:  # which hides nothing
            window = None
        kinds = self.kinds(config, ours)
        return by_layer([{"attention.window": window if kind == SLIDING else None} for kind in kinds])

    def kinds(self, config: Settings, ours: Settings) -> list[str]:
        """The kind of each layer."""
        if self.has_list and config.get("layer_types") is not None:
            return checked(config["layer_types"], (FULL, SLIDING), ours)
        first = config.get("max_window_layers", 28) if self.gated else 0
        every = number(self.pattern, config.get(self.pattern, self.every))
        last = 0 if self.leading or not every else every - 1
        is_full = [i < first or (every and i % every == last) for i in range(ours["n_layers"])]
        return [FULL if full else SLIDING for full in is_full]

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        windows = each(ours, "attention.window")
        widest = max((window for window in windows if window is not None), default=None)
        written: Settings = {"sliding_window": widest}
        if self.gated:
            written |= {"use_sliding_window": widest is not None, "max_window_layers": 0}
        if self.has_list:
            written["layer_types"] = [FULL if window is None else SLIDING for window in windows]
            # A model of full layers alone has no use for a window, but Gemma 2 cannot be without
            is_missing = widest is None and not (self.gated or self.nullable)
            written["sliding_window"] = ours["max_seq_len"] if is_missing else widest
        return written


@dataclass(frozen=True)
class SomeExperts(Setting):
    """Experts in some layers, and one feed-forward in the others.

    dense: their number of the first layers without experts, or list of such, with transformers' default. sparse,
    plain: the settings of the layers with and without. mixture: those of ours that the former always have.
    step: their name of n, if only every n-th layer can have experts.
    """

    dense: DenseLayers
    mixture: Settings
    sparse: Sequence[Setting]
    plain: Sequence[Setting]
    step: str = ""

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        within = [name for setting in (*self.sparse, *self.plain) for name in setting.names]
        return (*self.dense.names, *[self.step] * bool(self.step), *within)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        step = number(self.step, config.get(self.step, 1))
        dense = {*self.dense.layers(config), *(i for i in range(ours["n_layers"]) if (i + 1) % step)}
        plain, sparse = (read_all(parts, config, ours) for parts in (self.plain, self.sparse))
        sparse = self.mixture | sparse
        return by_layer([plain if layer in dense else sparse for layer in range(ours["n_layers"])])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        layers = [at_layer(ours, layer) for layer in range(ours["n_layers"])]
        is_dense = ["experts._target_" not in own for own in layers]
        written = self.dense.written(is_dense)
        for kind, settings in ((True, self.plain), (False, self.sparse)):
            if kind in is_dense:
                own = layers[is_dense.index(kind)]
                written |= merged(setting.write(own) for setting in settings)
        return written


def read_all(parts: Iterable[Setting], config: Settings, ours: Settings) -> Settings:
    """Our settings by `config`, of several parts, each after those before it."""
    found: Settings = {}
    for part in parts:
        found |= part.read(config, ours | found)
    return found


def merged(parts: Iterable[Settings]) -> Settings:
    """Settings of several parts, the later before the earlier."""
    return {key: value for part in parts for key, value in part.items()}


@dataclass(frozen=True)
class SomeMixers(Setting):
    """Another mixer than attention in some layers, by `layer_types`; these have no position encoding.

    usual: by their config and our settings, the kind of each layer without a list, and `older`: their names for that.
    mixer: our settings that layers with the mixer always have, of it and of what else differs there. settings: the
    others, of the mixer. kind: their name of such layers. both: whether there must be others with attention, too.
    numbers: their list of the layers with attention, if they have that in place of `layer_types`. absent: what their
    config needs where no layer has the mixer.
    """

    usual: Callable[[Settings, Settings], list[str]]
    mixer: Settings
    settings: Sequence[Setting]
    older: Sequence[str] = ()
    kind: str = LINEAR
    both: bool = False
    numbers: str = ""
    absent: Settings | None = None

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        within = [name for setting in self.settings for name in setting.names]
        return (self.numbers or "layer_types", *self.older, *within)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`; it takes the place of what `ours` holds of attention in the layers without it."""
        listed = None if self.numbers else config.get("layer_types")
        kinds = checked(listed or self.usual(config, ours), (FULL, self.kind), ours)
        if self.both and len({*kinds}) == 1:
            raise ValueError(f"layer_types={kinds}: no switch for layers that are all of one kind")
        usual = {"n_kv_heads": ours["n_heads"], **{key: value for key, value in ours.items() if of_mixer(key)}}
        always = {key: derive(value, ours) for key, value in self.mixer.items()}
        mixer = {"n_kv_heads": ours["n_heads"], **NOPE, **always}
        if self.kind in kinds:
            mixer |= read_all(self.settings, config, ours)
            mixer |= {key: usual[key] for key in usual.keys() - mixer.keys() if not key.startswith(PARTS)}
        return by_layer([mixer if kind == self.kind else usual for kind in kinds])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        is_other = [target == self.mixer[MIXER] for target in each(ours, MIXER)]
        written: Settings = {"layer_types": [self.kind if other else FULL for other in is_other]}
        if self.numbers:
            written = {self.numbers: [layer for layer, other in enumerate(is_other) if not other]}
        if True not in is_other:
            return written | (self.absent or {})
        return written | merged(setting.write(at_layer(ours, is_other.index(True))) for setting in self.settings)


def every(n: int) -> Callable[[Settings, Settings], list[str]]:
    """Every n-th layer with attention, of a config without `full_attention_interval`, for `SomeMixers`."""

    def usual(config: Settings, ours: Settings) -> list[str]:
        interval = number("full_attention_interval", config.get("full_attention_interval", n))
        return [LINEAR if (i + 1) % interval else FULL for i in range(ours["n_layers"])]

    return usual


def numbered(name: str, kind: str, is_every: bool) -> Callable[[Settings, Settings], list[str]]:
    """Attention in the layers that their list `name` has, or `is_every` without one, for `SomeMixers`."""

    def usual(config: Settings, ours: Settings) -> list[str]:
        layers = config.get(name)
        layers = range(ours["n_layers"] * is_every) if layers is None else layers
        return [FULL if layer in layers else kind for layer in range(ours["n_layers"])]

    return usual


def at_attention(settings: Settings, attention: str) -> Settings:
    """The settings with those of mixers as the first layer with `attention` has them, if others have another mixer."""
    targets = each(settings, MIXER)
    if {*targets} == {attention} or attention not in targets:
        return settings
    own = at_layer(settings, targets.index(attention))
    others = {key: value for key, value in settings.items() if not of_mixer(key)}
    return others | {key: value for key, value in own.items() if of_mixer(key)}


def of_mixer(key: str) -> bool:
    """Whether a setting may differ between layers with attention and others because of the mixer."""
    return key.startswith(PARTS) or key in ("block._target_", "n_kv_heads")


@dataclass(frozen=True)
class GlobalAndLocal(Setting):
    """GPT-Neo's windows: `attention_types` are kinds of layers, and how often they follow each other."""

    name = "attention_types|attention_layers|window_size"

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        types = config.get("attention_types") or [[["global", "local"], 12]]
        kinds = [kind for kinds, times in types for kind in kinds * times]
        if len(kinds) != ours["n_layers"] or not {*kinds} <= {"global", "local"}:
            raise ValueError(f"attention_types={types}: no switch; only global and local {ours['n_layers']} times are")
        window = {"sliding_window": config.get("window_size", 256)}
        layers = [SLIDING if kind == "local" else FULL for kind in kinds]
        return Windows(None, listed=True).read(window | {"layer_types": layers}, ours)

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        windows = each(ours, "attention.window")
        kinds = ["global" if window is None else "local" for window in windows]
        return {"attention_types": [[kinds, 1]], "window_size": max(filter(None, windows), default=ours["max_seq_len"])}


@dataclass(frozen=True)
class RotaryByKind(Setting):
    """RoPE with a theta and a scaling for each kind of layer, by `rope_parameters` of each kind.

    windows: which layers are of which kind. full, sliding: theta where it is absent. local: their name of the latter
    outside of `rope_parameters`. Older files scale full layers, where the old key `type` counts in `rope_parameters`.
    """

    windows: Windows
    full: float
    sliding: float
    local: str = ""

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return ("rope_parameters", "rope_scaling", "rope_theta", *[self.local] * bool(self.local))

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        nested = nest(below(config, self.names))
        rope = nested.get("rope_parameters") or {}
        full = rope.get(FULL) or {"rope_type": "default"}
        of_kind = {
            FULL: {"rope_theta": nested.get("rope_theta", self.full), **full, **(nested.get("rope_scaling") or {})},
            SLIDING: {"rope_theta": nested.get(self.local, self.sliding), **(rope.get(SLIDING) or {})},
        }
        found = {kind: RotaryPosition().read(flatten({"rope_parameters": own}), ours) for kind, own in of_kind.items()}
        for own in found.values():
            if "position.scaling.truncate" in own:  # transformers reads it beside the kinds
                own["position.scaling.truncate"] = number("rope_parameters truncate", rope.get("truncate", True))
        return by_layer([found[kind] for kind in self.windows.kinds(config, ours)])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        kinds = self.windows.write(ours)["layer_types"]
        ropes = [nest(RotaryPosition().write(at_layer(ours, layer))) for layer in range(ours["n_layers"])]
        written: Settings = {}
        if SLIDING not in kinds and self.windows.every:  # layers with windows may have ones as long as the context
            full = ropes[min(self.windows.every, len(ropes)) - 1]
            kinds = [FULL if rope == full else SLIDING for rope in ropes]
            written = {"layer_types": kinds, "sliding_window": ours["max_seq_len"]}
        for kind in (FULL, SLIDING):
            rope = ropes[kinds.index(kind) if kind in kinds else 0].get("rope_parameters", {})
            written |= {f"rope_parameters.{kind}.{key}": value for key, value in rope.items()}
        return written


@dataclass(frozen=True)
class SomeRotary(Setting):
    """RoPE in some layers, and no position encoding in the others.

    turned: by their config and our settings, whether each layer has RoPE. listed: their list of the same, if any.
    """

    rotary: RotaryPosition
    turned: Callable[[Settings, Settings], list[bool]]
    listed: Sequence[str] = ()

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return (*self.rotary.names, *self.listed)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        rope = self.rotary.read(config, ours)
        return by_layer([rope if has_rope else NOPE for has_rope in self.turned(config, ours)])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        turned = [target == ROPE for target in each(ours, "position._target_")]
        if self.listed:
            written: Settings = {self.listed[0]: [int(has_rope) for has_rope in turned]}
        else:  # layers with RoPE are those with windows, which may be as long as the context
            kinds = [SLIDING if has_rope else FULL for has_rope in turned]
            without = self.turned({"sliding_window": None, "layer_types": [FULL] * len(kinds)}, ours)
            follows = any(each(ours, "attention.window")) or turned == without
            written = {} if follows else {"layer_types": kinds, "sliding_window": ours["max_seq_len"]}
        return written | (self.rotary.write(at_layer(ours, turned.index(True))) if any(turned) else {})


def sliding(windows: Windows) -> Callable[[Settings, Settings], list[bool]]:
    """Whether each layer has a window, for `SomeRotary`."""
    return lambda config, ours: [kind == SLIDING for kind in windows.kinds(config, ours)]


@dataclass(frozen=True)
class RotaryByLayer(Setting):
    """RoPE with a theta for each layer, by `layer_rope_theta`, where 0 is no position encoding."""

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return (*RotaryPosition().names, "layer_rope_theta")

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        rope = RotaryPosition().read(config, ours)
        thetas = numbers("layer_rope_theta", config.get("layer_rope_theta")) or (rope["position.theta"],)
        thetas = thetas * ours["n_layers"] if len(thetas) == 1 else thetas
        if len(thetas) != ours["n_layers"]:
            raise ValueError(f"layer_rope_theta: has {len(thetas)} numbers for {ours['n_layers']} layers; give all")
        return by_layer([rope | {"position.theta": float(theta)} if theta else NOPE for theta in thetas])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        layers = [at_layer(ours, layer) for layer in range(ours["n_layers"])]
        turned = [own for own in layers if own.get("position._target_") == ROPE]
        thetas = [own["position.theta"] if own in turned else 0 for own in layers]
        return {"layer_rope_theta": thetas} | (RotaryPosition().write(turned[0]) if turned else {})


@dataclass(frozen=True)
class ScaleByLayer(Setting):
    """GPT-2's scale of the scores: the usual one or none, which may be divided by the number of the layer, from 1."""

    name = "scale_attn_weights|scale_attn_by_inverse_layer_idx"

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        scale, divided = config.get(self.names[0], True), config.get(self.names[1], False)
        usual = usual_scale(ours) if scale else 1.0
        scales = [usual / (layer + 1 if divided else 1) for layer in range(ours["n_layers"])]
        return by_layer([{"attention.scale": None if scale and one == usual else one} for one in scales])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        scales = [scale or usual_scale(ours) for scale in each(ours, "attention.scale")]
        scaled = equal(scales[0], usual_scale(ours))
        return dict(zip(self.names, (scaled, not equal(scales[0], scales[-1])), strict=True))
