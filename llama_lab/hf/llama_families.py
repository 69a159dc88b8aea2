"""Families with RMSNorm, descended from LLaMA; see `family.py`."""

import math

from torch import Tensor

from .by_layer import BIAS_STEP, SLIDING, RotaryByKind, RotaryByLayer, SomeExperts, SomeRotary, Windows, sliding
from .family import ATTENTION, Family, Fusion
from .rotary import ORIGINAL, PHI3_KINDS, LatentRotary, RotaryPosition, SteppedLatentRotary, SteppedRotary
from .settings import (
    MODEL,
    Choice,
    DenseLayers,
    Derived,
    Fixed,
    Positive,
    Quotient,
    Reciprocal,
    ScoreScale,
    Setting,
    Settings,
    Unread,
    Value,
)
from .terms import (
    ACTIVATIONS,
    FFN,
    GATE_UP,
    GATED,
    GELU_TANH,
    GEMMA_NORM,
    LLAMA_EXPERTS,
    LLAMA_NAMES,
    MIXTURE,
    PLAIN,
    QKV,
    QKV_BIASES,
    QUERY_KEY_VALUE,
    RMS_NORM,
    ROUTING,
    STACKED,
    block,
    component,
    fields,
    head_width,
    like,
    llama_sizes,
    root_of_dim,
    sizes,
)

# What they have in common, itself of no class
BASE = Family(
    "",
    "",
    RMS_NORM | GATED | block("PreNorm"),
    (*fields(hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False), RotaryPosition()),
    LLAMA_NAMES,
)
LLAMA = BASE.derive(
    "llama",
    "LlamaForCausalLM",
    *llama_sizes(32000, 4096, 32, 32, 2048, 11008),
    *fields(head_dim=head_width, attention_bias=False, mlp_bias=False),
)
MISTRAL = BASE.derive(
    "mistral",
    "MistralForCausalLM",
    *llama_sizes(32000, 4096, 32, 32, 131072, 14336, 8),
    *fields(head_dim=head_width),
    Windows(4096),
)
MINISTRAL = MISTRAL.derive("ministral", "MinistralForCausalLM", Windows(4096, listed=True))
OLMO2 = BASE.derive(
    "olmo2",
    "Olmo2ForCausalLM",
    *llama_sizes(50304, 4096, 32, 32, 2048, 11008),
    *fields(rms_norm_eps=1e-5, attention_bias=False),
    recipe=block("Reordered") | {"attention.qk_norm": "projection"},
    weights={
        "blocks.#.attention_norm.*": "model.layers.#.post_attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.post_feedforward_layernorm.*",
    },
)
OLMO3_WINDOWS = Windows(4096, every=4)
OLMO3 = OLMO2.derive(
    "olmo3", "Olmo3ForCausalLM", OLMO3_WINDOWS, RotaryByKind(OLMO3_WINDOWS, full=500_000.0, sliding=500_000.0)
)
EXAONE4_WINDOWS = Windows(4096, every=4, nullable=True, pattern="sliding_window_pattern")


def slides(config: Settings, ours: Settings) -> list[bool]:
    """Whether each layer of Exaone 4 turns: those with windows, or all if there are none."""
    has_windows = config.get("sliding_window", EXAONE4_WINDOWS.default) is not None
    return [not has_windows or kind == SLIDING for kind in EXAONE4_WINDOWS.kinds(config, ours)]


