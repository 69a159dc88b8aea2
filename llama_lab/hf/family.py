"""Model families: one table per family maps settings and weights between transformers and us, both ways.

The tables are in `llama_families.py`, `expert_families.py`, `recurrent_families.py`, `gpt_families.py` and
`encoder_families.py`, the kinds of settings in `settings.py`. A family lists its fixed settings (`recipe`), how its
settings map to ours (`settings`), and which tensor holds each of our parameters (`weights`). "Ours" is the model node
of our config, "theirs" config.json. Nothing here reads a file.

Our settings are flat: the model node of a resolved config with dotted keys, `{"dim": 64, "norm.eps": 1e-5}`, without
what only the start of training reads, and lists where layers differ; see `flat_settings` and `by_layer.py`.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from .by_layer import ABSENT, GROUPED, MIXER, SomeMixers, at_attention, at_layer, node_key, with_layers, without_layers
from .settings import MODEL, Setting, Settings, Value, as_tuple, equal, flatten, nest, shown

ATTENTION = {
    MIXER: GROUPED,
    **dict.fromkeys((f"attention.{part}_bias" for part in ("query", "key", "value", "output")), False),
    **dict.fromkeys(f"attention.{part}" for part in ("window", "chunk", "prefix", "softcap", "gate", "value_residual")),
    **dict.fromkeys(f"attention.{part}" for part in ("scale", "temperature", "clip_qkv", "qk_norm", "qk_bias", "conv")),
    "attention.qk_gain": "shared",
    "attention.qk_norm_rotated": False,
    "attention.sinks": False,
}
BLOCK = {"block.residual_scale": 1.0, "block.learned_scale": False}
EMBEDDING = {
    "embedding._target_": f"{MODEL}.embedding.Embedding",
    "embedding.tied": False,
    "embedding.scale": 1.0,
    "embedding.norm_input": False,
    "embedding.head_bias": False,
    "embedding.logit_scale": 1.0,
    "embedding.logit_softcap": None,
}
# Of the initial values, of training and of speed: they change no trained model's output.
OF_TRAINING = re.compile(
    r"init\..*|seed|dropout|(embedding|position)\.std|attention\.(kernel|chunk_size)"
    r"|experts\.(balance_loss|scope|z_loss)|(.*\.)?_partial_|_target_"
)
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
SIZES = ("dim", "n_layers", "n_heads", "vocab_size", "max_seq_len")
# What transformers reads of any config, whatever its class declares
READ_BY_ALL = ("head_dim", "is_causal", "original_max_position_embeddings", "per_layer_config")


def flat_settings(node: Mapping[str, Any]) -> Settings:
    """The settings of a model node of a resolved config that its trained output depends on."""
    return {key: value for key, value in with_layers(node).items() if not OF_TRAINING.fullmatch(key)}


def model_node(settings: Settings, model: str = "Decoder") -> dict[str, Any]:
    """The node of a `model` with `settings`, to be instantiated by Hydra; the inverse of `flat_settings`."""
    node = without_layers(settings)
    for own in (node, *node["layers"]):
        for part in own.keys() & {"norm", "position", "attention", "cross_attention", "ffn", "embedding", "block"}:
            own[part] = own[part] and as_factory(own[part])  # a block may leave out the feed-forward
    start = {"init": {"_target_": f"{MODEL}.init.Normal", "_partial_": True}, "dropout": 0.0, "seed": 0}
    return {"_target_": f"{MODEL}.{model}", **node, **start}


def as_factory(component: dict[str, Any]) -> dict[str, Any]:
    """The node of a component to be instantiated as a factory, and so what a feed-forward takes as one."""
    parts = {name: as_factory(component[name]) for name in ("activation", "expert") if name in component}
    return component | parts | {"_partial_": True}


@dataclass(frozen=True)
class Fusion:
    """How one tensor of theirs combines several parameters of ours, or stores one in another form.

    split: theirs to ours. join: ours to theirs; it works on the meta device too. Both are given our settings.
    """

    split: Callable[[Tensor, Settings], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor], Settings], Tensor]


WHOLE = Fusion(lambda tensor, _: (tensor,), lambda parts, _: parts[0])
Weights = dict[str | tuple[str, ...], str | tuple[str, Fusion] | Callable[[Settings], str]]


@dataclass(frozen=True, eq=False)
class Family:
    """A family of transformers' models: `architecture` is their class, `model_type` their name.

    recipe: our settings that it always has, some derived from others. settings: the others.
    weights: our parameters to their tensors, whose names may depend on our settings. `#` stands for the number of a
        layer, `*` for weight and bias, and `%` for the number of a head or an expert, of which they have a tensor each.
    other_weights: those of a second layout, which is read, too.
    mixer_weights: of layers with another mixer than attention, in place of all of attention's.
    attention: our settings of a plain model's attention, which the others change.
    variant: their settings that tell it from other families of the same `model_type`.
    renamed: the names of their tensors in files that were saved under others, by regular expressions.
    idle: tensors in files that hold no weights.
    precision: how far logits of transformers in float32 are from ours, in parts of the largest.
    model: the class of ours.
    """

    model_type: str
    architecture: str
    recipe: Settings
    settings: tuple[Setting, ...]
    weights: Weights
    variant: Settings = field(default_factory=dict)
    other_weights: Weights = field(default_factory=dict)
    mixer_weights: Weights = field(default_factory=dict)
    attention: Settings = field(default_factory=ATTENTION.copy)
    renamed: Mapping[str, str] = field(default_factory=dict)
    idle: str = r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)"
    precision: float = 1e-4
    model: str = "Decoder"

    def derive(
        self,
        model_type: str,
        architecture: str,
        *settings: Setting,
        without: Sequence[str] = (),
        recipe: Settings | None = None,
        weights: Weights | None = None,
        mixer_weights: Weights | None = None,
        **others: Any,
    ) -> "Family":
        """A family that differs from this one in some settings, in parts of the recipe, in where weights are kept.

        A setting takes the place of that with the same first name, a component that of the slot, a tensor that of its
        parts. without: first names of settings that it lacks.
        """
        gone = {*without, *(setting.names[0] for setting in settings)}
        slots = tuple(key.removesuffix("_target_") for key in recipe or {} if key.endswith("._target_"))
        kept = {key: value for key, value in self.recipe.items() if not key.startswith(slots)}
        return replace(
            self,
            model_type=model_type,
            architecture=architecture,
            settings=(*(setting for setting in self.settings if setting.names[0] not in gone), *settings),
            recipe=kept | (recipe or {}),
            weights=changed(self.weights, weights or {}),
            mixer_weights=changed(self.mixer_weights, mixer_weights or {}),
            **others,
        )

    def read_config(self, config: Mapping[str, Any], ignorable: Container[str] = ()) -> Settings:
        """Translate their `config` into our settings.

        ignorable: settings of other families, which this one's class does not read; see `ignored`.
        Raises ValueError for a setting that we cannot express, or do not know.
        """
        theirs = flatten(config)
        ours: Settings = {**EMBEDDING, **self.attention, **BLOCK}
        ours |= {key: value for key, value in self.recipe.items() if not callable(value)}
        for setting in sorted(self.settings, key=dependence):
            ours |= setting.read(theirs, ours)
        ours |= {key: value(ours) for key, value in self.recipe.items() if callable(value)}
        if isinstance(ours["max_seq_len"], list):  # LongRoPE ends the context, here in some layers
            ours["max_seq_len"] = min(end for end in ours["max_seq_len"] if end != ABSENT)
        for key in SIZES:
            if type(ours[key]) is not int or ours[key] < 1:
                raise ValueError(f"{key}={ours[key]}: must be a positive whole number")
        ours = {"head_dim": ours["dim"] // ours["n_heads"], "n_kv_heads": ours["n_heads"]} | ours
        for name, value in self.unknown(theirs).items():
            is_ignored = name.partition(".")[0] in ignorable and name not in READ_BY_ALL
            if not is_ignored and not equal(value, ours.get(name)):
                raise ValueError(
                    f"{name}={value}: is no setting of {self.model_type} that we know; if it changes no logits, delete "
                    f"it from the file"
                )
        return ours

    def unknown(self, theirs: Settings) -> Settings:
        """Settings that this family does not know, but that change the logits of another family."""
        known = {name for setting in self.settings for name in setting.names}
        return {
            name: value
            for name, value in theirs.items()
            if name not in known and name.partition(".")[0] not in known
            if value is not None and not IDLE.fullmatch(name.removeprefix("attn_config."))
        }

    def ignored(self, config: Mapping[str, Any]) -> list[str]:
        """The settings of a config that was read that are ignored here, as transformers does, as `name=value`."""
        unread = self.unknown(flatten(config))
        return [f"{name}={shown(value)}" for name, value in unread.items() if value is not False]

    def write_config(self, ours: Settings) -> dict[str, Any]:
        """Translate our settings into their config; exact only without `obstacles`."""
        theirs: Settings = {}
        usual = at_attention(ours, self.attention[MIXER])
        for setting in self.settings:
            theirs |= setting.write(ours if isinstance(setting, SomeMixers) else usual)
        return nest(theirs)

    def obstacles(self, ours: Settings) -> tuple[list[str], bool]:
        """Settings that this family cannot express, as `key=value (theirs)`, and whether these are all.

        They are not where their settings cannot have a value: then it is the first such one.
        """
        try:
            nearest = self.read_config(self.write_config(ours))
        except (ValueError, TypeError, KeyError) as error:  # of values that their settings cannot have
            return [str(error)], False
        differing = [key for key in nearest | ours if not equal(ours.get(key), nearest.get(key))]
        replaced = {key.removesuffix("_target_") for key in differing if key.endswith("._target_")}
        return [
            f"{node_key(key).removesuffix('._target_')}={shown(ours.get(key))} ({shown(nearest.get(key))})"
            for key in differing
            if key.endswith("._target_") or not key.startswith(tuple(replaced))
        ], True

    def to_theirs(self, ours: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
        """Convert our parameters to their tensors, without copies where possible."""
        theirs: dict[str, Tensor] = {}
        for our_names, their_name, fusion, own in self.entries(settings):
            if our_names[0] in ours:
                joined = fusion.join([ours[name] for name in our_names], own)
                parts = [part.clone() for part in joined] if "%" in their_name else [joined]
                theirs |= {their_name.replace("%", str(number)): part for number, part in enumerate(parts)}
        return theirs

    def to_ours(self, theirs: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
        """Convert their tensors to our parameters, which may be views."""
        ours: dict[str, Tensor] = {}
        for our_names, their_name, fusion, own in self.entries(settings):
            numbered = (their_name.replace("%", str(number)) for number in count())
            parts = [theirs[name] for name in takewhile(theirs.__contains__, numbered)] if "%" in their_name else []
            if parts or their_name in theirs:
                tensor = torch.stack(parts) if parts else theirs[their_name]
                ours |= zip(our_names, fusion.split(tensor, own), strict=True)
        return ours

    def entries(self, settings: Settings) -> Iterator[tuple[tuple[str, ...], str, Fusion, Settings]]:
        """Our names, their name and the fusion of every parameter that a model can have, and its layer's settings."""
        depth = max(settings["n_layers"], settings.get("encoder_layers", 0))
        layers = [at_layer(settings, layer) for layer in range(depth)]
        for layer, own in enumerate([settings, *layers], -1):
            for names, source in self.weights_of(own).items():
                our_names = as_tuple(names)
                if ("#" in our_names[0]) == (layer < 0):
                    continue
                source = source(own) if callable(source) else source
                their_name, fusion = (source, WHOLE) if isinstance(source, str) else source
                for kind in ("weight", "bias") if "*" in their_name else ("",):
                    every = (*our_names, their_name)
                    *ours, theirs = (name.replace("#", str(layer)).replace("*", kind) for name in every)
                    yield tuple(ours), theirs, fusion, own

    def weights_of(self, own: Settings) -> Weights:
        """Where the weights of a layer with these settings are kept."""
        if own.get(MIXER, self.attention[MIXER]) == self.attention[MIXER]:
            return self.weights
        others = {names: where for names, where in self.weights.items() if "blocks.#.attention." not in str(names)}
        return changed(others, self.mixer_weights)

    def of_layout(self, names: Container[str], settings: Settings) -> "Family":
        """The family itself, or with its second layout if a file has `names` of that."""
        weights, of_mixers = (changed(one, self.other_weights) for one in (self.weights, self.mixer_weights))
        other = replace(self, weights=weights, mixer_weights=of_mixers)
        own = {name for _, name, *_ in self.entries(settings)}
        is_other = any(name in names and name not in own for _, name, *_ in other.entries(settings))
        return other if is_other else self

    @property
    def ends(self) -> tuple[str, str]:
        """Their names of the head's weight and of the token table."""
        names = {ours[0]: theirs for ours, theirs, *_ in self.entries({"n_layers": 0})}
        return names["embedding.head.weight"], names["embedding.tokens.weight"]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map tensor names in a file to those of `weights`; buffers without weights are left out."""
        found = {}
        roots = {name.partition(".")[0] for _, name, *_ in self.entries({"n_layers": 1})}
        for name in names:
            if re.fullmatch(self.idle, name):
                continue
            canonical = name
            for pattern, replacement in self.renamed.items():
                canonical = re.sub(pattern, replacement, canonical)
            if canonical.partition(".")[0] not in roots:
                canonical = f"{self.ends[1].partition('.')[0]}.{canonical}"
            found[name] = canonical
        return found


def changed(weights: Weights, others: Weights) -> Weights:
    """Where weights are kept with these in other places."""
    moved = {name for names in others for name in as_tuple(names)}
    return {names: where for names, where in weights.items() if moved.isdisjoint(as_tuple(names))} | others


def dependence(setting: Setting) -> int:
    """What is read first: values, those whose default follows from others, what is made of several, other mixers."""
    if isinstance(setting, SomeMixers):
        return 3
    return 2 if type(setting) is not Value else int(callable(setting.default))
