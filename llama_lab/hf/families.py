"""The families of transformers' models that our components express, one table each; see `hf.py`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .by_layer import (
    SLIDING,
    FullLayers,
    GlobalAndLocal,
    RotaryByKind,
    RotaryByLayer,
    ScaleByLayer,
    SomeRotary,
    Windows,
    sliding,
)
from .family import ATTENTION, Family, Fusion, Weights
from .settings import (
    MODEL,
    ORIGINAL,
    PHI3_KINDS,
    Choice,
    DenseLayers,
    Derived,
    Fixed,
    LatentRotary,
    MultiQuery,
    Quotient,
    Reciprocal,
    RotaryDim,
    RotaryOrAlibi,
    RotaryPosition,
    ScoreScale,
    Setting,
    Settings,
    SteppedLatentRotary,
    SteppedRotary,
    Unread,
    Value,
)

# What components are called in a config, and all that they have besides their sizes.
GAIN: Settings = {"norm.gain": True, "norm.unit_offset": False}
LAYER_NORM: Settings = {"norm._target_": f"{MODEL}.norm.LayerNorm", "norm.bias": True, **GAIN}
RMS_NORM: Settings = {"norm._target_": f"{MODEL}.norm.RMSNorm", **GAIN}
GEMMA_NORM: Settings = RMS_NORM | {"norm.unit_offset": True}
PLAIN: Settings = {
    "ffn._target_": f"{MODEL}.feedforward.FeedForward",
    **dict.fromkeys(("ffn.up_bias", "ffn.down_bias"), False),
}
GATED: Settings = {
    "ffn._target_": f"{MODEL}.feedforward.GatedFeedForward",
    **dict.fromkeys(("ffn.gate_bias", "ffn.up_bias", "ffn.down_bias"), False),
}
LEARNED: Settings = {"position._target_": f"{MODEL}.position.Learned"}
ALIBI: Settings = {
    "position._target_": f"{MODEL}.position.Alibi",
    "position.max_exponent": 8.0,
    "position.slope_scale": 1.0,
}
QKV_BIASES = ("attention.query_bias", "attention.key_bias", "attention.value_bias")
ATTENTION_BIASES = (*QKV_BIASES, "attention.output_bias")
FFN_BIASES = ("ffn.up_bias", "ffn.down_bias")
ALL_BIASES: Settings = dict.fromkeys((*ATTENTION_BIASES, *FFN_BIASES), True)


def block(name: str) -> Settings:
    """The setting of a block."""
    return {"block._target_": f"{MODEL}.block.{name}"}


def activation(name: str, **arguments: str) -> Settings:
    """The settings of an activation of PyTorch."""
    return {"ffn.activation._target_": f"torch.nn.{name}"} | {f"ffn.activation.{k}": v for k, v in arguments.items()}


GELU, GELU_TANH = activation("GELU", approximate="none"), activation("GELU", approximate="tanh")
ACTIVATIONS: dict[str, Settings] = {
    "silu": activation("SiLU"),
    "swish": activation("SiLU"),
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "relu": activation("ReLU"),
    "relu2": {"ffn.activation._target_": f"{MODEL}.feedforward.SquaredReLU"},
    "sigmoid": activation("Sigmoid"),
    "linear": activation("Identity"),
}


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


def sizes(vocab: int, dim: int, layers: int, heads: int, context: int) -> tuple[Setting, ...]:
    """The sizes as LLaMA and most others call them, with the defaults of a family."""
    return (
        Value("vocab_size", "vocab_size", vocab),
        Value("hidden_size", "dim", dim),
        Value("num_hidden_layers", "n_layers", layers),
        Value("num_attention_heads", "n_heads", heads),
        Value("max_position_embeddings", "max_seq_len", context),
    )


def gpt_sizes(vocab: int, dim: int, layers: int, heads: int, context: int) -> tuple[Setting, ...]:
    """The sizes as GPT-2 and its descendants call them."""
    return (
        Value("vocab_size", "vocab_size", vocab),
        Value("n_embd|hidden_size", "dim", dim),
        Value("n_layer|num_hidden_layers", "n_layers", layers),
        Value("n_head|num_attention_heads", "n_heads", heads),
        Value("n_positions|max_position_embeddings", "max_seq_len", context),
    )


KV_HEADS = Value("num_key_value_heads", "n_kv_heads", like("n_heads"))
OWN_KV_HEADS: Settings = {"n_kv_heads": like("n_heads"), "head_dim": head_width}
HEAD_DIM = Value("head_dim", "head_dim", head_width)
UNTIED = Value("tie_word_embeddings", "embedding.tied", False)
TIED = Value("tie_word_embeddings", "embedding.tied", True)


def transposed(parts: Sequence[Tensor]) -> Tensor:
    """A weight of a Conv1D, `(in, out)`; its bias stays."""
    return parts[0].t()


CONV1D = Fusion(lambda tensor, _: (tensor.t(),), lambda parts, _: transposed(parts))


def split_concatenated(tensor: Tensor, settings: Settings) -> Sequence[Tensor]:
    """All queries, all keys, all values."""
    heads = (settings["n_heads"], settings["n_kv_heads"], settings["n_kv_heads"])
    parts: Sequence[Tensor] = tensor.split([n * settings["head_dim"] for n in heads])  # type: ignore[no-untyped-call]
    return parts


QKV = Fusion(split_concatenated, lambda parts, _: torch.cat(list(parts)))
QKV_CONV1D = Fusion(
    lambda tensor, settings: split_concatenated(tensor.t(), settings), lambda parts, _: torch.cat(list(parts)).t()
)


def split_groups(tensor: Tensor, settings: Settings) -> Sequence[Tensor]:
    """For each kv head in turn, the queries that share it, its key and its value."""
    shared = settings["n_heads"] // settings["n_kv_heads"]
    groups = tensor.view(settings["n_kv_heads"], shared + 2, settings["head_dim"], *tensor.shape[1:])
    return [
        part.flatten(0, 2) for part in (groups[:, :shared], groups[:, shared : shared + 1], groups[:, shared + 1 :])
    ]


def join_groups(parts: Sequence[Tensor], settings: Settings) -> Tensor:
    """The inverse of `split_groups`."""
    groups = [part.view(settings["n_kv_heads"], -1, settings["head_dim"], *part.shape[1:]) for part in parts]
    return torch.cat(groups, 1).flatten(0, 2)


QKV_GROUPS = Fusion(split_groups, join_groups)
GATE_UP = Fusion(lambda tensor, _: tensor.chunk(2), lambda parts, _: torch.cat(list(parts)))
# OPT's positions, whose first two rows are for padding, and reach no logits: they are written as zeros.
AFTER_PADDING = Fusion(
    lambda tensor, _: (tensor[2:],), lambda parts, _: torch.cat((torch.zeros_like(parts[0][:2]), parts[0]))
)
# Cohere's gains, one per head, are a matrix there.
ROW_PER_HEAD = Fusion(
    lambda tensor, _: (tensor.flatten(),), lambda parts, settings: parts[0].view(-1, settings["head_dim"])
)


def other_way_round(tensor: Tensor, settings: Settings) -> Tensor:
    """The halves of each head exchanged, which are the pairs that RoPE turns: so they turn the other way (nanochat)."""
    heads = tensor.view(-1, 2, settings["head_dim"] // 2, *tensor.shape[1:])
    return heads.flip(1).reshape(tensor.shape)


TURNED_BACK = Fusion(
    lambda tensor, settings: (other_way_round(tensor, settings),),
    lambda parts, settings: other_way_round(parts[0], settings),
)
QUERY_KEY_VALUE = ("blocks.#.attention.query.*", "blocks.#.attention.key.*", "blocks.#.attention.value.*")
HEAD: Weights = {"embedding.head.*": "lm_head.*"}
LLAMA_ATTENTION: Weights = {
    "blocks.#.attention.query.*": "model.layers.#.self_attn.q_proj.*",
    "blocks.#.attention.key.*": "model.layers.#.self_attn.k_proj.*",
    "blocks.#.attention.value.*": "model.layers.#.self_attn.v_proj.*",
    "blocks.#.attention.output.*": "model.layers.#.self_attn.o_proj.*",
}
LLAMA_NORMS: Weights = {
    "blocks.#.attention_norm.*": "model.layers.#.input_layernorm.*",
    "blocks.#.ffn_norm.*": "model.layers.#.post_attention_layernorm.*",
    "norm.*": "model.norm.*",
}
LLAMA_FFN: Weights = {
    "blocks.#.ffn.gate.*": "model.layers.#.mlp.gate_proj.*",
    "blocks.#.ffn.up.*": "model.layers.#.mlp.up_proj.*",
    "blocks.#.ffn.down.*": "model.layers.#.mlp.down_proj.*",
}
LLAMA_ENDS: Weights = {"embedding.tokens.weight": "model.embed_tokens.weight", **HEAD}
LLAMA_WEIGHTS: Weights = {**LLAMA_ENDS, **LLAMA_NORMS, **LLAMA_ATTENTION, **LLAMA_FFN}

ROTATED_GATED: Settings = RMS_NORM | GATED | block("PreNorm")


def llama_settings(
    sizes: tuple[Setting, ...],
    hidden_dim: int,
    rms_norm_eps: float,
    *others: Setting,
    n_kv_heads: int | Derived | None = None,
) -> tuple[Setting, ...]:
    """LLaMA's settings, which many families have with others beside them, with the defaults of a family."""
    return (
        *sizes,
        Value("intermediate_size", "hidden_dim", hidden_dim),
        Value("num_key_value_heads", "n_kv_heads", n_kv_heads or like("n_heads")),
        Choice("hidden_act", "silu", ACTIVATIONS),
        Value("rms_norm_eps", "norm.eps", rms_norm_eps),
        *others,
    )


