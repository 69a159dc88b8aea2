"""Hybrids of recurrent mixers with attention; see `family.py`."""

from . import llama_families as llama
from .by_layer import SomeExperts, SomeMixers, every
from .expert_families import LLAMA_EXPERTS
from .rotary import RotaryPosition
from .settings import DenseLayers, Fixed, Multiple, Settings
from .terms import (
    FFN,
    GEMMA_NORM,
    MIXTURE,
    ROUTING,
    STACKED,
    component,
    fields,
    joined,
    like,
    llama_sizes,
)

DELTA: Settings = {
    **component("attention", "recurrent.GatedDelta", decay="head", gate="silu", negative=False),
    "attention.norm_eps": like("norm.eps"),
    "attention.norm_offset": False,
}


def of_keys(own: Settings) -> int:
    """The width of all keys together."""
    return int(own["attention.key_heads"] * own["attention.key_dim"])


def of_values(own: Settings) -> int:
    """The width of all values together."""
    return int(own["attention.value_heads"] * own["attention.value_dim"])


PARTS = ("query", "key", "value")
PROJECTIONS, CONVS = (tuple(f"blocks.#.attention.{part}.{kind}.*" for part in PARTS) for kind in ("project", "conv"))
GATE, BETA, STEP = (f"blocks.#.attention.{part}.*" for part in ("gate.project", "beta", "decay.step"))
QUERIES_KEYS_VALUES = joined(of_keys, of_keys, of_values)
LINEAR_ATTENTION = "model.layers.#.linear_attn"
QWEN3_5 = llama.BASE.derive(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    *llama_sizes(248320, 4096, 32, 16, 32768, 12288, 4),
    *fields(head_dim=256),
    RotaryPosition(fraction=0.25),
    Fixed("attention_bias", False),
    SomeMixers(
        every(4),
        DELTA,
        (
            *fields(linear_num_key_heads=16, linear_num_value_heads=32, linear_conv_kernel_dim=4),
            *fields(linear_key_head_dim=128, linear_value_head_dim=128),
            Fixed("hidden_act", "silu"),  # of convolutions and gates, too
        ),
        older=("full_attention_interval",),
    ),
    recipe=GEMMA_NORM | {"attention.qk_norm": "head", "attention.gate": "element"},
    weights={
        ("blocks.#.attention.query.*", "blocks.#.attention.output_gate.*"): (
            "model.layers.#.self_attn.q_proj.*",
            joined(1, 1, groups="n_heads"),
        ),
    },
    mixer_weights={
        PROJECTIONS: (f"{LINEAR_ATTENTION}.in_proj_qkv.*", QUERIES_KEYS_VALUES),
        CONVS: (f"{LINEAR_ATTENTION}.conv1d.*", QUERIES_KEYS_VALUES),
        GATE: f"{LINEAR_ATTENTION}.in_proj_z.*",
        BETA: f"{LINEAR_ATTENTION}.in_proj_b.*",
        STEP: f"{LINEAR_ATTENTION}.in_proj_a.*",
        "blocks.#.attention.decay.rate": f"{LINEAR_ATTENTION}.A_log",
        "blocks.#.attention.decay.bias": f"{LINEAR_ATTENTION}.dt_bias",
        "blocks.#.attention.norm.*": f"{LINEAR_ATTENTION}.norm.*",
        "blocks.#.attention.output.*": f"{LINEAR_ATTENTION}.out_proj.*",
    },
)
QWEN3_NEXT = QWEN3_5.derive(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    *llama_sizes(151936, 2048, 48, 16, 32768, 5632, 2),
    SomeExperts(
        DenseLayers("mlp_only_layers", ()),
        MIXTURE | {"experts.shared_gate": True},
        sparse=(
            *fields(moe_intermediate_size=512, num_experts=512, num_experts_per_tok=10, norm_topk_prob=True),
            Multiple("shared_expert_intermediate_size", "experts.n_shared", 512, by=like("hidden_dim")),
        ),
        plain=fields(intermediate_size=5632),
        step="decoder_sparse_step",
    ),
    ROUTING,
    without=("intermediate_size",),
    weights={
        **LLAMA_EXPERTS,
        **{f"blocks.#.ffn.shared.{part}.*": f"model.layers.#.mlp.shared_expert.{part}_proj.*" for part in FFN},
        "blocks.#.ffn.shared_gate.*": "model.layers.#.mlp.shared_expert_gate.*",
    },
    other_weights=STACKED,
    mixer_weights={
        (*PROJECTIONS, GATE): (
            f"{LINEAR_ATTENTION}.in_proj_qkvz.*",
            joined(of_keys, of_keys, of_values, of_values, groups="attention.key_heads"),
        ),
        (BETA, STEP): (f"{LINEAR_ATTENTION}.in_proj_ba.*", joined(1, 1, groups="attention.key_heads")),
    },
)
