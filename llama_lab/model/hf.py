"""Hugging Face's models in our terms, and ours in theirs: settings and weights, both ways by one table per family.

The tables are in `hf_families.py`. A family lists what it always is (`recipe`), which of its settings are which of ours
(`settings`), and where each of our parameters is kept (`weights`). Nothing here reads a file.

Our settings are flat: the model node of a resolved config with dotted keys, `{"dim": 64, "norm.eps": 1e-5}`, without
what only the start of training reads; see `flat_settings`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

Settings = dict[str, Any]
Derived = Callable[[Settings], Any]  # a value that follows from others of our settings

MODEL = "llama_lab.model"
ATTENTION = {
    "attention._target_": f"{MODEL}.attention.GroupedQueryAttention",
    **dict.fromkeys((f"attention.{part}_bias" for part in ("query", "key", "value", "output")), False),
    **dict.fromkeys(f"attention.{part}" for part in ("window", "global_every", "qk_norm", "softcap")),
}
EMBEDDING = {
    "embedding._target_": f"{MODEL}.embedding.Embedding",
    "embedding.tied": False,
    "embedding.scale": 1.0,
    "embedding.norm_input": False,
    "embedding.head_bias": False,
    "embedding.logit_softcap": None,
}
# Of the initial values, of training and of speed: they change no trained model's output.
OF_TRAINING = re.compile(r"init\..*|seed|dropout|(embedding|position)\.std|attention\.kernel|(.*\.)?_partial_|_target_")
# Their settings that change no logits: of initial values, of training, of generation, of tasks, and of files.
IDLE_NAMES = """
    _name_or_path _attn_implementation.* architectures model_type transformers_version (torch_)?dtype auto_map.*
    torchscript use_bfloat16 return_dict.* output_.* id2label.* label2id.* num_labels problem_type pruned_heads
    chunk_size_feed_forward is_encoder_decoder is_decoder use_cache cache_implementation gradient_checkpointing
    .*_token_id.* tokenizer_(class|name) language prefix from_tf n_ctx n_special predict_special_tokens unk_index
    initializer_.* init_std init_device init_method.* .*dropout.* .*_pdrop layerdrop finetuning_task
    summary_.* task_specific_params.* max_length min_length do_sample temperature top_[kp] num_beams
    (repetition|length)_penalty no_repeat_ngram_size num_return_sequences early_stopping
    pretraining_tp slow_but_exact reorder_and_upcast_attn (scale_)?attention_softmax_in_fp32 masked_softmax_fusion
    bias_dropout_fusion skip_bias_add.* offset_alibi attn_impl attn_uses_sequence_id
    inference_runner validate_runner_input max_batch_size max_sequence_length pad_key_length pre_allocate_kv_cache
"""
IDLE = re.compile("|".join(IDLE_NAMES.split()))


def flat_settings(node: Mapping[str, Any]) -> Settings:
    """The settings of a model node of a resolved config that its trained output depends on."""
    settings = {key: value for key, value in flatten(node).items() if not OF_TRAINING.fullmatch(key)}
    if str(settings.get("attention._target_")).startswith(f"{MODEL}.attention."):
        settings["attention._target_"] = ATTENTION["attention._target_"]  # the others only check n_kv_heads
    if settings.get("position.scaling._target_") == f"{MODEL}.position.NTKScaling":
        rotated = round(settings["head_dim"] * settings["position.fraction"])
        settings["position.theta"] *= settings["position.scaling.factor"] ** (rotated / (rotated - 2))
        settings = {key: value for key, value in settings.items() if not key.startswith("position.scaling")}
        settings["position.scaling"] = None
    return settings


def model_node(settings: Settings) -> dict[str, Any]:
    """The model node that `settings` are of, to be instantiated by Hydra; the inverse of `flat_settings`."""
    node = nest({key: value for key, value in settings.items() if not key.startswith(FOLDED)})
    for part in ("norm", "position", "attention", "ffn", "embedding", "block"):
        node[part]["_partial_"] = True
    node["ffn"]["activation"]["_partial_"] = True
    start = {"init": {"_target_": f"{MODEL}.init.Normal", "_partial_": True}, "dropout": 0.0, "seed": 0}
    return {"_target_": f"{MODEL}.Decoder", **node, **start}


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


@dataclass(frozen=True)
class Value:
    """A setting that both have.

    name: theirs, and after `|` other names that files have for it. ours: one key, or several with the same value.
    default: transformers' own, where it is absent, or null unless `nullable`.
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
        found = [config[name] for name in self.names if name in config and (self.nullable or config[name] is not None)]
        return dict.fromkeys(self.keys, found[0] if found else derive(self.default, ours))

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.names[0]: ours.get(self.keys[0])}


