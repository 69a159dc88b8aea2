"""Recurrent mixers, and hybrids of these with attention; see `family.py`."""

import math
from dataclasses import dataclass
from fractions import Fraction

from . import llama_families as llama
from .by_layer import BIAS_STEP, FULL, LINEAR, NOPE, SomeExperts, SomeMixers, every, numbered
from .family import Family, Fusion, Weights
from .rotary import RotaryPosition
from .settings import (
    INFINITY,
    DenseByKind,
    DenseLayers,
    Fixed,
    Multiple,
    Positive,
    Setting,
    Settings,
    Unread,
    Value,
    below,
    nest,
    number,
)
from .terms import (
    FFN,
    GATE_AND_UP,
    GATE_UP,
    GEMMA_NORM,
    LLAMA_ATTENTION,
    LLAMA_EXPERTS,
    MIXTURE,
    RMS_NORM,
    ROUTING,
    STACKED,
    activation,
    block,
    component,
    expert_weights,
    fields,
    head_width,
    joined,
    like,
    llama_sizes,
    of_each_expert,
    query_key_norms,
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


def decay_and_output(mixer: str, norm: str, output: str) -> Weights:
    """Where a recurrent mixer keeps its decay, the norm of its heads, and its output."""
    ours = ("decay.rate", "decay.bias", "norm.*", "output.*")
    theirs = ("A_log", "dt_bias", f"{norm}.*", f"{output}.*")
    return {f"blocks.#.attention.{own}": f"{mixer}.{kept}" for own, kept in zip(ours, theirs, strict=True)}


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
        **decay_and_output(LINEAR_ATTENTION, "norm", "out_proj"),
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


def of_states(own: Settings) -> int:
    """The width of the keys, or of the queries, of all groups of a state space together."""
    return int(own["attention.n_groups"] * own["attention.key_dim"])


MAMBA: Settings = component("attention", "recurrent.Mamba2")


def state_space(names: str, state: int, groups: int) -> tuple[Setting, ...]:
    """The settings of Mamba 2's mixer by their `names`, with the defaults of a family."""
    heads, width, n_groups, key_dim, conv, expand, conv_bias, bias = names.split()
    return (
        Value(heads, "attention.value_heads", 128),
        Value(n_groups, "attention.n_groups", groups),
        Value(key_dim, "attention.key_dim", state),
        Value(conv, "attention.conv", 4),
        Multiple(expand, "attention.value_dim", 2, by=lambda own: Fraction(own["attention.value_heads"], own["dim"])),
        Fixed(width, lambda ours: ours.get("attention.value_dim")),
        Fixed(conv_bias, True),
        Fixed(bias, False),
        Fixed("hidden_act", "silu"),  # of convolutions and gates
        Fixed("time_step_limit", [0.0, INFINITY]),
    )


def state_space_weights(mixer: str) -> Weights:
    """Where Mamba 2's mixer is kept."""
    part = "blocks.#.attention"
    heads = tuple(f"{part}.{name}" for name in ("value", "key", "query"))
    return {
        (f"{part}.gate.*", *(f"{head}.project.*" for head in heads), f"{part}.decay.step.*"): (
            f"{mixer}.in_proj.*",
            joined(of_values, of_values, of_states, of_states, "attention.value_heads"),
        ),
        tuple(f"{head}.conv.*" for head in heads): (f"{mixer}.conv1d.*", joined(of_values, of_states, of_states)),
        f"{part}.skip.weight": f"{mixer}.D",
        **decay_and_output(mixer, "norm", "out_proj"),
    }


MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    RMS_NORM
    | (NOPE | block("MixerOnly") | {"ffn": None, "hidden_dim": None})
    | {"n_heads": lambda own: max(1, int(own["attention.value_heads"]) // 2)},  # as of attention=mamba2; unread
    (
        *fields(vocab_size=32768, hidden_size=4096, num_hidden_layers=64, layer_norm_epsilon=1e-5),
        *fields(tie_word_embeddings=False),
        Value("seq_length", "max_seq_len", 2048),  # which transformers does not read: states have no limit
        *state_space("num_heads head_dim n_groups state_size conv_kernel expand use_conv_bias use_bias", 128, 8),
        Unread("chunk_size|time_step_rank|time_step_min|time_step_max|time_step_floor"),
        Unread("residual_in_fp32|rescale_prenorm_residual"),
    ),
    {
        "embedding.tokens.weight": "backbone.embeddings.weight",
        "blocks.#.attention_norm.*": "backbone.layers.#.norm.*",
        **state_space_weights("backbone.layers.#.mixer"),
        "norm.*": "backbone.norm_f.*",
        "embedding.head.*": "lm_head.*",
    },
    attention=MAMBA,
)


BAMBA_FFN = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
BAMBA_NORMS, BAMBA_ENDS = ("input_layernorm", "pre_ff_layernorm"), ("model.embed_tokens", "model.final_layernorm")
BAMBA_NAMES = (
    "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias"
)
BAMBA = llama.BASE.derive(
    "bamba",
    "BambaForCausalLM",
    *llama_sizes(128000, 4096, 32, 32, 262144, 14336, 8),
    *fields(head_dim=head_width, rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False),
    RotaryPosition(fraction=0.5, older=("rope_theta",)),
    SomeMixers(
        numbered("attn_layer_indices", LINEAR, is_every=False),
        MAMBA,
        state_space(BAMBA_NAMES, 256, 1),
        numbers="attn_layer_indices",
        absent={"mamba_n_heads": 1, "mamba_d_head": "auto"},
    ),
    Unread("mamba_chunk_size|num_logits_to_keep|z_loss_coefficient"),
    weights=weights("model.layers.#", LLAMA_ATTENTION, BAMBA_NORMS, BAMBA_FFN, BAMBA_ENDS),
    mixer_weights=state_space_weights("model.layers.#.mamba"),
)


@dataclass(frozen=True)
class OptionalRotary(RotaryPosition):
    """RoPE, or no position encoding where its theta is null."""

    def read(self, config: Settings, ours: Settings) -> Settings:
        """See `Setting`."""
        rope = self.merged(nest(below(config, self.names)))
        theta = rope.get("rope_theta", config.get("rope_theta", self.theta))
        return NOPE if theta is None else super().read(config, ours)

    def write(self, ours: Settings) -> Settings:
        """See `Setting`."""
        return super().write(ours) or {"rope_parameters.rope_type": "default", "rope_parameters.rope_theta": None}


def last_of_four(config: Settings, ours: Settings) -> list[str]:
    """Every fourth layer with attention, or the last of fewer, for `SomeMixers`."""
    period = min(4, ours["n_layers"])
    return [LINEAR if (layer + 1) % period else FULL for layer in range(ours["n_layers"])]


def apart(mixer: str) -> Weights:
    """Where a gated delta rule is kept whose queries, keys and values have a tensor each."""
    return {
        **{project: f"{mixer}.{part[0]}_proj.*" for project, part in zip(PROJECTIONS, PARTS, strict=True)},
        **{conv: f"{mixer}.{part[0]}_conv1d.*" for conv, part in zip(CONVS, PARTS, strict=True)},
        BETA: f"{mixer}.b_proj.*",
        **decay_and_output(mixer, "o_norm", "o_proj"),
    }


OLMO_HYBRID = llama.OLMO2.derive(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    *llama_sizes(100352, 3840, 32, 30, 65536, 11008),
    *fields(head_dim=head_width, rms_norm_eps=1e-6),
    OptionalRotary(),
    SomeMixers(
        last_of_four,
        DELTA | block("PreNorm") | {"attention.norm_eps": 1e-5},
        (
            *fields(linear_num_key_heads=like("n_heads"), linear_num_value_heads=like("n_heads")),
            *fields(linear_key_head_dim=lambda ours: int(0.75 * ours["dim"] / ours["attention.key_heads"])),
            *fields(linear_value_head_dim=lambda ours: 2 * ours["attention.key_dim"], linear_conv_kernel_dim=4),
            Value("linear_allow_neg_eigval", "attention.negative", True),
            Fixed("hidden_act", "silu"),  # of convolutions, too
        ),
        both=True,
    ),
    Unread("linear_a_log_min|linear_a_log_max|linear_dt_min|linear_dt_max|linear_dt_init_floor"),
    weights={"blocks.#.attention_norm.*": "model.layers.#.feedforward_layer_norm.*"},  # as they save it
    other_weights={CONVS: (f"{LINEAR_ATTENTION}.conv1d.*", QUERIES_KEYS_VALUES)},
    mixer_weights={
        "blocks.#.attention_norm.*": "model.layers.#.attention_layer_norm.*",
        "blocks.#.ffn_norm.*": "model.layers.#.feedforward_layer_norm.*",
        **apart(LINEAR_ATTENTION),
        GATE: f"{LINEAR_ATTENTION}.g_proj.*",
        STEP: f"{LINEAR_ATTENTION}.a_proj.*",
    },
    renamed={"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"},
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
        numbered("full_attn_idxs", CONV, is_every=True),
        component("attention", "convolution.GatedConv"),
        (Value("conv_L_cache", "attention.conv", 3), Value("conv_bias", "attention.bias", False)),
        older=("full_attn_idxs",),
        kind=CONV,
    ),
    without=("hidden_act", "rms_norm_eps"),
    recipe=activation("SiLU") | {"attention.qk_norm": "head"},
    weights={
        **weights("model.layers.#", LFM2_ATTENTION, ("operator_norm", "ffn_norm"), LFM2_FFN, LFM2_ENDS),
        **query_key_norms("layernorm"),
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


def kimi_layers(config: Settings, ours: Settings) -> list[str]:
    """Kimi Linear's kinds of layers, by lists that count from 1, default: every fourth with attention, from the fifth.

    Either for `SomeMixers`; a layer in no list has no kind.
    """
    layers = range(ours["n_layers"])
    linear, full = (config.get(f"linear_attn_config.{name}") for name in ("kda_layers", "full_attn_layers"))
    if linear is None or full is None:
        return [FULL if layer and layer % 4 == 0 else LINEAR for layer in layers]
    return [LINEAR if layer + 1 in linear else FULL if layer + 1 in full else "none" for layer in layers]


KIMI_FFN, KIMI_ATTENTION = "model.layers.#.block_sparse_moe", "model.layers.#.self_attn"  # as they save dense ones, too
RATES = Fusion(lambda tensor, _: (tensor.flatten(),), lambda parts, _: parts[0].view(1, 1, -1, 1))
KIMI_LINEAR = llama.DEEPSEEK_V3.derive(
    "kimi_linear",
    "KimiLinearForCausalLM",
    *fields(vocab_size=163840, hidden_size=2304, num_hidden_layers=27, num_attention_heads=32, rms_norm_eps=1e-5),
    *fields(q_lora_rank=lambda _: None),  # of None itself, a rank would be written as a float
    Value("max_position_embeddings|model_max_length", "max_seq_len", 1048576),
    SomeExperts(
        DenseByKind("mlp_layer_types|first_k_dense_replace", 1),
        MIXTURE | {"experts.scores": "sigmoid", "experts.balance_bias": BIAS_STEP},
        sparse=(
            *fields(moe_intermediate_size=1024, routed_scaling_factor=2.446, topk_group=1),
            Value("num_experts_per_tok|num_experts_per_token", "experts.top_k", 8),
            Value("norm_topk_prob|moe_renormalize", "experts.normalise", True, nullable=True),
            Value("n_group|num_expert_group", "experts.n_groups", 1),
            Positive("n_shared_experts|num_shared_experts", "experts.n_shared", 1),
            Value("num_local_experts|num_experts", "experts.n_experts", 256),
        ),
        plain=fields(intermediate_size=9216),
    ),
    SomeMixers(
        kimi_layers,
        DELTA | {"attention.decay": "channel", "attention.gate": "sigmoid"},
        (
            Value("linear_head_dim|linear_attn_config.head_dim", ("attention.key_dim", "attention.value_dim"), 128),
            Value(
                "linear_num_heads|linear_attn_config.num_heads", ("attention.key_heads", "attention.value_heads"), 32
            ),
            Value("linear_conv_kernel_dim|linear_attn_config.short_conv_kernel_size", "attention.conv", 4),
            Fixed("hidden_act", "silu"),  # of convolutions, too
        ),
        older=("linear_attn_config",),
    ),
    Unread("head_dim"),
    Unread("tie_word_embeddings", False),  # their head is never the token table
    Unread("moe_router_activation_func|use_grouped_topk|mla_use_nope"),
    without=("first_k_dense_replace", "rope_parameters", "rope_interleave"),
    recipe=NOPE | {"attention.scale": None},
    weights={
        **{f"blocks.#.ffn.{part}.*": f"{KIMI_FFN}.{part}_proj.*" for part in FFN},
        **{f"blocks.#.ffn.shared.{part}.*": f"{KIMI_FFN}.shared_experts.{part}_proj.*" for part in FFN},
        **expert_weights(KIMI_FFN, ("w1", "w3", "w2"), "gate"),
        "blocks.#.ffn.choice_bias": f"{KIMI_FFN}.gate.e_score_correction_bias",
    },
    other_weights={
        GATE_AND_UP: (f"{KIMI_FFN}.experts.gate_up_proj", of_each_expert(GATE_UP)),
        "blocks.#.ffn.experts.down.weight": f"{KIMI_FFN}.experts.down_proj",
        CONVS: (f"{KIMI_ATTENTION}.conv1d.*", QUERIES_KEYS_VALUES),
    },
    mixer_weights={
        **apart(KIMI_ATTENTION),
        "blocks.#.attention.decay.rate": (f"{KIMI_ATTENTION}.A_log", RATES),
        **{f"blocks.#.attention.gate.project.{i}.*": f"{KIMI_ATTENTION}.g_{ab}_proj.*" for i, ab in enumerate("ab")},
        **{f"blocks.#.attention.decay.step.{i}.*": f"{KIMI_ATTENTION}.f_{ab}_proj.*" for i, ab in enumerate("ab")},
    },
    renamed={r"\.mlp\.": ".block_sparse_moe.", r"\.forget_gate\.": "."},
)
