"""Every field of every family's config.json, changed one at a time: what transformers makes of it, and what we do."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from llama_lab.hf.families import FAMILIES, FIELDS
from llama_lab.hf.family import IDLE_NAMES, READ_BY_ALL
from llama_lab.hf.loading import family_of, load
from llama_lab.model.recurrent import Recurrent
from llama_lab.util.errors import ConfigError
from tests.hf.theirs import CASES, CONTEXT, FULL, SLIDING, VOCAB, built, our_logits, their_logits

TOLERANCE = 1e-4
OF_RECURRENT = 3e-4  # twelve such layers in float32 are 1e-4 from float64, ours and theirs
KINDS = {FULL: {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}, SLIDING: {"rope_theta": 100.0}}
YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0, "beta_slow": 0.05}
LLAMA3 = {"factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 0.1, "high_freq_factor": 2.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_theta": 100.0},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"type": "linear", "rope_type": "default", "factor": 3.0},
    {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"rope_type": "yarn", "rope_theta": 100.0, **YARN},
    {"type": "yarn", **YARN},
    {"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3},
    {"rope_type": "dynamic", "factor": 3.0},
    *(
        {"rope_type": kind, "short_factor": [1.5] * n, "long_factor": [3.0] * n, "original_max_position_embeddings": 8}
        for kind in ("longrope", "su", "yarn")
        for n in (2, 4, 6)
    ),
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    KINDS,
    {FULL: {"type": "linear", "factor": 3.0}},
    KINDS | {FULL: {"rope_type": "yarn", "rope_theta": 500.0, **YARN, "truncate": False}},
    KINDS | {FULL: {"rope_type": "yarn", "rope_theta": 500.0, **YARN}, "truncate": False},
]
PATTERN = [FULL, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
# What fields are changed to; of others, values of every type.
VALUES: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [100.0, 100],
    "layer_types": ["alternate", "sliding", "full"],
    "no_rope_layers": ["alternate"],
    "attention_types": ["alternate"],
    "layer_rope_theta": ["alternate"],
    "attn_config": [
        *({"alibi": False}, {"alibi_bias_max": 4}, {"clip_qkv": 0.4}, {"softmax_scale": 0.7}, {"qk_ln": True}),
        *({"prefix_lm": True}, {"attn_type": "multiquery_attention"}, {"attn_impl": "flash"}),
    ],
    "sliding_window_pattern": [2, 3, "LLG", "LG"],
    "_sliding_window_pattern": [2],
    "per_layer_config": [{"0": {"intermediate_size": 64}}],
}
ACTIVATIONS = ("gelu", "relu", "silu", "gelu_new", "relu2", "gelu_fast", "swish", "mish", "gelu_10")
ANY: list[Any] = [0.5, True, False, None, 2, 12, "gelu"]
IDLE_FIELDS = sorted({name for name in IDLE_NAMES.split() if re.fullmatch(r"\w+", name)})
UNTRIED = {"architectures", "dtype", "id2label", "initializer_range", "is_encoder_decoder", "model_type", "num_labels"}
UNTRIED |= {"seq_length", "torch_dtype", "transformers_version", "vocab_size"}


def values_of(name: str, layers: int) -> list[Any]:
    """What a field is changed to."""
    if name in ("hidden_act", "activation_function", "hidden_activation", "afn", "activation"):
        return [*ACTIVATIONS]
    lists = {
        "layer_types": {"alternate": PATTERN[:layers], "sliding": [SLIDING] * layers, "full": [FULL] * layers},
        "no_rope_layers": {"alternate": [i % 2 for i in range(layers)]},
        "attention_types": {"alternate": [[["local"], 1], [["global"], layers - 1]]},
        "layer_rope_theta": {"alternate": [float(100 * (i % 3)) for i in range(layers)]},
    }
    return [lists.get(name, {}).get(v, v) if isinstance(v, str) else v for v in VALUES.get(name, ANY)]


@cache
def read_by_class(model_type: str) -> frozenset[str]:
    """The attributes of its config that a class reads as it is built and run, in any of our cases."""
    read: set[str] = set()
    original = PreTrainedConfig.__getattribute__

    def recorded(self: PreTrainedConfig, name: str) -> Any:
        read.add(name)
        return original(self, name)

    for own_type, settings in CASES.values():
        if own_type == model_type:
            config = AutoConfig.for_model(model_type, **json.loads(json.dumps(settings)))
            with patch.object(PreTrainedConfig, "__getattribute__", recorded):
                their_logits(built(config), tokens())
    return frozenset(name for name in read if not name.startswith("__") and not hasattr(PreTrainedConfig, name))


@cache
def all_fields() -> list[str]:
    """Every field that a class of any family reads or has, and every one that a table of ours has."""
    types = {family.model_type for family in FAMILIES}
    theirs = set.union(*({*read_by_class(t), *AutoConfig.for_model(t).to_dict()} for t in types))
    ours = {name.partition(".")[0] for family in FAMILIES for setting in family.settings for name in setting.names}
    return sorted((theirs | ours | {*IDLE_FIELDS}) - UNTRIED)


def signature(config: PreTrainedConfig) -> str:
    """All of a config that its class reads."""
    return str([(name, getattr(config, name, None)) for name in sorted(read_by_class(config.model_type))])


def tokens() -> Tensor:
    """A text."""
    return torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


class Base:
    """A case, whose fields are changed."""

    def __init__(self, model_type: str, settings: dict[str, Any], folder: Path) -> None:
        self.raw = {"bos_token_id": None, "eos_token_id": None, "model_type": model_type} | settings
        self.folder, self.family = folder, family_of(folder, self.raw)
        their_config = self.their_config(self.raw)
        self.signature = signature(their_config)
        self.settings = self.family.read_config(self.raw, FIELDS)
        ours = {name.partition(".")[0] for setting in self.family.settings for name in setting.names}
        self.known = {*their_config.to_dict(), *read_by_class(model_type), *ours, *READ_BY_ALL}
        self.seen: dict[str, str] = {}

    def their_config(self, raw: dict[str, Any]) -> PreTrainedConfig:
        """Of a raw config.json, as AutoConfig reads it from a file."""
        return CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))

    def differing(self, changes: list[dict[str, Any]]) -> dict[str, str]:
        """The changes after which we load another model than transformers, without a word.

        Fields that neither class reads have one value.
        """
        first = {frozenset(change): change for change in reversed(changes)}
        tried = [change for change in changes if change.keys() & self.known or change is first[frozenset(change)]]
        outcomes = {str(change): self.outcome(**change) for change in tried}
        return {change: what for change, what in outcomes.items() if what.startswith(("DIFFERS", "FAILS"))}

    def outcome(self, **changes: Any) -> str:
        """Whether we load what transformers loads of the changed config.json, or which of us refuses it."""
        raw = self.raw | changes
        try:
            config = self.their_config(raw)
            found = signature(config)
        except Exception as error:
            return f"theirs refuses: {type(error).__name__} {error}"
        try:
            ours = family_of(self.folder, raw).read_config(raw, FIELDS)
        except (ConfigError, ValueError) as error:
            return f"refused: {error}"
        except (TypeError, KeyError, AttributeError, ArithmeticError):
            return "refused: as damaged"
        if found == self.signature:
            keys = (ours | self.settings).keys() - {"max_seq_len"}  # to which nothing ends where positions do not
            different = [key for key in keys if ours.get(key) != self.settings.get(key)]
            return f"DIFFERS though it is not read: {different}" if different else "equal"
        key = found + str(ours)
        if key not in self.seen:
            self.seen[key] = self.compare(raw, config)
        return self.seen[key]

    @torch.no_grad()
    def compare(self, raw: dict[str, Any], config: PreTrainedConfig) -> str:
        """The same by logits."""
        try:
            theirs = built(config)
            theirs.save_pretrained(self.folder)
            expected = their_logits(theirs, tokens())
        except Exception as error:
            return f"theirs refuses: {type(error).__name__} {error}"
        (self.folder / "config.json").write_text(json.dumps(raw))
        try:
            model = load(self.folder).model
            text = tokens()[:, : model.max_seq_len]
            found = our_logits(model, text)
        except ConfigError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"FAILS: {type(error).__name__} {error}"
        if text.shape != tokens().shape:  # which some scaled angles depend on
            expected = their_logits(built(self.their_config(raw)), text)
        if not expected.isfinite().all():
            return "theirs is no number"
        error = (found - expected).abs().max().item()
        usual = OF_RECURRENT if any(isinstance(mixer, Recurrent) for mixer in model.mixers) else TOLERANCE
        limit = self.family.precision if raw.get("alibi") else usual
        return "equal" if error <= limit else f"DIFFERS by {error:.3g}"