QK_NORM_PER_HEAD: dict[bool, Settings] = {
    False: {"attention.qk_norm": None},
    True: {"attention.qk_norm": "head", "attention.qk_gain": "heads"},
}
ATTENTION_BIAS = Value("attention_bias", ATTENTION_BIASES, False)
MLP_BIAS = Value("mlp_bias", ("ffn.gate_bias", *FFN_BIASES), False)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    ROTATED_GATED,
    llama_settings(
        sizes(32000, 4096, 32, 32, 2048), 11008, 1e-6, RotaryPosition(), HEAD_DIM, UNTIED, ATTENTION_BIAS, MLP_BIAS
    ),
    LLAMA_WEIGHTS,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "model.",
    ROTATED_GATED,
    llama_settings(
        sizes(32000, 4096, 32, 32, 131072), 14336, 1e-6, RotaryPosition(), HEAD_DIM, UNTIED, Windows(4096), n_kv_heads=8
    ),
    LLAMA_WEIGHTS,
)
NO_DROPOUT = Unread(("resid_pdrop", "embd_pdrop", "attn_pdrop"), written=0.0)  # where transformers' default is 0.1
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    settings=(*MISTRAL.settings[:-1], Windows(4096, listed=True)),
)
GPT1 = Family(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    "transformer.",
    {"hidden_dim": times_dim(4)} | OWN_KV_HEADS | LAYER_NORM | PLAIN | LEARNED | ALL_BIASES | block("PostNorm"),
    (
        *gpt_sizes(40478, 768, 12, 12, 512),
        Value("layer_norm_epsilon", "norm.eps", 1e-5),
        NO_DROPOUT,
        Choice("afn", "gelu", ACTIVATIONS | {"gelu": GELU_TANH}),  # they mean the tanh approximation
        TIED,
    ),
    {
        "embedding.tokens.weight": "transformer.tokens_embed.weight",
        "position.table.weight": "transformer.positions_embed.weight",
        QUERY_KEY_VALUE: ("transformer.h.#.attn.c_attn.*", QKV_CONV1D),
        "blocks.#.attention.output.*": ("transformer.h.#.attn.c_proj.*", CONV1D),
        "blocks.#.attention_norm.*": "transformer.h.#.ln_1.*",
        "blocks.#.ffn.up.*": ("transformer.h.#.mlp.c_fc.*", CONV1D),
        "blocks.#.ffn.down.*": ("transformer.h.#.mlp.c_proj.*", CONV1D),
        "blocks.#.ffn_norm.*": "transformer.h.#.ln_2.*",
        **HEAD,
    },
)
GPT_BLOCK: Settings = {**OWN_KV_HEADS, **LAYER_NORM, **PLAIN, **LEARNED, **ALL_BIASES, **block("PreNorm")}
GPT_SETTINGS: tuple[Setting, ...] = (
    *gpt_sizes(50257, 768, 12, 12, 1024),
    Value("n_inner", "hidden_dim", times_dim(4)),
    Value("layer_norm_epsilon", "norm.eps", 1e-5),
    Fixed("add_cross_attention", False),
    NO_DROPOUT,
    TIED,
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    GPT_BLOCK,
    (
        *GPT_SETTINGS,
        Choice("activation_function", "gelu_new", ACTIVATIONS),
        ScaleByLayer(),
    ),
    {
        "embedding.tokens.weight": "transformer.wte.weight",
        "position.table.weight": "transformer.wpe.weight",
        "blocks.#.attention_norm.*": "transformer.h.#.ln_1.*",
        QUERY_KEY_VALUE: ("transformer.h.#.attn.c_attn.*", QKV_CONV1D),
        "blocks.#.attention.output.*": ("transformer.h.#.attn.c_proj.*", CONV1D),
        "blocks.#.ffn_norm.*": "transformer.h.#.ln_2.*",
        "blocks.#.ffn.up.*": ("transformer.h.#.mlp.c_fc.*", CONV1D),
        "blocks.#.ffn.down.*": ("transformer.h.#.mlp.c_proj.*", CONV1D),
        "norm.*": "transformer.ln_f.*",
        **HEAD,
    },
)
GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    "transformer.",
    {
        **OWN_KV_HEADS,
        **LAYER_NORM,
        **PLAIN,
        **LEARNED,
        **dict.fromkeys(("attention.output_bias", *FFN_BIASES), True),
        **block("PreNorm"),
        "attention.scale": 1.0,
    },
    (
        Value("vocab_size", "vocab_size", 50257),
        Value("hidden_size", "dim", 2048),
        Value("num_layers|num_hidden_layers", "n_layers", 24),
        Value("num_heads|num_attention_heads", "n_heads", 16),
        Value("max_position_embeddings", "max_seq_len", 2048),
        Value("intermediate_size", "hidden_dim", times_dim(4)),
        Value("layer_norm_epsilon", "norm.eps", 1e-5),
        Choice("activation_function", "gelu_new", ACTIVATIONS),
        GlobalAndLocal(),
        TIED,
    ),
    {
        "embedding.tokens.weight": "transformer.wte.weight",
        "position.table.weight": "transformer.wpe.weight",
        "blocks.#.attention_norm.*": "transformer.h.#.ln_1.*",
        "blocks.#.attention.query.*": "transformer.h.#.attn.attention.q_proj.*",
        "blocks.#.attention.key.*": "transformer.h.#.attn.attention.k_proj.*",
        "blocks.#.attention.value.*": "transformer.h.#.attn.attention.v_proj.*",
        "blocks.#.attention.output.*": "transformer.h.#.attn.attention.out_proj.*",
        "blocks.#.ffn_norm.*": "transformer.h.#.ln_2.*",
        "blocks.#.ffn.up.*": "transformer.h.#.mlp.c_fc.*",
        "blocks.#.ffn.down.*": "transformer.h.#.mlp.c_proj.*",
        "norm.*": "transformer.ln_f.*",
        **HEAD,
    },
)
GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    "transformer.",
    {key: value for key, value in GPT_BLOCK.items() if key != "n_kv_heads"},
    (
        *GPT_SETTINGS,
        Choice("activation_function", "gelu_pytorch_tanh", ACTIVATIONS),
        Choice("scale_attn_weights", True, {True: {"attention.scale": None}, False: {"attention.scale": 1.0}}),
        MultiQuery(),
    ),
    {
        "embedding.tokens.weight": "transformer.wte.weight",
        "position.table.weight": "transformer.wpe.weight",
        "blocks.#.attention_norm.*": "transformer.h.#.ln_1.*",
        QUERY_KEY_VALUE: ("transformer.h.#.attn.c_attn.*", QKV_GROUPS),
        "blocks.#.attention.output.*": "transformer.h.#.attn.c_proj.*",
        "blocks.#.ffn_norm.*": "transformer.h.#.ln_2.*",
        "blocks.#.ffn.up.*": "transformer.h.#.mlp.c_fc.*",
        "blocks.#.ffn.down.*": "transformer.h.#.mlp.c_proj.*",
        "norm.*": "transformer.ln_f.*",
        **HEAD,
    },
)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    "model.",
    {**OWN_KV_HEADS, **LAYER_NORM, "norm.eps": 1e-5, **PLAIN, **LEARNED},
    (
        *sizes(50272, 768, 12, 12, 2048),
        Value("ffn_dim", "hidden_dim", 3072),
        Choice("activation_function", "relu", ACTIVATIONS),
        Choice("do_layer_norm_before", True, {True: block("PreNorm"), False: block("PostNorm")}),
        Value("enable_bias", (*ATTENTION_BIASES, *FFN_BIASES), True),
        Fixed("_remove_final_layer_norm", False),
        Fixed("layer_norm_elementwise_affine", True),
        Fixed("word_embed_proj_dim", like("dim")),
        Unread(("dropout",), written=0.0),
        TIED,
    ),
    {
        "embedding.tokens.weight": "model.decoder.embed_tokens.weight",
        "position.table.weight": ("model.decoder.embed_positions.weight", AFTER_PADDING),
        "blocks.#.attention_norm.*": "model.decoder.layers.#.self_attn_layer_norm.*",
        "blocks.#.attention.query.*": "model.decoder.layers.#.self_attn.q_proj.*",
        "blocks.#.attention.key.*": "model.decoder.layers.#.self_attn.k_proj.*",
        "blocks.#.attention.value.*": "model.decoder.layers.#.self_attn.v_proj.*",
        "blocks.#.attention.output.*": "model.decoder.layers.#.self_attn.out_proj.*",
        "blocks.#.ffn_norm.*": "model.decoder.layers.#.final_layer_norm.*",
        "blocks.#.ffn.up.*": "model.decoder.layers.#.fc1.*",
        "blocks.#.ffn.down.*": "model.decoder.layers.#.fc2.*",
        "norm.*": "model.decoder.final_layer_norm.*",
        **HEAD,
    },
)
CTRL = Family(
    "ctrl",
    "CTRLLMHeadModel",
    "transformer.",
    {
        **OWN_KV_HEADS,
        **LAYER_NORM,
        "norm.eps": 1e-6,
        **PLAIN,
        **ACTIVATIONS["relu"],
        **ALL_BIASES,
        **block("PreNorm"),
        "position._target_": f"{MODEL}.position.Sinusoidal",
        "position.theta": 10000.0,
        "position.interleaved": False,
        "position.amplitude": 1.0,
        "position.offset": 0,
        "embedding.scale": root_of_dim,
        "embedding.head_bias": True,
    },
    (
        *gpt_sizes(246534, 1280, 48, 16, 256),
        Value("dff", "hidden_dim", 8192),
        Fixed("layer_norm_epsilon", 1e-6),
        NO_DROPOUT,
        TIED,
    ),
    {
        "embedding.tokens.weight": "transformer.w.weight",
        "blocks.#.attention_norm.*": "transformer.h.#.layernorm1.*",
        "blocks.#.attention.query.*": "transformer.h.#.multi_head_attention.Wq.*",
        "blocks.#.attention.key.*": "transformer.h.#.multi_head_attention.Wk.*",
        "blocks.#.attention.value.*": "transformer.h.#.multi_head_attention.Wv.*",
        "blocks.#.attention.output.*": "transformer.h.#.multi_head_attention.dense.*",
        "blocks.#.ffn_norm.*": "transformer.h.#.layernorm2.*",
        "blocks.#.ffn.up.*": "transformer.h.#.ffn.0.*",
        "blocks.#.ffn.down.*": "transformer.h.#.ffn.2.*",
        "norm.*": "transformer.layernorm.*",
        **HEAD,
    },
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    {**OWN_KV_HEADS, **LAYER_NORM, **PLAIN, **dict.fromkeys(FFN_BIASES, True)},
    (
        *sizes(50432, 6144, 44, 64, 2048),
        Value("intermediate_size", "hidden_dim", 24576),
        Value("layer_norm_eps", "norm.eps", 1e-5),
        Choice("hidden_act", "gelu", ACTIVATIONS),
        Choice("use_parallel_residual", True, {True: block("Parallel"), False: block("PreNorm")}),
        Value("attention_bias", ATTENTION_BIASES, True),
        RotaryPosition(fraction=0.25, older=("rotary_emb_base", "rotary_pct")),
        UNTIED,
    ),
    {
        "embedding.tokens.weight": "gpt_neox.embed_in.weight",
        "blocks.#.attention_norm.*": "gpt_neox.layers.#.input_layernorm.*",
        QUERY_KEY_VALUE: ("gpt_neox.layers.#.attention.query_key_value.*", QKV_GROUPS),
        "blocks.#.attention.output.*": "gpt_neox.layers.#.attention.dense.*",
        "blocks.#.ffn_norm.*": "gpt_neox.layers.#.post_attention_layernorm.*",
        "blocks.#.ffn.up.*": "gpt_neox.layers.#.mlp.dense_h_to_4h.*",
        "blocks.#.ffn.down.*": "gpt_neox.layers.#.mlp.dense_4h_to_h.*",
        "norm.*": "gpt_neox.final_layer_norm.*",
        "embedding.head.*": "embed_out.*",
    },
    renamed={r"^lm_head\.": "embed_out."},
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    "transformer.",
    {
        "hidden_dim": times_dim(4),
        **OWN_KV_HEADS,
        **LAYER_NORM,
        **PLAIN,
        **GELU_TANH,
        **ALL_BIASES,
        **ALIBI,
        **block("PreNorm"),
        "embedding.norm_input": True,
    },
    (
        Value("vocab_size", "vocab_size", 250880),
        Value("hidden_size|n_embed", "dim", 64),
        Value("n_layer|num_hidden_layers", "n_layers", 2),
        Value("n_head|num_attention_heads", "n_heads", 8),
        Value("seq_length", "max_seq_len", 2048),  # which transformers does not read: ALiBi has no limit
        Value("layer_norm_epsilon", "norm.eps", 1e-5),
        Fixed("apply_residual_connection_post_layernorm", False),
        TIED,
    ),
    {
        "embedding.tokens.weight": "transformer.word_embeddings.weight",
        "embedding.norm.*": "transformer.word_embeddings_layernorm.*",
        "blocks.#.attention_norm.*": "transformer.h.#.input_layernorm.*",
        QUERY_KEY_VALUE: ("transformer.h.#.self_attention.query_key_value.*", QKV_GROUPS),
        "blocks.#.attention.output.*": "transformer.h.#.self_attention.dense.*",
        "blocks.#.ffn_norm.*": "transformer.h.#.post_attention_layernorm.*",
        "blocks.#.ffn.up.*": "transformer.h.#.mlp.dense_h_to_4h.*",
        "blocks.#.ffn.down.*": "transformer.h.#.mlp.dense_4h_to_h.*",
        "norm.*": "transformer.ln_f.*",
        **HEAD,
    },
)
FALCON_SETTINGS: tuple[Setting, ...] = (
    Value("vocab_size", "vocab_size", 65024),
    Value("hidden_size", "dim", 4544),
    Value("num_hidden_layers", "n_layers", 32),
    Value("num_attention_heads", "n_heads", 71),
    Value("max_position_embeddings", "max_seq_len", 2048),
    Value("ffn_hidden_size", "hidden_dim", times_dim(4)),
    Value("layer_norm_epsilon", "norm.eps", 1e-5),
    Value("bias", (*ATTENTION_BIASES, *FFN_BIASES), False),
    Choice("activation", "gelu", ACTIVATIONS),
    RotaryOrAlibi(),
    Unread(("apply_residual_connection_post_layernorm", "ff_factor")),
    TIED,
)
FALCON_PRECISION = 0.05  # since it rounds the biases of ALiBi to bfloat16
FALCON_WEIGHTS: Weights = {
    "embedding.tokens.weight": "transformer.word_embeddings.weight",
    QUERY_KEY_VALUE: ("transformer.h.#.self_attention.query_key_value.*", QKV_GROUPS),
    "blocks.#.attention.output.*": "transformer.h.#.self_attention.dense.*",
    "blocks.#.ffn.up.*": "transformer.h.#.mlp.dense_h_to_4h.*",
    "blocks.#.ffn.down.*": "transformer.h.#.mlp.dense_4h_to_h.*",
    "norm.*": "transformer.ln_f.*",
    **HEAD,
}
FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    "transformer.",
    {"head_dim": head_width, **LAYER_NORM, **PLAIN},
    (
        *FALCON_SETTINGS,
        Fixed("new_decoder_architecture", False),
        Unread(("num_ln_in_parallel_attn",)),
        Choice("parallel_attn", True, {True: block("ParallelSharedNorm"), False: block("PreNorm")}),
        MultiQuery(),
    ),
    {
        **FALCON_WEIGHTS,
        "blocks.#.attention_norm.*": "transformer.h.#.input_layernorm.*",
        "blocks.#.ffn_norm.*": "transformer.h.#.post_attention_layernorm.*",
    },
    precision=FALCON_PRECISION,
)