@dataclass(frozen=True)
class Choice:
    """A setting of theirs whose values are components or several settings of ours."""

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
        return dict(self.ours[value])

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; the default where it fits, and for what they do not have, which `obstacles` then finds."""
        values = [value for value, chosen in self.ours.items() if chosen.items() <= ours.items()]
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


FOLDED = "folded."  # scalars of theirs that are no setting of ours: weights are multiplied by them


@dataclass(frozen=True)
class Folded:
    """A scalar of theirs that is folded into weights by `scaled`, and written as the `neutral` value."""

    name: str
    neutral: float | Derived
    default: float = 1.0

    @property
    def names(self) -> Sequence[str]:
        """Their name of it."""
        return (self.name,)

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        return {f"{FOLDED}{self.name}": config.get(self.name, self.default) / derive(self.neutral, ours)}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.name: derive(self.neutral, ours)}


ROPE = f"{MODEL}.position.Rope"
# Their type of RoPE scaling: our class, and their names of its fields with transformers' defaults.
SCALINGS: dict[str, tuple[str, dict[str, tuple[str, Any]]]] = {
    "linear": ("LinearScaling", {"factor": ("factor", None)}),
    "yarn": (
        "YarnScaling",
        {
            "factor": ("factor", None),
            "original_max_seq_len": ("original_max_position_embeddings", None),
            "beta_fast": ("beta_fast", 32.0),
            "beta_slow": ("beta_slow", 1.0),
        },
    ),
    "llama3": (
        "Llama3Scaling",
        {
            "factor": ("factor", None),
            "original_max_seq_len": ("original_max_position_embeddings", None),
            "low_freq_factor": ("low_freq_factor", None),
            "high_freq_factor": ("high_freq_factor", None),
        },
    ),
}


@dataclass(frozen=True)
class RotaryPosition:
    """RoPE: `rope_parameters` of transformers 5, or `rope_theta`, `rope_scaling` and others of older files.

    Scaling "dynamic" starts beyond max_position_embeddings, where our context ends: it is read as none. NTK-aware
    scaling is a larger theta, and written as that.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    older: tuple[str, str] = ("rope_theta", "partial_rotary_factor")  # names of theta and fraction before version 5

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        top = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "default_theta")
        return (*top, "partial_rotary_factor", "rotary_pct", "rope_ratio")

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        nested = {"rope_parameters": {}, "rope_scaling": {}} | nest(below(config, self.names))
        rope = {**(nested["rope_scaling"] or {}), **(nested["rope_parameters"] or {})}
        theta = rope.pop("rope_theta", nested.get("rope_theta", nested.get("rotary_emb_base", self.theta)))
        fraction = nested.get("partial_rotary_factor", nested.get("rotary_pct", self.fraction))
        fraction = rope.pop("partial_rotary_factor", fraction)
        if nested.get("rope_ratio", 1) != 1:
            raise ValueError(f"rope_ratio={nested['rope_ratio']}: no switch; only 1 is expressed")
        return {
            "position._target_": ROPE,
            "position.theta": float(theta),
            "position.fraction": float(fraction),
            "position.interleaved": self.interleaved,
            **self.read_scaling(rope, ours),
        }

    def read_scaling(self, rope: dict[str, Any], ours: Settings) -> Settings:
        """Our settings of the scaling, by what `rope` holds besides theta."""
        older = rope.pop("type", "default")
        kind = rope.pop("rope_type", older)
        if kind in ("default", "dynamic"):
            return {"position.scaling": None}
        if kind not in SCALINGS:
            raise ValueError(f"rope_scaling type {kind}: no switch; we have {', '.join(SCALINGS)} and dynamic")
        scaling, fields = SCALINGS[kind]
        found: Settings = {"position.scaling._target_": f"{MODEL}.position.{scaling}"}
        for name, (theirs, default) in fields.items():
            value = rope.pop(theirs, None)
            if value is None and theirs == "original_max_position_embeddings":
                default = ours["max_seq_len"]
            value = default if value is None else value
            if value is None:
                raise ValueError(f"rope_scaling type {kind}: has no {theirs}; add it to config.json")
            found[f"position.scaling.{name}"] = value
        neutral = {"attention_factor": attention_factor(found), "truncate": True}
        for theirs, value in rope.items():
            if value is not None and not equal(value, neutral.get(theirs)):
                raise ValueError(f"rope_scaling {theirs}={value}: no switch; only {neutral.get(theirs)} is expressed")
        return found

    def write(self, ours: Settings) -> Settings:
        """See `Setting`; under the older names too, since transformers 4 would take its defaults without a word."""
        if ours.get("position._target_") != ROPE:
            return {}
        theta, fraction = ours["position.theta"], ours["position.fraction"]
        rope: Settings = {"rope_type": "default", "rope_theta": theta}
        if not equal(fraction, 1.0) or self.fraction != 1.0:
            rope["partial_rotary_factor"] = fraction
        scaling = str(ours.get("position.scaling._target_", "")).removeprefix(f"{MODEL}.position.")
        for kind, (ours_name, fields) in SCALINGS.items():
            if ours_name == scaling:
                rope["rope_type"] = kind
                rope |= {theirs: ours[f"position.scaling.{name}"] for name, (theirs, _) in fields.items()}
        older = dict(zip(self.older, (theta, fraction), strict=True))
        if rope["rope_type"] != "default":
            older |= {f"rope_scaling.{key}": value for key, value in rope.items()}
        return older | {f"rope_parameters.{key}": value for key, value in rope.items()}


