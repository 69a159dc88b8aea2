"""Shared parts of families: components, fields of config.json, names of weights."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .family import WHOLE, Fusion, Weights
from .settings import MODEL, Choice, Derived, Setting, Settings, Unread, Value, derive


def component(slot: str, target: str, **settings: Any) -> Settings:
    """The settings of a component of ours."""
    return {f"{slot}._target_": f"{MODEL}.{target}"} | {f"{slot}.{key}": value for key, value in settings.items()}


def block(name: str) -> Settings:
    """The setting of a block."""
    return component("block", f"block.{name}")


def activation(name: str, **arguments: str) -> Settings:
    """The settings of an activation of PyTorch."""
    return {"ffn.activation._target_": f"torch.nn.{name}"} | {f"ffn.activation.{k}": v for k, v in arguments.items()}


# All that components have besides their sizes
LAYER_NORM = component("norm", "norm.LayerNorm", bias=True, gain=True, unit_offset=False)
RMS_NORM = component("norm", "norm.RMSNorm", gain=True, unit_offset=False)
GEMMA_NORM = RMS_NORM | {"norm.unit_offset": True}
PLAIN = component("ffn", "feedforward.FeedForward", up_bias=False, down_bias=False)
GATED = component("ffn", "feedforward.GatedFeedForward", gate_bias=False, up_bias=False, down_bias=False)
CLAMPED = GATED | component("ffn", "feedforward.ClampedFeedForward") | component("ffn.activation", "feedforward.Swish")
MIXTURE = {
    **component("experts", "experts.MixtureOfExperts", scores="softmax", normalise=True, scale=1.0, router_bias=False),
    **dict.fromkeys(("experts.n_groups", "experts.top_groups"), 1),
    **{"experts.n_shared": 0, "experts.shared_gate": False, "experts.balance_bias": None},
}
ROUTING = Unread(  # of the training of routers
    "topk_method|moe_layer_freq|scoring_func|aux_loss_alpha|seq_aux|router_aux_loss_coef|router_jitter_noise|ep_size"
)
LEARNED = component("position", "position.Learned")
ALIBI = component("position", "position.Alibi", max_exponent=8.0, slope_scale=1.0)
GELU, GELU_TANH = activation("GELU", approximate="none"), activation("GELU", approximate="tanh")
ACTIVATIONS = {
    "silu": activation("SiLU"),
    "swish": activation("SiLU"),
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "relu": activation("ReLU"),
    "relu2": component("ffn.activation", "feedforward.SquaredReLU"),
    "sigmoid": activation("Sigmoid"),
    "linear": activation("Identity"),
}
QKV_BIASES = ("attention.query_bias", "attention.key_bias", "attention.value_bias")
ATTENTION_BIASES = (*QKV_BIASES, "attention.output_bias")
FFN_BIASES = ("ffn.up_bias", "ffn.down_bias")
GATED_BIASES = ("ffn.gate_bias", *FFN_BIASES)
BIASES = (*ATTENTION_BIASES, *FFN_BIASES)
ALL_BIASES: Settings = dict.fromkeys(BIASES, True)
QK_NORM: dict[Any, Settings] = {False: {"attention.qk_norm": None}, True: {"attention.qk_norm": "head"}}
QK_NORM_PER_HEAD = QK_NORM | {True: {"attention.qk_norm": "head", "attention.qk_gain": "heads"}}


def head_width(ours: Settings) -> int:
    """Heads that share the width of the model."""
    return int(ours["dim"] // ours["n_heads"])


def times_dim(factor: float) -> Derived:
    """A width in multiples of the model's."""
    return lambda ours: int(factor * ours["dim"])


def like(key: str) -> Derived:
    """The same as another of our settings."""
    return lambda ours: ours[key]


def root_of_dim(ours: Settings) -> float:
    """The square root of the width."""
    return math.sqrt(ours["dim"])