def has_two_norms(ours: Settings) -> bool:
    """Whether attention and feed-forward, side by side, have a norm each."""
    return block("Parallel").items() <= ours.items()


FALCON_40B = Family(
    "falcon",
    "FalconForCausalLM",
    "transformer.",
    {"head_dim": head_width, **LAYER_NORM, **PLAIN},
    (
        *FALCON_SETTINGS,
        Fixed("new_decoder_architecture", True),
        Choice(
            "num_ln_in_parallel_attn", 2, dict.fromkeys((2, None), block("Parallel")) | {1: block("ParallelSharedNorm")}
        ),
        Unread(("parallel_attn", "multi_query")),
        Value("num_kv_heads", "n_kv_heads", like("n_heads")),
    ),
    {
        **FALCON_WEIGHTS,
        "blocks.#.attention_norm.*": lambda ours: (
            f"transformer.h.#.{'ln_attn' if has_two_norms(ours) else 'input_layernorm'}.*"
        ),
        "blocks.#.ffn_norm.*": "transformer.h.#.ln_mlp.*",
    },
    variant={"new_decoder_architecture": True},
    precision=FALCON_PRECISION,
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "model.",
    {"head_dim": head_width, **RMS_NORM, **GATED, **block("Reordered"), "attention.qk_norm": "projection"},
    llama_settings(sizes(50304, 4096, 32, 32, 2048), 11008, 1e-5, RotaryPosition(), UNTIED, ATTENTION_BIAS),
    {
        **LLAMA_ENDS,
        **LLAMA_ATTENTION,
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_norm.*",
        "blocks.#.attention.key_norm.*": "model.layers.#.self_attn.k_norm.*",
        "blocks.#.attention_norm.*": "model.layers.#.post_attention_layernorm.*",
        **LLAMA_FFN,
        "blocks.#.ffn_norm.*": "model.layers.#.post_feedforward_layernorm.*",
        "norm.*": "model.norm.*",
    },
)
OLMO3_WINDOWS = Windows(4096, every=4)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    settings=llama_settings(
        sizes(50304, 4096, 32, 32, 2048),
        11008,
        1e-5,
        OLMO3_WINDOWS,
        RotaryByKind(OLMO3_WINDOWS, full=500_000.0, sliding=500_000.0),
        UNTIED,
        ATTENTION_BIAS,
    ),
)
EXAONE4_WINDOWS = Windows(4096, every=4, nullable=True, pattern="sliding_window_pattern")