def attention_factor(scaling: Settings) -> float | None:
    """What transformers computes by itself for YaRN."""
    factor = float(scaling["position.scaling.factor"])
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


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


@dataclass(frozen=True)
class Windows:
    """Which layers attend through a sliding window: all, none, or all but every n-th.

    default: their `sliding_window` where it is absent. gated: they ignore it unless `use_sliding_window`.
    every: the pattern of layers without `layer_types`: every n-th sees all.
    """

    default: int | None
    gated: bool = False
    every: int | None = None

    @property
    def names(self) -> Sequence[str]:
        """All their names of it."""
        return ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        window = config.get("sliding_window", self.default)
        if self.gated and not config.get("use_sliding_window", False):
            window = None
        layers = config.get("layer_types") or self.layers(ours["n_layers"], config.get("max_window_layers", 28))
        sliding = [layer == "sliding_attention" for layer in layers]
        if not any(sliding) or window is None or window >= ours["max_seq_len"]:  # which hides nothing
            return {"attention.window": None, "attention.global_every": None}
        for every in (None, *range(2, len(sliding) + 1)):
            if sliding == [every is None or (i + 1) % every != 0 for i in range(len(sliding))]:
                return {"attention.window": window, "attention.global_every": every}
        raise ValueError(f"layer_types={layers}: no switch; all layers must have windows, or all but every n-th")

    def layers(self, n_layers: int, max_window_layers: int) -> list[str]:
        """The types of layers where `layer_types` is absent."""
        first = max_window_layers if self.gated else 0
        is_full = [i < first or (self.every is not None and (i + 1) % self.every == 0) for i in range(n_layers)]
        return ["full_attention" if full else "sliding_attention" for full in is_full]

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        window, every = ours.get("attention.window"), ours.get("attention.global_every")
        written: Settings = {"sliding_window": window}
        if self.gated:
            written |= {"use_sliding_window": window is not None, "max_window_layers": 0}
        if self.gated or self.every:
            is_full = [window is None or (every is not None and (i + 1) % every == 0) for i in range(ours["n_layers"])]
            written["layer_types"] = ["full_attention" if full else "sliding_attention" for full in is_full]
            # A model of full layers alone has no use for a window, but Gemma 2 cannot be without
            written["sliding_window"] = ours["max_seq_len"] if window is None and self.every else window
        return written


def below(config: Settings, names: Iterable[str]) -> Settings:
    """The flat settings of these names, and below them."""
    names = set(names)
    return {key: value for key, value in config.items() if key in names or key.partition(".")[0] in names}


def equal(a: Any, b: Any) -> bool:
    """Whether two settings are equal, floats but for rounding."""
    numbers = {type(a), type(b)} <= {int, float}
    return math.isclose(a, b, rel_tol=1e-6) if numbers else bool(a == b)


@dataclass(frozen=True)
class Fusion:
    """How several parameters of ours, or one in another form, are one tensor of theirs.

    split: theirs to ours. join: ours to theirs; it works on the meta device too. Both are given our settings.
    """

    split: Callable[[Tensor, Settings], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], Settings], Tensor]


WHOLE = Fusion(lambda tensor, _: (tensor,), lambda parts, _: parts[0])
Weights = Mapping[str | tuple[str, ...], str | tuple[str, Fusion]]