EXAONE4 = OLMO2.derive(
    "exaone4",
    "Exaone4ForCausalLM",
    *llama_sizes(102400, 4096, 32, 32, 2048, 16384),
    *fields(head_dim=head_width),
    EXAONE4_WINDOWS,
    SomeRotary(RotaryPosition(), slides),
    without=("attention_bias",),
    recipe={"attention.qk_norm": "head"},
)
SMOLLM3 = BASE.derive(
    "smollm3",
    "SmolLM3ForCausalLM",
    *llama_sizes(128256, 2048, 36, 16, 32768, 11008, 4),
    *fields(tie_word_embeddings=True, attention_bias=False, mlp_bias=False),
    SomeRotary(
        RotaryPosition(2_000_000.0),
        lambda config, ours: [
            bool(turns)
            for turns in config.get("no_rope_layers")
            or [(i + 1) % config.get("no_rope_layer_interval", 4) for i in range(ours["n_layers"])]
        ][: ours["n_layers"]],
        listed=("no_rope_layers", "no_rope_layer_interval"),
    ),
    Fixed("use_sliding_window", False),
    Windows(None, every=1, nullable=True),
)
GEMMA = BASE.derive(
    "gemma",
    "GemmaForCausalLM",
    *llama_sizes(256000, 3072, 28, 16, 8192, 24576),
    *fields(head_dim=256, tie_word_embeddings=True, attention_bias=False),
    Choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS | {"gelu": GELU_TANH}),  # which older files mean
    Unread("hidden_activation"),
    Fixed("use_bidirectional_attention", False),
    recipe=GEMMA_NORM | {"embedding.scale": root_of_dim},
)
GEMMA2 = GEMMA.derive(
    "gemma2",
    "Gemma2ForCausalLM",
    *llama_sizes(256000, 2304, 26, 8, 8192, 9216, 4),
    *fields(hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    Unread("hidden_act"),
    ScoreScale("query_pre_attn_scalar", default=256, of_width=True),
    Windows(4096, every=2),
    recipe=block("Sandwich"),
    weights={
        "blocks.#.attention_post_norm.*": "model.layers.#.post_attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.pre_feedforward_layernorm.*",
        "blocks.#.ffn_post_norm.*": "model.layers.#.post_feedforward_layernorm.*",
    },
)
GEMMA3_WINDOWS = Windows(4096, every=6, pattern="sliding_window_pattern")
GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    "Gemma3ForCausalLM",
    *sizes(262208, 2304, 26, 8, 131072),
    *fields(final_logit_softcapping=None),
    GEMMA3_WINDOWS,
    RotaryByKind(GEMMA3_WINDOWS, full=1_000_000.0, sliding=10_000.0, local="rope_local_base_freq"),
    Unread("_sliding_window_pattern"),
    without=("hidden_act", "attn_logit_softcapping"),
    recipe={"attention.qk_norm": "head"},
)
QWEN2 = BASE.derive(
    "qwen2",
    "Qwen2ForCausalLM",
    *llama_sizes(151936, 4096, 32, 32, 32768, 22016),
    Windows(4096, gated=True),
    Unread("use_mrope"),
    recipe=dict.fromkeys(QKV_BIASES, True),
)
QWEN3 = BASE.derive(
    "qwen3",
    "Qwen3ForCausalLM",
    *llama_sizes(151936, 4096, 32, 32, 32768, 22016),
    *fields(head_dim=128, attention_bias=False),
    Windows(4096, gated=True),
    recipe={"attention.qk_norm": "head"},
)
PHI3 = BASE.derive(
    "phi3",
    "Phi3ForCausalLM",
    *llama_sizes(32064, 3072, 32, 32, 4096, 8192),
    *fields(rms_norm_eps=1e-5),
    RotaryPosition(fraction=1.0, kinds=PHI3_KINDS, original=4096),
    Windows(None),
    Unread("attention_bias|lm_head_bias|full_attn_mod|interpolate_factor"),
    weights={
        QUERY_KEY_VALUE: ("model.layers.#.self_attn.qkv_proj.*", QKV),
        ("blocks.#.ffn.gate.*", "blocks.#.ffn.up.*"): ("model.layers.#.mlp.gate_up_proj.*", GATE_UP),
    },
)
GLM = BASE.derive(
    "glm",
    "GlmForCausalLM",
    *llama_sizes(151552, 4096, 40, 32, 131072, 13696, 2),
    *fields(head_dim=128, rms_norm_eps=1.5625e-07),
    Value("attention_bias", QKV_BIASES, True),
    RotaryPosition(fraction=0.5, interleaved=True),
    weights={("blocks.#.ffn.gate.*", "blocks.#.ffn.up.*"): ("model.layers.#.mlp.gate_up_proj.*", GATE_UP)},
)
GRANITE = LLAMA.derive(
    "granite",
    "GraniteForCausalLM",
    *sizes(32000, 4096, 32, 32, 2048),
    *fields(embedding_multiplier=1.0, residual_multiplier=1.0),
    Reciprocal("logits_scaling", "embedding.logit_scale", 1.0),
    ScoreScale("attention_multiplier", default=1.0),
    without=("head_dim",),
)
LLAMA3_SCALING: Settings = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
CWM = BASE.derive(
    "cwm",
    "CwmForCausalLM",
    *llama_sizes(128256, 6144, 64, 48, 131072, 21504, 8),
    *fields(head_dim=128, rms_norm_eps=1e-5, mlp_bias=False),
    RotaryPosition(1_000_000.0, absent=LLAMA3_SCALING | {"factor": 16.0}),
    Unread("attention_bias"),
    Windows(8192, every=4, leading=True),
)


