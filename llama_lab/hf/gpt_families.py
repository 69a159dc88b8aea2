"""Families with LayerNorm, descended from GPT; see `family.py`."""

from collections.abc import Sequence

import torch

from .by_layer import GlobalAndLocal, ScaleByLayer, SomeRotary, Windows, sliding
from .family import Family, Fusion, Weights
from .rotary import ROPE, RotaryOrAlibi, RotaryPosition
from .settings import Choice, Fixed, Quotient, ScoreScale, Setting, Unread, Value
from .terms import (
    ACTIVATIONS,
    ALIBI,
    ALL_BIASES,
    FFN_BIASES,
    GATED,
    GELU,
    GELU_TANH,
    LAYER_NORM,
    LEARNED,
    LLAMA_ATTENTION,
    LLAMA_ENDS,
    LLAMA_NAMES,
    LLAMA_NORMS,
    PLAIN,
    QK_NORM,
    QK_NORM_PER_HEAD,
    QKV_BIASES,
    QKV_GROUPS,
    block,
    component,
    fields,
    head_width,
    joined,
    like,
    llama_sizes,
    query_key_norms,
    root_of_dim,
    sizes,
    times_dim,
    weights,
)

NO_DROPOUT = Unread("resid_pdrop|embd_pdrop|attn_pdrop", written=0.0)  # where transformers' default is 0.1
CONV1D = joined(1, transposed=True)
QKV_CONV1D = joined("n_heads", "n_kv_heads", "n_kv_heads", transposed=True)
# OPT's positions, whose first two rows are for padding, and reach no logits: they are written as zeros.
AFTER_PADDING = Fusion(
    lambda tensor, _: (tensor[2:],), lambda parts, _: torch.cat((torch.zeros_like(parts[0][:2]), parts[0]))
)
# Gains, one per head, are rows of a matrix.
ROW_PER_HEAD = Fusion(
    lambda tensor, _: (tensor.flatten(),), lambda parts, settings: parts[0].view(-1, settings["head_dim"])
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


def gpt_weights(attention: Sequence[str], ffn: Sequence[str], **kept: Fusion) -> Weights:
    """Where GPT-2 and its descendants keep theirs."""
    return weights("transformer.h.#", attention, ("ln_1", "ln_2"), ffn, ("transformer.wte", "transformer.ln_f"), **kept)


APART = ("q_proj", "k_proj", "v_proj", "out_proj")
GPT_ATTENTION, GPT_FFN = ("attn.c_attn", "attn.c_proj"), ("mlp.c_fc", "mlp.c_proj")
WPE: Weights = {"position.table.weight": "transformer.wpe.weight"}
GPT_NAMES = gpt_weights(GPT_ATTENTION, GPT_FFN, qkv=QKV_CONV1D, matrix=CONV1D) | WPE
GPT1 = Family(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    {"hidden_dim": times_dim(4)} | LAYER_NORM | PLAIN | LEARNED | ALL_BIASES | block("PostNorm"),
    (
        *gpt_sizes(40478, 768, 12, 12, 512),
        *fields(layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        NO_DROPOUT,
        Choice("afn", "gelu", ACTIVATIONS | {"gelu": GELU_TANH}),  # they mean the tanh approximation
    ),
    {
        **GPT_NAMES,
        "embedding.tokens.weight": "transformer.tokens_embed.weight",
        "position.table.weight": "transformer.positions_embed.weight",
    },
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    LAYER_NORM | PLAIN | LEARNED | ALL_BIASES | block("PreNorm"),
    (
        *gpt_sizes(50257, 768, 12, 12, 1024),
        *fields(n_inner=times_dim(4), activation_function="gelu_new", layer_norm_epsilon=1e-5),
        *fields(tie_word_embeddings=True),
        Fixed("add_cross_attention", False),
        NO_DROPOUT,
        ScaleByLayer(),
    ),
    GPT_NAMES,
)
GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    GPT2.recipe | dict.fromkeys(QKV_BIASES, False) | {"attention.scale": 1.0},
    (
        *fields(vocab_size=50257, hidden_size=2048, max_position_embeddings=2048, intermediate_size=times_dim(4)),
        Value("num_layers|num_hidden_layers", "n_layers", 24),
        Value("num_heads|num_attention_heads", "n_heads", 16),
        *fields(activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        GlobalAndLocal(),
    ),
    gpt_weights([f"attn.attention.{name}" for name in APART], GPT_FFN) | WPE,
)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    LAYER_NORM | {"norm.eps": 1e-5} | PLAIN | LEARNED,
    (
        *sizes(50272, 768, 12, 12, 2048),
        *fields(ffn_dim=3072, activation_function="relu", enable_bias=True, tie_word_embeddings=True),
        Choice("do_layer_norm_before", True, {True: block("PreNorm"), False: block("PostNorm")}),
        Fixed("_remove_final_layer_norm", False),
        Fixed("layer_norm_elementwise_affine", True),
        Fixed("word_embed_proj_dim", like("dim")),
        Unread("dropout", written=0.0),
    ),
    weights(
        "model.decoder.layers.#",
        [f"self_attn.{name}" for name in APART],
        ("self_attn_layer_norm", "final_layer_norm"),
        ("fc1", "fc2"),
        ("model.decoder.embed_tokens", "model.decoder.final_layer_norm"),
    )
    | {"position.table.weight": ("model.decoder.embed_positions.weight", AFTER_PADDING)},
)
CTRL = Family(
    "ctrl",
    "CTRLLMHeadModel",
    LAYER_NORM
    | {"norm.eps": 1e-6, "embedding.scale": root_of_dim, "embedding.head_bias": True}
    | PLAIN
    | ACTIVATIONS["relu"]
    | ALL_BIASES
    | block("PreNorm")
    | component("position", "position.Sinusoidal", theta=10000.0, interleaved=False, amplitude=1.0, offset=0),
    (
        *gpt_sizes(246534, 1280, 48, 16, 256),
        *fields(dff=8192, tie_word_embeddings=True),
        Fixed("layer_norm_epsilon", 1e-6),
        NO_DROPOUT,
    ),
    weights(
        "transformer.h.#",
        [f"multi_head_attention.{name}" for name in ("Wq", "Wk", "Wv", "dense")],
        ("layernorm1", "layernorm2"),
        ("ffn.0", "ffn.2"),
        ("transformer.w", "transformer.layernorm"),
    ),
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    LAYER_NORM | PLAIN | dict.fromkeys(FFN_BIASES, True),
    (
        *sizes(50432, 6144, 44, 64, 2048),
        *fields(intermediate_size=24576, layer_norm_eps=1e-5, hidden_act="gelu", attention_bias=True),
        *fields(tie_word_embeddings=False),
        Choice("use_parallel_residual", True, {True: block("Parallel"), False: block("PreNorm")}),
        RotaryPosition(fraction=0.25, older=("rotary_emb_base", "rotary_pct")),
    ),
    weights(
        "gpt_neox.layers.#",
        ("attention.query_key_value", "attention.dense"),
        LLAMA_NORMS,
        ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
        QKV_GROUPS,
    )
    | {"embedding.head.*": "embed_out.*"},
    renamed={r"^lm_head\.": "embed_out."},
)
BLOOM_NAMES = weights(
    "transformer.h.#",
    ("self_attention.query_key_value", "self_attention.dense"),
    LLAMA_NORMS,
    ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ("transformer.word_embeddings", "transformer.ln_f"),
    QKV_GROUPS,
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    {"hidden_dim": times_dim(4), "embedding.norm_input": True}
    | (LAYER_NORM | PLAIN | GELU_TANH | ALL_BIASES | ALIBI | block("PreNorm")),
    (
        *fields(vocab_size=250880),
        Value("hidden_size|n_embed", "dim", 64),
        Value("n_layer|num_hidden_layers", "n_layers", 2),
        Value("n_head|num_attention_heads", "n_heads", 8),
        Value("seq_length", "max_seq_len", 2048),  # which transformers does not read: ALiBi has no limit
        *fields(layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        Fixed("apply_residual_connection_post_layernorm", False),
    ),
    BLOOM_NAMES | {"embedding.norm.*": "transformer.word_embeddings_layernorm.*"},
)


FALCON_40B = Family(
    "falcon",
    "FalconForCausalLM",
    LAYER_NORM | PLAIN,
    (
        *sizes(65024, 4544, 32, 71, 2048),
        *fields(ffn_hidden_size=times_dim(4), layer_norm_epsilon=1e-5, bias=False, activation="gelu"),
        *fields(num_kv_heads=like("n_heads"), tie_word_embeddings=True),
        RotaryOrAlibi(),
        Fixed("new_decoder_architecture", True),
        Choice(
            "num_ln_in_parallel_attn", 2, dict.fromkeys((2, None), block("Parallel")) | {1: block("ParallelSharedNorm")}
        ),
        Unread("apply_residual_connection_post_layernorm|ff_factor|parallel_attn|multi_query"),
    ),
    BLOOM_NAMES
    | {
        "blocks.#.attention_norm.*": lambda ours: (
            f"transformer.h.#.{'ln_attn' if block('Parallel').items() <= ours.items() else 'input_layernorm'}.*"
        ),
        "blocks.#.ffn_norm.*": "transformer.h.#.ln_mlp.*",
    },
    variant={"new_decoder_architecture": True},
    precision=0.05,  # since it rounds the biases of ALiBi to bfloat16
)
MULTI_QUERY = (
    Choice("multi_query", True, {True: {"n_kv_heads": 1}, False: {"n_kv_heads": like("n_heads")}}),
    Unread("num_kv_heads", written=like("n_kv_heads")),
    Unread("num_key_value_heads"),
)
FALCON = FALCON_40B.derive(
    "falcon",
    "FalconForCausalLM",
    Fixed("new_decoder_architecture", False),
    Choice("parallel_attn", True, {True: block("ParallelSharedNorm"), False: block("PreNorm")}),
    Unread("apply_residual_connection_post_layernorm|ff_factor|num_ln_in_parallel_attn"),
    *MULTI_QUERY,
    without=("num_ln_in_parallel_attn",),
    weights=BLOOM_NAMES,
    variant={},
)
STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    LAYER_NORM | GATED,
    (
        *llama_sizes(50304, 2560, 32, 32, 4096, 6912),
        *fields(layer_norm_eps=1e-5, hidden_act="silu", use_qkv_bias=False, tie_word_embeddings=False),
        Choice("use_parallel_residual", False, {False: block("PreNorm"), True: block("ParallelSharedNorm")}),
        Choice("qk_layernorm", False, QK_NORM_PER_HEAD | {True: QK_NORM_PER_HEAD[True] | {"attention.qk_bias": False}}),
        RotaryPosition(fraction=0.25),
    ),
    LLAMA_NAMES | query_key_norms("layernorm.norms.%", ROW_PER_HEAD),
)
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    LAYER_NORM | PLAIN | block("PreNorm"),
    (
        *llama_sizes(49152, 3072, 30, 24, 4096, 12288, 2),
        *fields(norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh", use_bias=True, tie_word_embeddings=True),
        Unread("mlp_type|norm_type"),
        RotaryPosition(),
        Windows(None),
    ),
    weights("model.layers.#", LLAMA_ATTENTION, LLAMA_NORMS, ("mlp.c_fc", "mlp.c_proj"), LLAMA_ENDS),
)
GPT_BIGCODE = GPT2.derive(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    *fields(activation_function="gelu_pytorch_tanh"),
    Choice("scale_attn_weights", True, {True: {"attention.scale": None}, False: {"attention.scale": 1.0}}),
    *MULTI_QUERY,
    weights=gpt_weights(GPT_ATTENTION, GPT_FFN, qkv=QKV_GROUPS),
)
PHI = Family(
    "phi",
    "PhiForCausalLM",
    LAYER_NORM | PLAIN | ALL_BIASES | block("ParallelSharedNorm") | {"embedding.head_bias": True},
    (
        *sizes(51200, 2048, 24, 32, 2048),
        *fields(intermediate_size=times_dim(4), num_key_value_heads=like("n_heads")),
        *fields(layer_norm_eps=1e-5, hidden_act="gelu_new", tie_word_embeddings=False),
        Choice("qk_layernorm", False, QK_NORM),
        RotaryPosition(fraction=0.5),
    ),
    weights(
        "model.layers.#",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        LLAMA_NORMS,
        ("mlp.fc1", "mlp.fc2"),
        ("model.embed_tokens", "model.final_layernorm"),
    )
    | query_key_norms("layernorm"),
)
GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    (LAYER_NORM | PLAIN | dict.fromkeys(FFN_BIASES, True) | block("ParallelSharedNorm") | {"embedding.head_bias": True})
    | {"position._target_": ROPE, "position.theta": 10000.0, "position.interleaved": True, "position.scaling": None},
    (
        *gpt_sizes(50400, 4096, 28, 16, 2048),
        *fields(n_inner=times_dim(4), layer_norm_epsilon=1e-5, activation_function="gelu_new"),
        *fields(tie_word_embeddings=False),
        Quotient("rotary_dim", "position.fraction", 64, by=head_width),
        Unread("rotary|scale_attn_weights"),
    ),
    gpt_weights([f"attn.{name}" for name in APART], ("mlp.fc_in", "mlp.fc_out")),
)
MPT = Family(
    "mpt",
    "MptForCausalLM",
    {"hidden_dim": times_dim(4)} | (LAYER_NORM | {"norm.bias": False} | PLAIN | GELU | ALIBI | block("PreNorm")),
    (
        *fields(vocab_size=50368),
        Value("d_model|hidden_size", "dim", 2048),
        Value("n_layers|num_hidden_layers", "n_layers", 24),
        Value("n_heads|num_attention_heads", "n_heads", 16),
        Value("max_seq_len", "max_seq_len", 2048),
        *fields(layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        Fixed("expansion_ratio", 4),
        Fixed("no_bias", True),
        Fixed("logit_scale", None),
        Fixed("attn_config.alibi", True),
        Fixed("attn_config.alibi_bias_max", 8),  # which transformers does not read
        Fixed("attn_config.attn_type", "multihead_attention"),
        Fixed("attn_config.prefix_lm", False),
        Fixed("attn_config.qk_ln", False),
        Value("attn_config.clip_qkv", "attention.clip_qkv", None),
        ScoreScale("attn_config.softmax_scale"),
        Unread("learned_pos_emb|embedding_fraction|norm_type|verbose|init_config"),
    ),
    weights(
        "transformer.blocks.#",
        ("attn.Wqkv", "attn.out_proj"),
        ("norm_1", "norm_2"),
        ("ffn.up_proj", "ffn.down_proj"),
        ("transformer.wte", "transformer.norm_f"),
    ),
)
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    LAYER_NORM | {"norm.unit_offset": True} | PLAIN | block("PreNorm"),
    (
        *llama_sizes(256000, 6144, 32, 48, 4096, 24576),
        *fields(
            head_dim=head_width, norm_eps=1e-5, hidden_act="relu2", tie_word_embeddings=False, attention_bias=False
        ),
        Value("mlp_bias", FFN_BIASES, False),
        RotaryPosition(fraction=0.5),
    ),
    LLAMA_NAMES,
)
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    LAYER_NORM | {"norm.bias": False, "norm.gain": False, "norm.eps": 1e-5} | GATED | block("PreNorm"),
    (
        *llama_sizes(50304, 4096, 32, 32, 2048, 11008),
        *fields(hidden_act="silu", tie_word_embeddings=False, attention_bias=False, clip_qkv=None),
        RotaryPosition(),
    ),
    LLAMA_NAMES,
)
COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    LAYER_NORM | {"norm.bias": False} | GATED | block("ParallelSharedNorm"),
    (
        *llama_sizes(256000, 8192, 40, 64, 8192, 22528),
        *fields(hidden_act="silu", layer_norm_eps=1e-5, logit_scale=0.0625, use_qk_norm=False),
        *fields(tie_word_embeddings=True, attention_bias=False),
        RotaryPosition(theta=500000.0, interleaved=True),
        Unread("model_max_length"),
    ),
    LLAMA_NAMES | query_key_norms("norm", ROW_PER_HEAD),
)
COHERE2_WINDOWS = Windows(4096, every=4, pattern="sliding_window_pattern")
COHERE2 = COHERE.derive(
    "cohere2",
    "Cohere2ForCausalLM",
    COHERE2_WINDOWS,
    SomeRotary(RotaryPosition(interleaved=True), sliding(COHERE2_WINDOWS)),
    Unread("layer_switch|order_of_interleaved_layers|position_embedding_type"),
    Unread("use_embedding_sharing|use_gated_activation|use_parallel_block|use_parallel_embedding"),
    without=("use_qk_norm",),
    weights=LLAMA_NAMES,
)