def slides(config: Settings, ours: Settings) -> list[bool]:
    """Whether each layer of Exaone 4 turns: those with windows, or all if there are none."""
    has_windows = config.get("sliding_window", EXAONE4_WINDOWS.default) is not None
    return [not has_windows or kind == SLIDING for kind in EXAONE4_WINDOWS.kinds(config, ours)]


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    "model.",
    {**RMS_NORM, **GATED, **block("Reordered"), "attention.qk_norm": "head"},
    llama_settings(
        sizes(102400, 4096, 32, 32, 2048),
        16384,
        1e-5,
        EXAONE4_WINDOWS,
        SomeRotary(RotaryPosition(), slides),
        HEAD_DIM,
        UNTIED,
    ),
    OLMO2.weights,
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    "model.",
    {"head_dim": head_width, **ROTATED_GATED},
    llama_settings(
        sizes(128256, 2048, 36, 16, 32768),
        11008,
        1e-6,
        SomeRotary(
            RotaryPosition(2_000_000.0),
            lambda config, ours: [
                bool(turns)
                for turns in config.get("no_rope_layers")
                or [(i + 1) % config.get("no_rope_layer_interval", 4) for i in range(ours["n_layers"])]
            ][: ours["n_layers"]],
            listed=("no_rope_layers", "no_rope_layer_interval"),
        ),
        TIED,
        ATTENTION_BIAS,
        MLP_BIAS,
        Fixed("use_sliding_window", False),
        Windows(None, every=1, nullable=True),
        n_kv_heads=4,
    ),
    LLAMA_WEIGHTS,
)
GEMMA_SETTINGS: tuple[Setting, ...] = (
    Value("head_dim", "head_dim", 256),
    Value("rms_norm_eps", "norm.eps", 1e-6),
    Fixed("use_bidirectional_attention", False),
    ATTENTION_BIAS,
    TIED,
)
GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    "model.",
    {**GEMMA_NORM, **GATED, **block("PreNorm"), "embedding.scale": root_of_dim},
    (
        *sizes(256000, 3072, 28, 16, 8192),
        Value("intermediate_size", "hidden_dim", 24576),
        KV_HEADS,
        Choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS | {"gelu": GELU_TANH}),  # which older files mean
        Unread(("hidden_activation",)),
        RotaryPosition(),
        *GEMMA_SETTINGS,
    ),
    LLAMA_WEIGHTS,
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    "model.",
    {**GEMMA_NORM, **GATED, **block("Sandwich"), "embedding.scale": root_of_dim},
    (
        *sizes(256000, 2304, 26, 8, 8192),
        Value("intermediate_size", "hidden_dim", 9216),
        Value("num_key_value_heads", "n_kv_heads", 4),
        Choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        Unread(("hidden_act",)),
        RotaryPosition(),
        *GEMMA_SETTINGS,
        ScoreScale("query_pre_attn_scalar", 256, of_width=True),
        Value("attn_logit_softcapping", "attention.softcap", 50.0, nullable=True),
        Value("final_logit_softcapping", "embedding.logit_softcap", 30.0, nullable=True),
        Windows(4096, every=2),
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_ATTENTION,
        **LLAMA_FFN,
        "blocks.#.attention_norm.*": "model.layers.#.input_layernorm.*",
        "blocks.#.attention_post_norm.*": "model.layers.#.post_attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.pre_feedforward_layernorm.*",
        "blocks.#.ffn_post_norm.*": "model.layers.#.post_feedforward_layernorm.*",
        "norm.*": "model.norm.*",
    },
)
GEMMA3_WINDOWS = Windows(4096, every=6, pattern="sliding_window_pattern")
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "model.",
    GEMMA2.recipe | {"attention.qk_norm": "head"},
    (
        *sizes(262208, 2304, 26, 8, 131072),
        Value("intermediate_size", "hidden_dim", 9216),
        Value("num_key_value_heads", "n_kv_heads", 4),
        Choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        GEMMA3_WINDOWS,
        RotaryByKind(GEMMA3_WINDOWS, full=1_000_000.0, sliding=10_000.0, local="rope_local_base_freq"),
        *GEMMA_SETTINGS,
        ScoreScale("query_pre_attn_scalar", 256, of_width=True),
        Value("final_logit_softcapping", "embedding.logit_softcap", None, nullable=True),
        Unread(("_sliding_window_pattern",)),
    ),
    {
        **GEMMA2.weights,
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_norm.*",
        "blocks.#.attention.key_norm.*": "model.layers.#.self_attn.k_norm.*",
    },
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "model.",
    {"head_dim": head_width, **ROTATED_GATED, **dict.fromkeys(QKV_BIASES, True)},
    llama_settings(
        sizes(151936, 4096, 32, 32, 32768),
        22016,
        1e-6,
        RotaryPosition(),
        UNTIED,
        Windows(4096, gated=True),
        Unread(("use_mrope",)),
    ),
    LLAMA_WEIGHTS,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "model.",
    {**ROTATED_GATED, "attention.qk_norm": "head"},
    llama_settings(
        sizes(151936, 4096, 32, 32, 32768),
        22016,
        1e-6,
        RotaryPosition(),
        Value("head_dim", "head_dim", 128),
        UNTIED,
        ATTENTION_BIAS,
        Windows(4096, gated=True),
    ),
    {
        **LLAMA_WEIGHTS,
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_norm.*",
        "blocks.#.attention.key_norm.*": "model.layers.#.self_attn.k_norm.*",
    },
)
STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    "model.",
    {"head_dim": head_width, **LAYER_NORM, **GATED},
    (
        *sizes(50304, 2560, 32, 32, 4096),
        Value("intermediate_size", "hidden_dim", 6912),
        KV_HEADS,
        Value("layer_norm_eps", "norm.eps", 1e-5),
        Choice("hidden_act", "silu", ACTIVATIONS),
        Choice("use_parallel_residual", False, {False: block("PreNorm"), True: block("ParallelSharedNorm")}),
        Value("use_qkv_bias", QKV_BIASES, False),
        Choice("qk_layernorm", False, QK_NORM_PER_HEAD | {True: QK_NORM_PER_HEAD[True] | {"attention.qk_bias": False}}),
        RotaryPosition(fraction=0.25),
        UNTIED,
    ),
    {
        **LLAMA_WEIGHTS,
        "blocks.#.attention.query_norm.weight": "model.layers.#.self_attn.q_layernorm.norms.%.weight",
        "blocks.#.attention.key_norm.weight": "model.layers.#.self_attn.k_layernorm.norms.%.weight",
    },
)
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    "model.",
    {"head_dim": head_width, **LAYER_NORM, **PLAIN, **block("PreNorm")},
    (
        *sizes(49152, 3072, 30, 24, 4096),
        Value("intermediate_size", "hidden_dim", 12288),
        Value("num_key_value_heads", "n_kv_heads", 2),
        Value("norm_epsilon", "norm.eps", 1e-5),
        Choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        Value("use_bias", (*ATTENTION_BIASES, *FFN_BIASES), True),
        Unread(("mlp_type", "norm_type")),
        RotaryPosition(),
        Windows(None),
        TIED,
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_NORMS,
        **LLAMA_ATTENTION,
        "blocks.#.ffn.up.*": "model.layers.#.mlp.c_fc.*",
        "blocks.#.ffn.down.*": "model.layers.#.mlp.c_proj.*",
    },
)
PHI = Family(
    "phi",
    "PhiForCausalLM",
    "model.",
    {
        "head_dim": head_width,
        **LAYER_NORM,
        **PLAIN,
        **ALL_BIASES,
        **block("ParallelSharedNorm"),
        "embedding.head_bias": True,
    },
    (
        *sizes(51200, 2048, 24, 32, 2048),
        Value("intermediate_size", "hidden_dim", times_dim(4)),
        KV_HEADS,
        Value("layer_norm_eps", "norm.eps", 1e-5),
        Choice("hidden_act", "gelu_new", ACTIVATIONS),
        Choice("qk_layernorm", False, {False: {"attention.qk_norm": None}, True: {"attention.qk_norm": "head"}}),
        RotaryPosition(fraction=0.5),
        UNTIED,
    ),
    {
        **LLAMA_ENDS,
        "blocks.#.attention_norm.*": "model.layers.#.input_layernorm.*",
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_layernorm.*",
        "blocks.#.attention.key_norm.*": "model.layers.#.self_attn.k_layernorm.*",
        "blocks.#.attention.query.*": "model.layers.#.self_attn.q_proj.*",
        "blocks.#.attention.key.*": "model.layers.#.self_attn.k_proj.*",
        "blocks.#.attention.value.*": "model.layers.#.self_attn.v_proj.*",
        "blocks.#.attention.output.*": "model.layers.#.self_attn.dense.*",
        "blocks.#.ffn.up.*": "model.layers.#.mlp.fc1.*",
        "blocks.#.ffn.down.*": "model.layers.#.mlp.fc2.*",
        "norm.*": "model.final_layernorm.*",
    },
)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    "model.",
    {"head_dim": head_width, **ROTATED_GATED},
    llama_settings(
        sizes(32064, 3072, 32, 32, 4096),
        8192,
        1e-5,
        RotaryPosition(fraction=1.0, kinds=PHI3_KINDS, original=4096),
        UNTIED,
        Windows(None),
        Unread(("attention_bias", "lm_head_bias", "full_attn_mod", "interpolate_factor")),
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_NORMS,
        QUERY_KEY_VALUE: ("model.layers.#.self_attn.qkv_proj.*", QKV),
        "blocks.#.attention.output.*": "model.layers.#.self_attn.o_proj.*",
        ("blocks.#.ffn.gate.*", "blocks.#.ffn.up.*"): ("model.layers.#.mlp.gate_up_proj.*", GATE_UP),
        "blocks.#.ffn.down.*": "model.layers.#.mlp.down_proj.*",
    },
)
GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    "transformer.",
    {
        **OWN_KV_HEADS,
        **LAYER_NORM,
        **PLAIN,
        **dict.fromkeys(FFN_BIASES, True),
        **block("ParallelSharedNorm"),
        "embedding.head_bias": True,
    },
    (
        *gpt_sizes(50400, 4096, 28, 16, 2048),
        Value("n_inner", "hidden_dim", times_dim(4)),
        Value("layer_norm_epsilon", "norm.eps", 1e-5),
        Choice("activation_function", "gelu_new", ACTIVATIONS),
        RotaryDim(64),
        Unread(("rotary", "scale_attn_weights")),
        UNTIED,
    ),
    {
        "embedding.tokens.weight": "transformer.wte.weight",
        "blocks.#.attention_norm.*": "transformer.h.#.ln_1.*",
        "blocks.#.attention.query.*": "transformer.h.#.attn.q_proj.*",
        "blocks.#.attention.key.*": "transformer.h.#.attn.k_proj.*",
        "blocks.#.attention.value.*": "transformer.h.#.attn.v_proj.*",
        "blocks.#.attention.output.*": "transformer.h.#.attn.out_proj.*",
        "blocks.#.ffn.up.*": "transformer.h.#.mlp.fc_in.*",
        "blocks.#.ffn.down.*": "transformer.h.#.mlp.fc_out.*",
        "norm.*": "transformer.ln_f.*",
        **HEAD,
    },
)
MPT = Family(
    "mpt",
    "MptForCausalLM",
    "transformer.",
    {
        "hidden_dim": times_dim(4),
        **OWN_KV_HEADS,
        **LAYER_NORM,
        "norm.bias": False,
        **PLAIN,
        **GELU,
        **ALIBI,
        **block("PreNorm"),
    },
    (
        Value("vocab_size", "vocab_size", 50368),
        Value("d_model|hidden_size", "dim", 2048),
        Value("n_layers|num_hidden_layers", "n_layers", 24),
        Value("n_heads|num_attention_heads", "n_heads", 16),
        Value("max_seq_len", "max_seq_len", 2048),
        Value("layer_norm_epsilon", "norm.eps", 1e-5),
        Fixed("expansion_ratio", 4),
        Fixed("no_bias", True),
        Fixed("logit_scale", None),
        Fixed("attn_config.alibi", True),
        Fixed("attn_config.alibi_bias_max", 8),  # which transformers does not read
        Fixed("attn_config.attn_type", "multihead_attention"),
        Value("attn_config.clip_qkv", "attention.clip_qkv", None),
        Fixed("attn_config.prefix_lm", False),
        Fixed("attn_config.qk_ln", False),
        ScoreScale("attn_config.softmax_scale"),
        Unread(("learned_pos_emb", "embedding_fraction", "norm_type", "verbose", "init_config")),
        TIED,
    ),
    {
        "embedding.tokens.weight": "transformer.wte.weight",
        "blocks.#.attention_norm.*": "transformer.blocks.#.norm_1.*",
        QUERY_KEY_VALUE: ("transformer.blocks.#.attn.Wqkv.*", QKV),
        "blocks.#.attention.output.*": "transformer.blocks.#.attn.out_proj.*",
        "blocks.#.ffn_norm.*": "transformer.blocks.#.norm_2.*",
        "blocks.#.ffn.up.*": "transformer.blocks.#.ffn.up_proj.*",
        "blocks.#.ffn.down.*": "transformer.blocks.#.ffn.down_proj.*",
        "norm.*": "transformer.norm_f.*",
        **HEAD,
    },
)
GLM = Family(
    "glm",
    "GlmForCausalLM",
    "model.",
    ROTATED_GATED,
    llama_settings(
        sizes(151552, 4096, 40, 32, 131072),
        13696,
        1.5625e-07,
        RotaryPosition(fraction=0.5, interleaved=True),
        Value("head_dim", "head_dim", 128),
        UNTIED,
        Value("attention_bias", QKV_BIASES, True),
        n_kv_heads=2,
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_NORMS,
        **LLAMA_ATTENTION,
        ("blocks.#.ffn.gate.*", "blocks.#.ffn.up.*"): ("model.layers.#.mlp.gate_up_proj.*", GATE_UP),
        "blocks.#.ffn.down.*": "model.layers.#.mlp.down_proj.*",
    },
)
GRANITE_SCALARS = (
    Value("embedding_multiplier", "embedding.scale", 1.0),
    Value("residual_multiplier", "block.residual_scale", 1.0),
    Reciprocal("logits_scaling", "embedding.logit_scale"),
    ScoreScale("attention_multiplier", 1.0),
)
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    "model.",
    {"head_dim": head_width, **ROTATED_GATED},
    llama_settings(
        sizes(32000, 4096, 32, 32, 2048),
        11008,
        1e-6,
        RotaryPosition(),
        UNTIED,
        ATTENTION_BIAS,
        MLP_BIAS,
        *GRANITE_SCALARS,
    ),
    LLAMA_WEIGHTS,
)
GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    recipe={**GRANITE.recipe, "attention.sinks": True},
    settings=llama_settings(
        sizes(100352, 2560, 24, 20, 8192),
        8192,
        1e-5,
        Windows(128, every=4, leading=True),
        RotaryByLayer(),
        TIED,
        ATTENTION_BIAS,
        MLP_BIAS,
        *GRANITE_SCALARS,
        n_kv_heads=4,
    ),
    weights={**LLAMA_WEIGHTS, "blocks.#.attention.sinks.logits": "model.layers.#.self_attn.sinks"},
)
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    "model.",
    {**LAYER_NORM, "norm.unit_offset": True, **PLAIN, **block("PreNorm")},
    (
        *sizes(256000, 6144, 32, 48, 4096),
        Value("intermediate_size", "hidden_dim", 24576),
        KV_HEADS,
        HEAD_DIM,
        Value("norm_eps", "norm.eps", 1e-5),
        Choice("hidden_act", "relu2", ACTIVATIONS),
        RotaryPosition(fraction=0.5),
        UNTIED,
        ATTENTION_BIAS,
        Value("mlp_bias", FFN_BIASES, False),
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_ATTENTION,
        **LLAMA_NORMS,
        "blocks.#.ffn.up.*": "model.layers.#.mlp.up_proj.*",
        "blocks.#.ffn.down.*": "model.layers.#.mlp.down_proj.*",
    },
)
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    "model.",
    {
        "head_dim": head_width,
        **LAYER_NORM,
        **dict.fromkeys(("norm.bias", "norm.gain"), False),
        "norm.eps": 1e-5,
        **GATED,
        **block("PreNorm"),
    },
    (
        *sizes(50304, 4096, 32, 32, 2048),
        Value("intermediate_size", "hidden_dim", 11008),
        KV_HEADS,
        Choice("hidden_act", "silu", ACTIVATIONS),
        RotaryPosition(),
        UNTIED,
        ATTENTION_BIAS,
        Value("clip_qkv", "attention.clip_qkv", None),
    ),
    {**LLAMA_ENDS, **LLAMA_ATTENTION, **LLAMA_FFN},
)
COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    "model.",
    {"head_dim": head_width, **LAYER_NORM, "norm.bias": False, **GATED, **block("ParallelSharedNorm")},
    (
        *sizes(256000, 8192, 40, 64, 8192),
        Value("intermediate_size", "hidden_dim", 22528),
        KV_HEADS,
        Choice("hidden_act", "silu", ACTIVATIONS),
        Value("layer_norm_eps", "norm.eps", 1e-5),
        Value("logit_scale", "embedding.logit_scale", 0.0625),
        Choice("use_qk_norm", False, QK_NORM_PER_HEAD),
        RotaryPosition(theta=500000.0, interleaved=True),
        TIED,
        ATTENTION_BIAS,
        Unread(("model_max_length",)),
    ),
    {
        **LLAMA_WEIGHTS,
        "blocks.#.attention.query_norm.weight": ("model.layers.#.self_attn.q_norm.weight", ROW_PER_HEAD),
        "blocks.#.attention.key_norm.weight": ("model.layers.#.self_attn.k_norm.weight", ROW_PER_HEAD),
    },
)
COHERE2_WINDOWS = Windows(4096, every=4, pattern="sliding_window_pattern")
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    settings=(
        *(setting for setting in COHERE.settings if not {"use_qk_norm", "rope_theta"} & {*setting.names}),
        COHERE2_WINDOWS,
        SomeRotary(RotaryPosition(interleaved=True), sliding(COHERE2_WINDOWS)),
        Unread(("layer_switch", "order_of_interleaved_layers", "position_embedding_type")),
        Unread(("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding")),
    ),
    weights=LLAMA_WEIGHTS,
)
LLAMA3_SCALING = (("rope_type", "llama3"), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0), (ORIGINAL, 8192))
CWM = Family(
    "cwm",
    "CwmForCausalLM",
    "model.",
    ROTATED_GATED,
    llama_settings(
        sizes(128256, 6144, 64, 48, 131072),
        21504,
        1e-5,
        RotaryPosition(1_000_000.0, absent=(*LLAMA3_SCALING, ("factor", 16.0))),
        Value("head_dim", "head_dim", 128),
        UNTIED,
        MLP_BIAS,
        Unread(("attention_bias",)),
        Windows(8192, every=4, leading=True),
        n_kv_heads=8,
    ),
    LLAMA_WEIGHTS,
)
EXPERTS = Unread(  # of layers that are all dense
    (
        *("num_experts", "n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "moe_layer_freq", "n_group", "topk_group", "topk_method", "norm_topk_prob"),
        *("decoder_sparse_step", "shared_expert_intermediate_size", "num_shared_experts", "route_scale"),
        *("routed_scaling_factor", "scoring_func", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "ep_size"),
    )
)


def query_of_latent(ours: Settings) -> str:
    """Their name of the first or only map to the queries."""
    return f"model.layers.#.self_attn.{'q_proj' if ours.get('attention.query_rank') is None else 'q_a_proj'}.*"


def latent_settings(
    sizes: tuple[Setting, ...],
    hidden_dim: int,
    *others: Setting,
    rms_norm_eps: float = 1e-6,
    widths: tuple[int, int, int, int, int | Derived] = (512, 1536, 128, 64, 128),
) -> tuple[Setting, ...]:
    """The settings of models with latent attention, with the defaults of a family; the widths in the order below."""
    kv_rank, query_rank, nope_dim, rotary_dim, value_dim = widths
    return (
        *sizes,
        Value("intermediate_size", "hidden_dim", hidden_dim),
        Choice("hidden_act", "silu", ACTIVATIONS),
        Value("kv_lora_rank", "attention.kv_rank", kv_rank),
        Value("q_lora_rank", "attention.query_rank", query_rank, nullable=True),
        Value("qk_nope_head_dim", "attention.nope_dim", nope_dim),
        Value("qk_rope_head_dim", "head_dim", rotary_dim),
        Value("v_head_dim", "attention.value_dim", value_dim),
        Fixed("num_key_value_heads", like("n_heads")),
        Value("rms_norm_eps", "norm.eps", rms_norm_eps),
        Fixed("attention_bias", False),
        Unread(("head_dim", "qk_head_dim")),
        *others,
    )


LATENT: Settings = {
    "attention._target_": f"{MODEL}.latent_attention.LatentAttention",
    "attention.latent_eps": 1e-6,  # in any case
    "attention.temperature": None,
}
ROTARY_WIDTH = Fixed("head_dim", like("head_dim"))  # of classes that rotate as many dimensions as it says
INTERLEAVED = Choice(
    "rope_interleave", True, {True: {"position.interleaved": True}, False: {"position.interleaved": False}}
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "model.",
    {"n_kv_heads": like("n_heads"), **ROTATED_GATED},
    latent_settings(
        sizes(129280, 7168, 61, 128, 4096),
        18432,
        LatentRotary(),
        INTERLEAVED,
        ROTARY_WIDTH,
        UNTIED,
        DenseLayers("first_k_dense_replace", 3),
        EXPERTS,
        Unread(("num_mtp_layers", "num_nextn_predict_layers")),  # which predict more tokens, beside the model
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_NORMS,
        "blocks.#.attention.query.*": query_of_latent,
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_a_layernorm.*",
        "blocks.#.attention.query_up.*": "model.layers.#.self_attn.q_b_proj.*",
        "blocks.#.attention.latent.*": "model.layers.#.self_attn.kv_a_proj_with_mqa.*",
        "blocks.#.attention.latent_norm.*": "model.layers.#.self_attn.kv_a_layernorm.*",
        "blocks.#.attention.latent_up.*": "model.layers.#.self_attn.kv_b_proj.*",
        "blocks.#.attention.output.*": "model.layers.#.self_attn.o_proj.*",
        **LLAMA_FFN,
    },
    attention=LATENT,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    settings=latent_settings(
        sizes(102400, 4096, 32, 32, 2048),
        11008,
        LatentRotary(interleaved=True),
        UNTIED,
        DenseLayers("first_k_dense_replace", 0),
        EXPERTS,
        MLP_BIAS,
    ),
)
YOUTU = replace(
    DEEPSEEK_V3,
    model_type="youtu",
    architecture="YoutuForCausalLM",
    settings=latent_settings(
        sizes(128256, 2048, 32, 16, 131072),
        6144,
        LatentRotary(),
        INTERLEAVED,
        ROTARY_WIDTH,
        TIED,
        Unread(("embedding_initializer_range",)),
    ),
)


def split_gate(tensor: Tensor, settings: Settings) -> Sequence[Tensor]:
    """For each head in turn, its queries and its gate."""
    heads = tensor.view(settings["n_heads"], 2, settings["head_dim"], *tensor.shape[1:])
    return [heads[:, part].flatten(0, 1) for part in (0, 1)]


def join_gate(parts: Sequence[Tensor], settings: Settings) -> Tensor:
    """The inverse of `split_gate`."""
    heads = [part.view(settings["n_heads"], settings["head_dim"], *part.shape[1:]) for part in parts]
    return torch.stack(heads, 1).flatten(0, 2)


QWEN3_5_SETTINGS: tuple[Setting, ...] = (
    RotaryPosition(fraction=0.25),
    Value("head_dim", "head_dim", 256),
    UNTIED,
    Fixed("attention_bias", False),
    FullLayers(every=4),
    Unread(tuple(f"linear_{name}_dim" for name in ("conv_kernel", "key_head", "value_head"))),
    Unread(("linear_num_key_heads", "linear_num_value_heads")),
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "model.",
    {**GEMMA_NORM, **GATED, **block("PreNorm"), "attention.qk_norm": "head", "attention.gate": "element"},
    llama_settings(sizes(248320, 4096, 32, 16, 32768), 12288, 1e-6, *QWEN3_5_SETTINGS, n_kv_heads=4),
    {
        **{name: theirs for name, theirs in QWEN3.weights.items() if name != "blocks.#.attention.query.*"},
        ("blocks.#.attention.query.weight", "blocks.#.attention.output_gate.weight"): (
            "model.layers.#.self_attn.q_proj.weight",
            Fusion(split_gate, join_gate),
        ),
    },
)
QWEN3_NEXT = replace(
    QWEN3_5,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    settings=llama_settings(
        sizes(151936, 2048, 48, 16, 32768),
        5632,
        1e-6,
        *QWEN3_5_SETTINGS,
        DenseLayers("mlp_only_layers", ()),
        EXPERTS,
        n_kv_heads=2,
    ),
)
AFMOE_WINDOWS = Windows(1024, every=4, pattern="global_attn_every_n_layers")
AFMOE = Family(
    "afmoe",
    "AfmoeForCausalLM",
    "model.",
    {**RMS_NORM, **GATED, **block("Sandwich"), "attention.qk_norm": "head", "attention.gate": "element"},
    llama_settings(
        sizes(200192, 2048, 32, 16, 16384),
        6144,
        1e-5,
        AFMOE_WINDOWS,
        SomeRotary(RotaryPosition(), sliding(AFMOE_WINDOWS)),
        Value("head_dim", "head_dim", 128),
        UNTIED,
        ATTENTION_BIAS,
        Choice("mup_enabled", False, {False: {"embedding.scale": 1.0}, True: {"embedding.scale": root_of_dim}}),
        DenseLayers("num_dense_layers", 1),
        EXPERTS,
    ),
    {
        **QWEN3.weights,
        "blocks.#.attention.output_gate.*": "model.layers.#.self_attn.gate_proj.*",
        "blocks.#.attention_post_norm.*": "model.layers.#.post_attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.pre_mlp_layernorm.*",
        "blocks.#.ffn_post_norm.*": "model.layers.#.post_mlp_layernorm.*",
    },
)
NANOCHAT = Family(
    "nanochat",
    "NanoChatForCausalLM",
    "model.",
    {
        "head_dim": head_width,
        **RMS_NORM,
        "norm.gain": False,
        **PLAIN,
        **block("PreNorm"),
        "attention.qk_norm": "head",
        "attention.qk_norm_rotated": True,
        "embedding.norm_input": True,
    },
    (
        *sizes(50304, 768, 12, 6, 2048),
        Value("intermediate_size", "hidden_dim", 8192),
        KV_HEADS,
        Choice("hidden_act", "relu2", ACTIVATIONS),
        Value("rms_norm_eps", "norm.eps", 1e-6),
        Value("final_logit_softcapping", "embedding.logit_softcap", 15.0, nullable=True),
        RotaryPosition(),
        UNTIED,
        ATTENTION_BIAS,
    ),
    {
        **LLAMA_ENDS,
        **LLAMA_ATTENTION,
        "blocks.#.attention.query.*": ("model.layers.#.self_attn.q_proj.*", TURNED_BACK),
        "blocks.#.attention.key.*": ("model.layers.#.self_attn.k_proj.*", TURNED_BACK),
        "blocks.#.ffn.up.*": "model.layers.#.mlp.fc1.*",
        "blocks.#.ffn.down.*": "model.layers.#.mlp.fc2.*",
    },
)
YARN = (("rope_type", "yarn"), ("mscale", 1.0), ("mscale_all_dim", 1.0), ("llama_4_scaling_beta", 0.1))
MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    settings=llama_settings(
        sizes(131072, 4096, 34, 32, 262144),
        14336,
        1e-5,
        SteppedRotary(1e6, absent=(*YARN, ("factor", 16.0), (ORIGINAL, 16384))),
        Value("head_dim", "head_dim", 128),
        UNTIED,
        Windows(None),
        n_kv_heads=8,
    ),
    attention={key: value for key, value in ATTENTION.items() if key != "attention.temperature"},
)
MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    settings=latent_settings(
        sizes(131072, 4096, 36, 32, 1048576),
        12288,
        SteppedLatentRotary(absent=(*YARN, ("factor", 128.0), (ORIGINAL, 8192))),
        INTERLEAVED,
        UNTIED,
        DenseLayers("first_k_dense_replace", 0),
        EXPERTS,
        widths=(256, 1024, 64, 64, 128),
    ),
    attention={key: value for key, value in LATENT.items() if key != "attention.temperature"},
)
MINICPM3 = replace(
    DEEPSEEK_V3,
    model_type="minicpm3",
    architecture="MiniCPM3ForCausalLM",
    settings=latent_settings(
        sizes(73448, 2560, 62, 40, 32768),
        6400,
        LatentRotary(),
        TIED,
        MLP_BIAS,
        Quotient("scale_depth", "block.residual_scale", lambda ours: math.sqrt(ours["n_layers"]), 1.4),
        Quotient("dim_model_base", "embedding.logit_scale", like("dim"), 256),
        Value("scale_emb", "embedding.scale", 12.0),
        rms_norm_eps=1e-5,
        widths=(256, 768, 64, 32, head_width),
    ),
)
XIELU_TENSORS = ("alpha_p", "alpha_n", "beta", "eps")
XIELU = {"xielu": {"ffn.activation._target_": f"{MODEL}.feedforward.XIELU"}}
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    "model.",
    {**RMS_NORM, **PLAIN, **block("PreNorm"), "attention.qk_norm": "head"},
    (
        *sizes(131072, 4096, 32, 32, 65536),
        Value("intermediate_size", "hidden_dim", 14336),
        KV_HEADS,
        HEAD_DIM,
        Choice("hidden_act", "xielu", ACTIVATIONS | XIELU),
        Value("rms_norm_eps", "norm.eps", 1e-5),
        RotaryPosition(12_000_000.0, absent=(*LLAMA3_SCALING, ("factor", 8.0))),
        UNTIED,
        ATTENTION_BIAS,
    ),
    {
        **{ours: theirs for ours, theirs in QWEN3.weights.items() if "ffn.gate" not in ours},
        "blocks.#.attention_norm.*": "model.layers.#.attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.feedforward_layernorm.*",
        **{f"blocks.#.ffn.activation.{one}": f"model.layers.#.mlp.act_fn.{one}" for one in XIELU_TENSORS},
    },
)