# Fields of a config.json: our key, or several with the same value, or what each value is of ours.
FIELDS: dict[str, str | tuple[str, ...] | Mapping[Any, Settings]] = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size"), "hidden_dim"),
    "moe_intermediate_size": "hidden_dim",
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), "experts.n_experts"),
    "num_experts_per_tok": "experts.top_k",
    "norm_topk_prob": "experts.normalise",
    "routed_scaling_factor": "experts.scale",
    "n_group": "experts.n_groups",
    "topk_group": "experts.top_groups",
    "swiglu_alpha": "ffn.activation.beta",
    "swiglu_limit": "ffn.limit",
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), "n_kv_heads"),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim"), "head_dim"),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "activation"), ACTIVATIONS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), "norm.eps"),
    "tie_word_embeddings": "embedding.tied",
    "attention_bias": ATTENTION_BIASES,
    "use_qkv_bias": QKV_BIASES,
    "mlp_bias": GATED_BIASES,
    **dict.fromkeys(("bias", "use_bias", "enable_bias"), BIASES),
    "clip_qkv": "attention.clip_qkv",
    "logit_scale": "embedding.logit_scale",
    **dict.fromkeys(("embedding_multiplier", "scale_emb"), "embedding.scale"),
    "residual_multiplier": "block.residual_scale",
    "attn_logit_softcapping": "attention.softcap",
    "final_logit_softcapping": "embedding.logit_softcap",
    "use_qk_norm": QK_NORM_PER_HEAD,
    "kv_lora_rank": "attention.kv_rank",
    "q_lora_rank": "attention.query_rank",
    "qk_nope_head_dim": "attention.nope_dim",
    "v_head_dim": "attention.value_dim",
    "linear_num_key_heads": "attention.key_heads",
    "linear_num_value_heads": "attention.value_heads",
    "linear_key_head_dim": "attention.key_dim",
    "linear_value_head_dim": "attention.value_dim",
    "linear_conv_kernel_dim": "attention.conv",
    "rope_interleave": {one: {"position.interleaved": one} for one in (True, False)},
}
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank")


def fields(**defaults: Any) -> tuple[Setting, ...]:
    """Fields that many families have, with the defaults of one."""
    return tuple(field(name, default) for name, default in defaults.items())


def field(name: str, default: Any) -> Setting:
    """A field of `FIELDS`."""
    ours = FIELDS[name]
    return Choice(name, default, ours) if isinstance(ours, Mapping) else Value(name, ours, default, name in NULLABLE)


def sizes(vocab: int, dim: int, layers: int, heads: int, context: int) -> tuple[Setting, ...]:
    """The sizes as LLaMA and most others call them, with the defaults of a family."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    return fields(**dict(zip(names, (vocab, dim, layers, heads, context), strict=True)))


def llama_sizes(
    vocab: int, dim: int, layers: int, heads: int, context: int, hidden: int, kv_heads: int | None = None
) -> tuple[Setting, ...]:
    """The same with the width of the feed-forward, and with the number of kv heads, None for one per head."""
    others = fields(intermediate_size=hidden, num_key_value_heads=kv_heads or like("n_heads"))
    return (*sizes(vocab, dim, layers, heads, context), *others)


def joined(*shares: str | int | Derived, groups: str | None = None, transposed: bool = False) -> Fusion:
    """Parts of ours whose rows are one tensor there, group after group: of each, every part's share in turn.

    shares, groups: numbers, or our settings that are numbers, or what follows from these. transposed: a matrix there is
    `(in, out)`.
    """

    def split(tensor: Tensor, settings: Settings) -> Sequence[Tensor]:
        rows = tensor.t() if transposed else tensor
        grouped = rows.view(settings[groups] if groups else 1, -1, *rows.shape[1:])
        of_each = [settings[share] if isinstance(share, str) else derive(share, settings) for share in shares]
        lengths = [grouped.shape[1] * share // sum(of_each) for share in of_each]
        return [part.flatten(0, 1) for part in grouped.split(lengths, 1)]  # type: ignore[no-untyped-call]

    def join(parts: Sequence[Tensor], settings: Settings) -> Tensor:
        grouped = [part.view(settings[groups] if groups else 1, -1, *part.shape[1:]) for part in parts]
        rows = torch.cat(grouped, 1).flatten(0, 1)
        return rows.t() if transposed else rows

    return Fusion(split, join)


GATE_UP = joined(1, 1)
QKV = joined("n_heads", "n_kv_heads", "n_kv_heads")
QKV_GROUPS = joined("n_heads", "n_kv_heads", "n_kv_heads", groups="n_kv_heads")
QUERY_KEY_VALUE = tuple(f"blocks.#.attention.{part}.*" for part in ("query", "key", "value"))


def of_each_expert(one: Fusion) -> Fusion:
    """Parts of ours that are stacks over experts, of which each expert's are kept as in `one`."""

    def split(tensor: Tensor, settings: Settings) -> Sequence[Tensor]:
        return [torch.stack(parts) for parts in zip(*(one.split(own, settings) for own in tensor), strict=True)]

    def join(parts: Sequence[Tensor], settings: Settings) -> Tensor:
        return torch.stack([one.join(own, settings) for own in zip(*parts, strict=True)])

    return Fusion(split, join)