@dataclass(frozen=True, eq=False)
class Family:
    """A family of transformers' models: `architecture` is their class, `model_type` their name.

    prefix: before most names of their weights; files of the base model lack it.
    recipe: our settings that it always has, some derived from others. settings: the others.
    weights: our parameters to their tensors. `#` stands for the number of a layer, `*` for weight and bias.
    variant: their settings that tell it from other families of the same `model_type`.
    renamed: the names of their tensors in files that were saved under others, by regular expressions.
    idle: tensors in files that hold no weights.
    """

    model_type: str
    architecture: str
    prefix: str
    recipe: Settings
    settings: tuple[Setting, ...]
    weights: Weights
    variant: Settings = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    idle: str = r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)"

    def read_config(self, config: Mapping[str, Any]) -> Settings:
        """Our settings of the model that their `config` describes.

        Raises ValueError for a setting that we cannot express, or do not know.
        """
        theirs = flatten(config)
        known = {name for setting in self.settings for name in setting.names}
        for name, value in theirs.items():
            is_known = name in known or name.partition(".")[0] in known
            if not is_known and value is not None and not IDLE.fullmatch(name.removeprefix("attn_config.")):
                raise ValueError(
                    f"{name}={value}: is no setting of {self.model_type} that we know; if it changes no logits, delete "
                    f"it from the file"
                )
        ours: Settings = {**EMBEDDING, **ATTENTION}
        ours |= {key: value for key, value in self.recipe.items() if not callable(value)}
        for setting in self.settings:
            ours |= setting.read(theirs, ours)
        return ours | {key: value(ours) for key, value in self.recipe.items() if callable(value)}

    def write_config(self, ours: Settings) -> dict[str, Any]:
        """Their config of our model. It is that of another model if there are `obstacles`."""
        theirs: Settings = {}
        for setting in self.settings:
            theirs |= setting.write(ours)
        return nest(theirs)

    def obstacles(self, ours: Settings) -> list[str]:
        """The settings in which our model differs from every one of this family, as `key=value (theirs)`."""
        try:
            nearest = self.read_config(self.write_config(ours))
        except (ValueError, TypeError, KeyError) as error:  # of values that their settings cannot have
            return [str(error)]
        nearest = {key: value for key, value in nearest.items() if not key.startswith(FOLDED)}
        differing = [key for key in nearest | ours if not equal(ours.get(key), nearest.get(key))]
        replaced = {key.removesuffix("_target_") for key in differing if key.endswith("._target_")}
        return [
            f"{key.removesuffix('._target_')}={shown(ours.get(key))} ({shown(nearest.get(key))})"
            for key in differing
            if key.endswith("._target_") or not key.startswith(tuple(replaced))
        ]

    def to_theirs(self, ours: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
        """Their tensors of our parameters, which it keeps where it can."""
        theirs = {}
        for our_names, their_name, fusion in self.entries(settings):
            if our_names[0] in ours:
                theirs[their_name] = fusion.join([ours[name] for name in our_names], settings)
        return theirs

    def to_ours(self, theirs: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
        """Our parameters of their tensors, of which it may use views."""
        ours: dict[str, Tensor] = {}
        for our_names, their_name, fusion in self.entries(settings):
            if their_name in theirs:
                ours |= zip(our_names, fusion.split(theirs[their_name], settings), strict=True)
        return ours

    def entries(self, settings: Settings) -> Iterator[tuple[tuple[str, ...], str, Fusion]]:
        """Our names, their name and the fusion of every parameter that a model can have."""
        for names, source in self.weights.items():
            our_names = (names,) if isinstance(names, str) else names
            their_name, fusion = (source, WHOLE) if isinstance(source, str) else source
            for layer in range(settings["n_layers"] if "#" in their_name else 1):
                for kind in ("weight", "bias") if "*" in their_name else ("",):
                    ours, theirs = (
                        [name.replace("#", str(layer)).replace("*", kind) for name in names]
                        for names in (our_names, (their_name,))
                    )
                    yield tuple(ours), theirs[0], fusion

    @property
    def ends(self) -> tuple[str, str]:
        """Their names of the head's weight and of the token table."""
        names = {ours[0]: theirs for ours, theirs, _ in self.entries({"n_layers": 0})}
        return names["embedding.head.weight"], names["embedding.tokens.weight"]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """The names of the tensors in a file: each to what `weights` calls it. Those without weights are left out."""
        found = {}
        roots = {name.partition(".")[0] for _, name, _ in self.entries({"n_layers": 1})}
        for name in names:
            if re.fullmatch(self.idle, name):
                continue
            canonical = name
            for pattern, replacement in self.renamed.items():
                canonical = re.sub(pattern, replacement, canonical)
            if canonical.partition(".")[0] not in roots:
                canonical = self.prefix + canonical
            found[name] = canonical
        return found


def shown(value: Any) -> str:
    """A setting as a user types it, a component by its class."""
    if isinstance(value, str) and value.startswith((f"{MODEL}.", "torch.")):
        return value.rpartition(".")[2]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