def halves_exchanged(tensor: Tensor, settings: Settings) -> Tensor:
    """Swap the halves of each head, the pairs that RoPE rotates, which reverses the rotation (nanochat)."""
    heads = tensor.view(-1, 2, settings["head_dim"] // 2, *tensor.shape[1:])
    return heads.flip(1).reshape(tensor.shape)


TURNED_BACK = Fusion(
    lambda tensor, settings: (halves_exchanged(tensor, settings),),
    lambda parts, settings: halves_exchanged(parts[0], settings),
)
NANOCHAT = BASE.derive(
    "nanochat",
    "NanoChatForCausalLM",
    *llama_sizes(50304, 768, 12, 6, 2048, 8192),
    *fields(hidden_act="relu2", final_logit_softcapping=15.0, attention_bias=False),
    recipe=PLAIN
    | {"norm.gain": False, "embedding.norm_input": True}
    | {"attention.qk_norm": "head", "attention.qk_norm_rotated": True},
    weights={
        "blocks.#.attention.query.*": ("model.layers.#.self_attn.q_proj.*", TURNED_BACK),
        "blocks.#.attention.key.*": ("model.layers.#.self_attn.k_proj.*", TURNED_BACK),
        "blocks.#.ffn.up.*": "model.layers.#.mlp.fc1.*",
        "blocks.#.ffn.down.*": "model.layers.#.mlp.fc2.*",
    },
)
EXPERTS = Unread(  # of layers that are all dense
    "num_experts|n_routed_experts|num_local_experts|n_shared_experts|num_experts_per_tok|moe_intermediate_size|"
    "moe_layer_freq|n_group|topk_group|topk_method|norm_topk_prob|decoder_sparse_step|num_shared_experts|route_scale|"
    "shared_expert_intermediate_size|routed_scaling_factor|scoring_func|aux_loss_alpha|seq_aux|router_aux_loss_coef|"
    "ep_size"
)


def latents(
    kv_rank: int = 512,
    query_rank: int = 1536,
    nope_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int | Derived = 128,
) -> tuple[Setting, ...]:
    """The ranks and the widths of heads of latent attention."""
    return (
        *fields(kv_lora_rank=kv_rank, q_lora_rank=query_rank, qk_nope_head_dim=nope_dim),
        *fields(qk_rope_head_dim=rotary_dim, v_head_dim=value_dim),
    )


LATENT: Settings = {
    "attention._target_": f"{MODEL}.latent_attention.LatentAttention",
    "attention.latent_eps": 1e-6,  # in any case
    "attention.temperature": None,
}
DEEPSEEK_V3 = BASE.derive(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    *sizes(129280, 7168, 61, 128, 4096),
    *latents(),
    LatentRotary(),
    *fields(rope_interleave=True),  # after the rotation, whose order of pairs it changes
    Fixed("num_key_value_heads", like("n_heads")),
    Fixed("attention_bias", False),
    Fixed("head_dim", like("head_dim")),  # of classes that rotate as many dimensions as it says
    Unread("qk_head_dim"),
    SomeExperts(
        DenseLayers("first_k_dense_replace", 3),
        MIXTURE | {"experts.scores": "sigmoid", "experts.balance_bias": BIAS_STEP},
        sparse=(
            *fields(moe_intermediate_size=2048, num_experts_per_tok=8, norm_topk_prob=True),
            *fields(routed_scaling_factor=2.5, n_group=8, topk_group=4),
            Positive("n_shared_experts", "experts.n_shared", 1),
            Value("n_routed_experts|num_local_experts", "experts.n_experts", 256),
        ),
        plain=fields(intermediate_size=18432),
    ),
    ROUTING,
    Unread("num_mtp_layers|num_nextn_predict_layers"),  # which predict more tokens, beside the model
    weights={
        "blocks.#.attention.query.*": lambda ours: (  # the first or only map
            f"model.layers.#.self_attn.{'q_proj' if ours.get('attention.query_rank') is None else 'q_a_proj'}.*"
        ),
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_a_layernorm.*",
        "blocks.#.attention.query_up.*": "model.layers.#.self_attn.q_b_proj.*",
        "blocks.#.attention.latent.*": "model.layers.#.self_attn.kv_a_proj_with_mqa.*",
        "blocks.#.attention.latent_norm.*": "model.layers.#.self_attn.kv_a_layernorm.*",
        "blocks.#.attention.latent_up.*": "model.layers.#.self_attn.kv_b_proj.*",
        **LLAMA_EXPERTS,
        "blocks.#.ffn.choice_bias": "model.layers.#.mlp.gate.e_score_correction_bias",
        **{f"blocks.#.ffn.shared.{part}.*": f"model.layers.#.mlp.shared_experts.{part}_proj.*" for part in FFN},
    },
    other_weights=STACKED,
    attention=LATENT,
)
WITHOUT_EXPERTS = ("first_k_dense_replace", "num_experts", "topk_method", "num_mtp_layers")
DEEPSEEK_V2 = DEEPSEEK_V3.derive(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    *sizes(102400, 4096, 32, 32, 2048),
    *fields(intermediate_size=11008, mlp_bias=False),
    LatentRotary(interleaved=True),
    Unread("head_dim"),
    DenseLayers("first_k_dense_replace", 0),
    EXPERTS,
    without=("rope_interleave", "topk_method", "num_mtp_layers"),
)
YOUTU = DEEPSEEK_V3.derive(
    "youtu",
    "YoutuForCausalLM",
    *sizes(128256, 2048, 32, 16, 131072),
    *fields(intermediate_size=6144, tie_word_embeddings=True),
    Unread("embedding_initializer_range"),
    without=WITHOUT_EXPERTS,
)
GRANITE_SWA = GRANITE.derive(
    "granite_swa",
    "GraniteSWAForCausalLM",
    *llama_sizes(100352, 2560, 24, 20, 8192, 8192, 4),
    *fields(rms_norm_eps=1e-5, tie_word_embeddings=True),
    Windows(128, every=4, leading=True),
    RotaryByLayer(),
    recipe={"attention.sinks": True},
)
AFMOE_WINDOWS = Windows(1024, every=4, pattern="global_attn_every_n_layers")
AFMOE = BASE.derive(
    "afmoe",
    "AfmoeForCausalLM",
    *llama_sizes(200192, 2048, 32, 16, 16384, 6144),
    *fields(head_dim=128, rms_norm_eps=1e-5, attention_bias=False),
    AFMOE_WINDOWS,
    SomeRotary(RotaryPosition(), sliding(AFMOE_WINDOWS)),
    Choice("mup_enabled", False, {False: {"embedding.scale": 1.0}, True: {"embedding.scale": root_of_dim}}),
    DenseLayers("num_dense_layers", 1),
    EXPERTS,
    recipe=block("Sandwich") | {"attention.qk_norm": "head", "attention.gate": "element"},
    weights={
        "blocks.#.attention.output_gate.*": "model.layers.#.self_attn.gate_proj.*",
        "blocks.#.attention_post_norm.*": "model.layers.#.post_attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.pre_mlp_layernorm.*",
        "blocks.#.ffn_post_norm.*": "model.layers.#.post_mlp_layernorm.*",
    },
)
YARN: Settings = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL3 = MISTRAL.derive(
    "ministral3",
    "Ministral3ForCausalLM",
    *sizes(131072, 4096, 34, 32, 262144),
    *fields(head_dim=128, rms_norm_eps=1e-5),
    SteppedRotary(1e6, absent=YARN | {"factor": 16.0, ORIGINAL: 16384}),
    Windows(None),
    attention={key: value for key, value in ATTENTION.items() if key != "attention.temperature"},
)
MISTRAL4 = DEEPSEEK_V2.derive(
    "mistral4",
    "Mistral4ForCausalLM",
    *sizes(131072, 4096, 36, 32, 1048576),
    *fields(intermediate_size=12288),
    *latents(256, 1024, 64, 64, 128),
    SteppedLatentRotary(absent=YARN | {"factor": 128.0, ORIGINAL: 8192}),
    *fields(rope_interleave=True),  # as in DeepSeek V3
    without=("mlp_bias",),
    attention={key: value for key, value in LATENT.items() if key != "attention.temperature"},
)
MINICPM3 = DEEPSEEK_V2.derive(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    *sizes(73448, 2560, 62, 40, 32768),
    *latents(256, 768, 64, 32, head_width),
    *fields(intermediate_size=6400, rms_norm_eps=1e-5, tie_word_embeddings=True, scale_emb=12.0),
    LatentRotary(),
    Quotient("scale_depth", "block.residual_scale", 1.4, by=lambda ours: math.sqrt(ours["n_layers"])),
    Quotient("dim_model_base", "embedding.logit_scale", 256, by=like("dim")),
    without=WITHOUT_EXPERTS,
)
XIELU_TENSORS = ("alpha_p", "alpha_n", "beta", "eps")
XIELU = {"xielu": component("ffn.activation", "feedforward.XIELU")}
APERTUS = BASE.derive(
    "apertus",
    "ApertusForCausalLM",
    *llama_sizes(131072, 4096, 32, 32, 65536, 14336),
    *fields(head_dim=head_width, rms_norm_eps=1e-5, attention_bias=False),
    Choice("hidden_act", "xielu", ACTIVATIONS | XIELU),
    RotaryPosition(12_000_000.0, absent=LLAMA3_SCALING | {"factor": 8.0}),
    recipe=PLAIN | {"attention.qk_norm": "head"},
    weights={
        "blocks.#.attention_norm.*": "model.layers.#.attention_layernorm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.feedforward_layernorm.*",
        **{f"blocks.#.ffn.activation.{name}": f"model.layers.#.mlp.act_fn.{name}" for name in XIELU_TENSORS},
    },
)