def expert_weights(layer: str, names: Sequence[str], router: str) -> Weights:
    """Where experts are kept below `layer`, a tensor for each: gate, up, and down."""
    kept = zip(FFN, names, strict=True)
    return {
        **{f"blocks.#.ffn.experts.{part}.weight": f"{layer}.experts.%.{name}.weight" for part, name in kept},
        "blocks.#.ffn.router.*": f"{layer}.{router}.*",
    }


FFN = ("gate", "up", "down")
GATE_AND_UP, GATE_AND_UP_BIASES = (
    (f"blocks.#.ffn.experts.gate.{kind}", f"blocks.#.ffn.experts.up.{kind}") for kind in ("weight", "bias")
)
# All experts in one tensor, as the models of transformers 5 have them, but not the files that these save
STACKED: Weights = {
    GATE_AND_UP: ("model.layers.#.mlp.experts.gate_up_proj", of_each_expert(GATE_UP)),
    "blocks.#.ffn.experts.down.weight": "model.layers.#.mlp.experts.down_proj",
    "blocks.#.ffn.router.*": "model.layers.#.mlp.gate.*",
}


def weights(
    layer: str,
    attention: Sequence[str],
    norms: Sequence[str],
    ffn: Sequence[str],
    ends: Sequence[str],
    qkv: Fusion = QKV,
    matrix: Fusion = WHOLE,
) -> Weights:
    """Where a plain decoder is kept: names below `layer`, and of the token table and the last norm.

    attention: queries, keys and values, apart or as one by `qkv`, and output. norms: before attention, and before the
    feed-forward if it has one of its own. ffn: gate, if there is one, up and down. matrix: how these are kept.
    """
    *inputs, output = attention
    matrices = {
        **(dict(zip(QUERY_KEY_VALUE, inputs, strict=True)) if inputs[1:] else {}),
        "blocks.#.attention.output.*": output,
        **dict(zip([f"blocks.#.ffn.{part}.*" for part in FFN[-len(ffn) :]], ffn, strict=True)),
    }
    fused: Weights = {} if inputs[1:] else {QUERY_KEY_VALUE: (f"{layer}.{inputs[0]}.*", qkv)}
    return {
        "embedding.tokens.weight": f"{ends[0]}.weight",
        "blocks.#.attention_norm.*": f"{layer}.{norms[0]}.*",
        **fused,
        **{ours: (f"{layer}.{theirs}.*", matrix) for ours, theirs in matrices.items()},
        "blocks.#.ffn_norm.*": f"{layer}.{norms[1]}.*",
        "norm.*": f"{ends[1]}.*",
        "embedding.head.*": "lm_head.*",
    }


def query_key_norms(name: str, kept: Fusion = WHOLE) -> Weights:
    """Where LLaMA's descendants keep the norms of queries and keys: `q_` and `k_` before this name."""
    within = {part: f"model.layers.#.self_attn.{part[0]}_{name}.*" for part in ("query", "key")}
    return {f"blocks.#.attention.{part}_norm.*": (theirs, kept) for part, theirs in within.items()}


LLAMA_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LLAMA_ENDS = ("model.embed_tokens", "model.norm")
LLAMA_EXPERTS = expert_weights("model.layers.#.mlp", ("gate_proj", "up_proj", "down_proj"), "gate")
LLAMA_NAMES = {
    **weights("model.layers.#", LLAMA_ATTENTION, LLAMA_NORMS, LLAMA_FFN, LLAMA_ENDS),
    **query_key_norms("norm"),
    "blocks.#.attention.sinks.logits": "model.layers.#.self_attn.sinks",
}
