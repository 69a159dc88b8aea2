"""Hybrids of recurrent mixers with attention; see `family.py`."""

import math
from dataclasses import dataclass

from . import llama_families as llama
from .by_layer import FULL, SomeExperts, SomeMixers, every
from .expert_families import LLAMA_EXPERTS
from .rotary import RotaryPosition
from .settings import DenseLayers, Fixed, Multiple, Setting, Settings, Value, number
from .terms import (
    FFN,
    GEMMA_NORM,
    MIXTURE,
    ROUTING,
    STACKED,
    activation,
    component,
    fields,
    head_width,
    joined,
    like,
    llama_sizes,
    sizes,
    weights,
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


@dataclass(frozen=True)
class RoundedWidth(Setting):
    """LFM2's width of the feed-forward: two thirds of theirs, times a factor, rounded up, unless that is off."""

    name = "intermediate_size|block_ff_dim|block_auto_adjust_ff_dim|block_ffn_dim_multiplier|block_multiple_of"

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        plain, older, is_rounded, factor, multiple = self.names
        width = number(older, config.get(older, config.get(plain, 12288)))
        if config.get(is_rounded, True):
            width, times, unit = int(2 * width / 3), config.get(factor, 1.0), config.get(multiple, 256)
            width = width if times is None else unit * math.ceil(int(times * width) / unit)
        return {"hidden_dim": width}

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return {self.names[0]: ours["hidden_dim"], self.names[2]: False}


def listed_attention(config: Settings, ours: Settings) -> list[str]:
    """LFM2's kinds of layers, of a config that lists those with attention, default: all, for `SomeMixers`."""
    layers = range(ours["n_layers"])
    listed = config.get("full_attn_idxs")
    return [FULL if layer in (layers if listed is None else listed) else CONV for layer in layers]


CONV = "conv"
LFM2_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
LFM2_FFN = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
LFM2_ENDS = ("model.embed_tokens", "model.embedding_norm")
LFM2 = llama.BASE.derive(
    "lfm2",
    "Lfm2ForCausalLM",
    *sizes(65536, 2560, 32, 32, 128000),
    *fields(num_key_value_heads=8, head_dim=head_width, norm_eps=1e-5),
    RoundedWidth(),
    Value("tie_word_embeddings|tie_embedding", "embedding.tied", True),
    RotaryPosition(1_000_000.0),
    SomeMixers(
        listed_attention,
        component("attention", "convolution.GatedConv"),
        (Value("conv_L_cache", "attention.conv", 3), Value("conv_bias", "attention.bias", False)),
        older=("full_attn_idxs",),
        kind=CONV,
    ),
    without=("hidden_act", "rms_norm_eps"),
    recipe=activation("SiLU") | {"attention.qk_norm": "head"},
    weights={
        **weights("model.layers.#", LFM2_ATTENTION, ("operator_norm", "ffn_norm"), LFM2_FFN, LFM2_ENDS),
        "blocks.#.attention.query_norm.*": "model.layers.#.self_attn.q_layernorm.*",
        "blocks.#.attention.key_norm.*": "model.layers.#.self_attn.k_layernorm.*",
    },
    mixer_weights={
        tuple(f"blocks.#.attention.{part}.*" for part in ("gate_in", "gate_out", "value")): (
            "model.layers.#.conv.in_proj.*",
            joined(1, 1, 1),
        ),
        "blocks.#.attention.conv.*": "model.layers.#.conv.conv.*",
        "blocks.#.attention.output.*": "model.layers.#.conv.out_proj.*",
    },
)
