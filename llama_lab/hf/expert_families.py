"""Families with a mixture of experts in every layer, or in most; see `family.py`; DeepSeek's are LLaMA's."""

from . import llama_families as llama
from .by_layer import SomeExperts, Windows
from .rotary import ORIGINAL, RotaryPosition
from .settings import DenseLayers, Fixed, Settings, Unread, Value
from .terms import (
    CLAMPED,
    GATE_AND_UP,
    GATE_AND_UP_BIASES,
    GATED_BIASES,
    LLAMA_EXPERTS,
    MIXTURE,
    ROUTING,
    STACKED,
    expert_weights,
    fields,
    head_width,
    joined,
    llama_sizes,
    of_each_expert,
)

MIXTRAL = llama.MISTRAL.derive(
    "mixtral",
    "MixtralForCausalLM",
    *llama_sizes(32000, 4096, 32, 32, 131072, 14336, 8),
    *fields(rms_norm_eps=1e-5, num_experts_per_tok=2),
    Value("num_local_experts|num_experts", "experts.n_experts", 8),
    RotaryPosition(1_000_000.0),
    Windows(None),
    ROUTING,
    recipe=MIXTURE,
    weights=expert_weights("model.layers.#.block_sparse_moe", ("w1", "w3", "w2"), "gate"),
    other_weights=STACKED,
)
OLMOE = llama.BASE.derive(
    "olmoe",
    "OlmoeForCausalLM",
    *llama_sizes(50304, 2048, 16, 16, 4096, 2048),
    *fields(rms_norm_eps=1e-5, attention_bias=False, num_experts_per_tok=8, norm_topk_prob=False),
    Value("num_experts|num_local_experts", "experts.n_experts", 64),
    Fixed("clip_qkv", None),  # they clip after the norm
    ROUTING,
    recipe=MIXTURE | {"attention.qk_norm": "projection"},
    weights=LLAMA_EXPERTS,
    other_weights=STACKED,
)
QWEN3_MOE = llama.QWEN3.derive(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    *llama_sizes(151936, 2048, 24, 32, 32768, 6144, 4),
    *fields(head_dim=head_width),
    SomeExperts(
        DenseLayers("mlp_only_layers", ()),
        MIXTURE,
        sparse=(
            *fields(moe_intermediate_size=768, num_experts_per_tok=8, norm_topk_prob=False),
            Value("num_local_experts|num_experts", "experts.n_experts", 128),
        ),
        plain=fields(intermediate_size=6144),
        step="decoder_sparse_step",
    ),
    Fixed("use_sliding_window", False),
    Unread("max_window_layers"),
    ROUTING,
    without=("intermediate_size", "sliding_window"),
    weights=LLAMA_EXPERTS,
    other_weights=STACKED,
)
# gpt-oss keeps matrices as (experts, in, out), with columns of gate and up in turn.
COLUMNS = of_each_expert(joined(1, transposed=True))
COLUMNS_IN_TURN = of_each_expert(joined(1, 1, groups="hidden_dim", transposed=True))
YARN: Settings = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "truncate": False}
GPT_OSS = llama.BASE.derive(
    "gpt_oss",
    "GptOssForCausalLM",
    *llama_sizes(201088, 2880, 36, 64, 131072, 2880, 8),
    *fields(head_dim=64, rms_norm_eps=1e-5, attention_bias=True, num_experts_per_tok=4),
    *fields(swiglu_alpha=1.702, swiglu_limit=7.0),
    Value("num_local_experts|num_experts", "experts.n_experts", 128),
    RotaryPosition(150_000.0, absent=YARN),
    Windows(128, every=2),
    ROUTING,
    Unread("hidden_act"),
    recipe=MIXTURE
    | CLAMPED
    | dict.fromkeys(GATED_BIASES, True)
    | {"experts.router_bias": True, "attention.sinks": True},
    weights={
        GATE_AND_UP: ("model.layers.#.mlp.experts.gate_up_proj", COLUMNS_IN_TURN),
        GATE_AND_UP_BIASES: ("model.layers.#.mlp.experts.gate_up_proj_bias", COLUMNS_IN_TURN),
        "blocks.#.ffn.experts.down.weight": ("model.layers.#.mlp.experts.down_proj", COLUMNS),
        "blocks.#.ffn.experts.down.bias": "model.layers.#.mlp.experts.down_proj_bias",
        "blocks.#.ffn.router.*": "model.layers.#.mlp.router.*",
    },
)