# An export takes the first that can hold a model; of two with one `model_type`, the first whose `variant` fits is read.
FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    GPT1,
    GPT2,
    GPT_NEO,
    OPT,
    CTRL,
    GPT_NEOX,
    BLOOM,
    FALCON_40B,
    FALCON,
    OLMO2,
    OLMO3,
    EXAONE4,
    SMOLLM3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    QWEN2,
    QWEN3,
    STABLELM,
    STARCODER2,
    GPT_BIGCODE,
    PHI,
    PHI3,
    GPTJ,
    MPT,
    GLM,
    GRANITE,
    NEMOTRON,
    OLMO,
    COHERE,
    COHERE2,
    CWM,
    NANOCHAT,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    YOUTU,
    GRANITE_SWA,
    QWEN3_5,
    QWEN3_NEXT,
    AFMOE,
    MINISTRAL3,
    MISTRAL4,
    MINICPM3,
    APERTUS,
)
# What a class of any family reads: a field of another family is ignored, as transformers ignores it.
FIELDS = {name.partition(".")[0] for family in FAMILIES for setting in family.settings for name in setting.names}
# The `model_type` of each recipe that has one; the first Transformer and PaLM have none.
RECIPES = {
    "gpt1": "openai-gpt",
    "gpt2": "gpt2",
    "opt": "opt",
    "ctrl": "ctrl",
    "gpt_neox": "gpt_neox",
    "bloom": "bloom",
    "falcon": "falcon",
    "llama": "llama",
    "llama2": "llama",
    "llama3": "llama",
    "mistral": "mistral",
    "olmo2": "olmo2",
    "gemma2": "gemma2",
    "gptj": "gptj",
    "mpt": "mpt",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi": "phi",
    "cohere": "cohere",
    "gemma": "gemma",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "olmo": "olmo",
    "granite": "granite",
    "nanochat": "nanochat",
}
# Families that a user may well try, and what they need that we have no switch for.
MISSING = {
    "mixtral": "it routes tokens to experts",
    "qwen2_moe": "it routes tokens to experts",
    "qwen3_moe": "it routes tokens to experts",
    "gpt_oss": "it routes tokens to experts",
    "mimo_v2_flash": "it has values of another width, and routes tokens to experts",
    "mamba": "it has no attention",
    "t5": "it is no decoder alone",
}
