"""Tiny random models of transformers, one or more for every family, with noise on all of their parameters."""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from llama_lab.hf.families import FAMILIES
from llama_lab.hf.families import RECIPES as OTHER_NAMES
from llama_lab.model import Decoder, Sampling, generate
from tests.composing import options

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# The `model_type` of each recipe that has one
RECIPES = {recipe: OTHER_NAMES.get(recipe, recipe) for recipe in options("arch")}
RECIPES = {recipe: name for recipe, name in RECIPES.items() if name in {family.model_type for family in FAMILIES}}
VOCAB, CONTEXT, PROMPT = 61, 20, 5
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": None,
}
ALL_HEADS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
WIDE_HEADS = LLAMA | {"head_dim": 12}
GPT = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": CONTEXT}
FALCON = {key: value for key, value in ALL_HEADS.items() if key != "intermediate_size"}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": CONTEXT}
MPT = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": CONTEXT}
FULL, SLIDING = "full_attention", "sliding_attention"
GPT_NEO = FALCON | {"window_size": 7}
LATENT = ALL_HEADS | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK = LATENT | {"first_k_dense_replace": 3}
OPT = FALCON | {"ffn_dim": 80}
CONVS = {"layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False}
ROUNDED = {"full_attn_idxs": [2], "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 10, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MAMBA2 = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "seq_length": CONTEXT, "pad_token_id": None},
    **{"num_heads": 6, "head_dim": 16, "state_size": 10, "n_groups": 2},
}
BAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 3}
FEW_DENSE = {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
SHARED = {"shared_expert_intermediate_size": 48}
SMALL = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
KIMI = (
    {key: value for key, value in LATENT.items() if key != "q_lora_rank"}
    | SMALL
    | {"num_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "linear_head_dim": 10}
    | {"linear_num_heads": 4, "layer_types": ["linear_attention", FULL, "linear_attention"]}
)
LISTED = {"kda_layers": [1, 2], "full_attn_layers": [3], "num_heads": 3, "head_dim": 6, "short_conv_kernel_size": 3}


def rope(kind: str, theta: float | None = 10000.0, **settings: Any) -> dict[str, Any]:
    """A RoPE with scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


SHORT, LONG = [1.0, 1.1, 1.3, 1.6], [1.5, 2.0, 3.0, 5.0]
LONGROPE = LLAMA | rope("longrope", short_factor=SHORT, long_factor=LONG) | {"eos_token_id": None}
HALF, QUARTER = rope("default", partial_rotary_factor=0.5), rope("default", partial_rotary_factor=0.25)
BY_LAYER = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
YARN = {"factor": 4.0, "beta_slow": 0.01}
LONGER, FIVE, SEVEN = {"max_position_embeddings": 40}, {"num_hidden_layers": 5}, {"num_hidden_layers": 7}
MIXED = {"layer_types": [FULL, SLIDING, FULL]}
ALL_FULL = {"layer_types": [FULL] * 3}
SLIDES = {"sliding_window": 7}
QWEN2 = LLAMA | SLIDES | {"use_sliding_window": True}
GRANITE = LLAMA | {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
GEMMA = WIDE_HEADS | {"query_pre_attn_scalar": 12}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
COHERE = LLAMA | {"logit_scale": 0.8}
FALCON_40B = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
FIVE_WINDOWS = SLIDES | FIVE
MPT_CLIPPED = MPT | {"attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.6}}
GPT_NEO_LAYERS = {"attention_types": [[["global", "local"], 1], [["local"], 1]]}
AFMOE = FIVE_WINDOWS | {"num_dense_layers": 5, "mup_enabled": True, "attention_bias": True}
MULTIPLIED = {"mscale": 0.7, "mscale_all_dim": 1.4}
BETA = {"llama_4_scaling_beta": 0.5}
OF_HALVES = {"q_lora_rank": None, "rope_interleave": False}
THETAS = {"layer_rope_theta": [0, 100.0, 100.0, 10000.0, 0]}
SCALED_MINICPM3 = {"scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 24, "mlp_bias": True}
PLAIN_MINICPM3 = {"scale_depth": None, "dim_model_base": None, "v_head_dim": None, "rms_norm_eps": 1e-4}
MINISTRAL3 = rope("yarn", **YARN, **BETA, original_max_position_embeddings=3, mscale=1.0, mscale_all_dim=1.0)

SOME_EXPERTS = {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": True}
OF_WHOLES = {"original_max_position_embeddings": 10, "beta_fast": 2.0, "truncate": False}
GPT_OSS = {"swiglu_limit": 0.5} | rope("yarn", **YARN, **OF_WHOLES)
GPT_OSS_PLAIN = {"swiglu_alpha": 1.2, "attention_bias": False} | ALL_FULL | rope("default")

T5 = {
    **{"vocab_size": VOCAB, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 3, "num_heads": 6},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "n_positions": CONTEXT},
    **{"decoder_start_token_id": 0, "pad_token_id": None, "dropout_rate": 0.0},
}
T5_V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}

# A case is a family's model_type, with which its name begins, and settings.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied, biases, heads of another width": WIDE_HEADS
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama, linear scaling": LLAMA | rope("linear", factor=4.0),
    "llama, dynamic scaling": LLAMA | rope("dynamic", factor=4.0),
    "llama, yarn": LLAMA | LONGER | rope("yarn", **YARN, original_max_position_embeddings=10, beta_fast=2.0),
    "llama, yarn, mscale": LLAMA | LONGER | rope("yarn", **YARN, **MULTIPLIED),
    "llama, yarn, attention factor": LLAMA | rope("yarn", factor=4.0, attention_factor=1.7),
    "llama, llama3 scaling": LLAMA
    | LONGER
    | rope("llama3", factor=4.0, original_max_position_embeddings=10, low_freq_factor=0.05, high_freq_factor=2.0),
    "mistral": LLAMA | SLIDES,
    "ministral": WIDE_HEADS | SLIDES | {"layer_types": [SLIDING, FULL, SLIDING]},
    "gpt1": GPT,
    "bert": FALCON | {"intermediate_size": 80},
    "gpt2": GPT,
    "gpt2, unscaled scores": GPT | {"scale_attn_weights": False},
    "gpt2, scores divided by the number of the layer": GPT | {"scale_attn_by_inverse_layer_idx": True},
    "gpt2, untied": GPT | {"tie_word_embeddings": False, "n_inner": 80},
    "opt": OPT,
    "opt, post-norm, without biases": OPT | {"do_layer_norm_before": False, "enable_bias": False},
    "ctrl": GPT | {"dff": 80},
    "gpt_neox": ALL_HEADS | QUARTER,
    "gpt_neox, not parallel": ALL_HEADS | {"use_parallel_residual": False, "attention_bias": False},
    "bloom": BLOOM,
    "falcon": FALCON,
    "falcon, all heads": FALCON | {"multi_query": False, "bias": True, "parallel_attn": False},
    "falcon, alibi": FALCON | {"alibi": True, "parallel_attn": False},
    "falcon 40B": FALCON_40B,
    "falcon 11B": FALCON_40B | {"num_ln_in_parallel_attn": 1},
    "olmo2": LLAMA,
    "gemma": WIDE_HEADS,
    "gemma2": GEMMA | SLIDES | CAPPED,
    "gemma3": GEMMA | SLIDES | SEVEN,
    "gemma3, in a window": WIDE_HEADS | {"sliding_window": CONTEXT, "layer_types": [SLIDING, SLIDING, FULL]},
    "gemma3, scaled": GEMMA | SLIDES | MIXED | {"rope_parameters": BY_LAYER},
    "olmo3": LLAMA | FIVE_WINDOWS,
    "exaone4": WIDE_HEADS | FIVE_WINDOWS,
    "smollm3": LLAMA | FIVE,
    "smollm3, listed": LLAMA | {"no_rope_layers": [0, 1, 0]},
    "qwen2, some windows": QWEN2 | {"max_window_layers": 2},
    "qwen2": LLAMA,
    "qwen3": WIDE_HEADS,
    "stablelm": LLAMA | QUARTER,
    "stablelm, parallel": LLAMA | HALF | {"use_parallel_residual": True, "use_qkv_bias": True},
    "stablelm, QK norm": LLAMA | {"qk_layernorm": True},
    "starcoder2": LLAMA | SLIDES,
    "gpt_bigcode": GPT,
    "gpt_bigcode, all heads": GPT | {"multi_query": False},
    "phi": LLAMA | HALF,
    "phi, QK norm": LLAMA | {"qk_layernorm": True},
    "phi3, longrope, whose context is longer": LONGROPE
    | {"max_position_embeddings": 4 * CONTEXT, "original_max_position_embeddings": CONTEXT},
    "phi3, longrope, short": LONGROPE | {"original_max_position_embeddings": CONTEXT},
    "phi3": LLAMA | {"eos_token_id": None},
    "gptj": GPT | {"rotary_dim": 4},
    "mpt": MPT,
    "mpt, clipped": MPT_CLIPPED,
    "glm": WIDE_HEADS | HALF | {"eos_token_id": None},
    "granite": GRANITE | {"logits_scaling": 0.25},
    "olmo": LLAMA,
    "olmo, clipped": LLAMA | {"clip_qkv": 0.4},
    "cohere": COHERE,
    "cohere, QK norm": LLAMA | {"use_qk_norm": True, "logit_scale": 1.5},
    "cohere2": COHERE | FIVE_WINDOWS,
    "cohere2, listed": COHERE | MIXED | {"sliding_window": 40, "attention_bias": True},
    "gpt_neo": GPT_NEO | GPT_NEO_LAYERS,
    "cwm": WIDE_HEADS | FIVE_WINDOWS | {"mlp_bias": True, "bos_token_id": 0},
    "nanochat": LLAMA | {"final_logit_softcapping": 3.0},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, queries of no latent, halves, yarn": DEEPSEEK | OF_HALVES | rope("yarn", **YARN, **MULTIPLIED),
    "deepseek_v2, yarn": DEEPSEEK | rope("yarn", **YARN, mscale=0.707, mscale_all_dim=0.707),
    "youtu, yarn without its own mscale": LATENT | rope("yarn", factor=4.0, mscale_all_dim=1.0),
    "granite_swa": GRANITE | FIVE_WINDOWS | THETAS,
    "qwen3_5": WIDE_HEADS | ALL_FULL | {"head_dim": 16},
    "qwen3_5, hybrid": WIDE_HEADS | DELTA | FIVE | {"head_dim": 16},
    "qwen3_next": WIDE_HEADS | ALL_FULL | HALF | {"mlp_only_layers": [0, 1, 2], "tie_word_embeddings": True},
    "qwen3_next, experts": WIDE_HEADS | DELTA | HALF | SPARSE | SMALL | FIVE | SHARED | {"mlp_only_layers": [1]},
    "mamba2": MAMBA2,
    "bamba": LLAMA | BAMBA | {"attn_layer_indices": [1]},
    "bamba, biases, groups": LLAMA
    | BAMBA
    | {"attn_layer_indices": [0], "mamba_n_groups": 2, "attention_bias": True, "mlp_bias": True},
    "mamba2, tied, one group": MAMBA2
    | {"num_heads": 9, "n_groups": 1, "expand": 3, "conv_kernel": 3, "tie_word_embeddings": True},
    "olmo_hybrid": LLAMA | FIVE | {"linear_allow_neg_eigval": False, "linear_value_head_dim": 6},
    "olmo_hybrid, no positions": WIDE_HEADS
    | DELTA
    | FIVE
    | {"attention_bias": True, "linear_value_head_dim": 4}
    | rope("default", theta=None),
    "kimi_linear": KIMI | {"q_lora_rank": 28, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "kimi_linear, listed": KIMI
    | {"first_k_dense_replace": 2, "layer_types": None, "linear_attn_config": LISTED, "moe_renormalize": False},
    "lfm2": LLAMA | CONVS,
    "lfm2, rounded, biases, untied": LLAMA
    | ROUNDED
    | {"block_ff_dim": 90, "conv_bias": True, "conv_L_cache": 4, "tie_embedding": False},
    "afmoe": WIDE_HEADS | AFMOE,
    "ministral3": WIDE_HEADS | MINISTRAL3 | SLIDES,
    "ministral3, plain": LLAMA | rope("default", **BETA, original_max_position_embeddings=4),
    "mistral4, yarn": DEEPSEEK | rope("yarn", **YARN, **BETA, **MULTIPLIED, original_max_position_embeddings=6),
    "minicpm3": LATENT | SCALED_MINICPM3,
    "minicpm3, plain": LATENT | PLAIN_MINICPM3,
    "apertus": WIDE_HEADS | {"attention_bias": True},
    "apertus, gelu": LLAMA | {"hidden_act": "gelu"} | rope("default"),
    "nemotron, a fraction that is rounded": WIDE_HEADS | {"head_dim": 16} | rope("default", partial_rotary_factor=0.4),
    "nemotron": WIDE_HEADS | HALF,
    "mixtral": LLAMA | SLIDES | {"num_local_experts": 4},
    "olmoe": LLAMA | SPARSE,
    "olmoe, normalised": ALL_HEADS | SPARSE | {"norm_topk_prob": True, "hidden_act": "gelu"},
    "qwen3_moe": WIDE_HEADS | SPARSE | SMALL,
    "qwen3_moe, some experts": WIDE_HEADS | SPARSE | SMALL | FIVE | SOME_EXPERTS,
    "deepseek_v3, experts": LATENT | FEW_DENSE | SMALL,
    "gpt_oss": WIDE_HEADS | SPARSE | SLIDES | GPT_OSS,
    "gpt_oss, plain": LLAMA | SPARSE | GPT_OSS_PLAIN,
    "t5": T5,
    "t5, 1.1": T5 | T5_V1_1,
}
TYPES = {"gpt1": "openai-gpt", "falcon 40B": "falcon", "falcon 11B": "falcon"}
TYPES |= {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
CASES = {name: (TYPES.get(name.partition(",")[0], name.partition(",")[0]), own) for name, own in SETTINGS.items()}

# One of each kind of family, for the quick line: all that tests of every case need, `matrix` has.
KINDS = ("llama, yarn", "gpt2", "falcon 40B", "gemma3, scaled", "deepseek_v2, yarn", "gpt_oss")
KINDS += ("qwen3_next, experts", "mamba2", "bert", "t5, 1.1")


def products(names: Iterable[str], quick: Container[str] = KINDS) -> list[Any]:
    """Names for a test; those that are not `quick` are marked `matrix`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.matrix) for name in names]


def their_model(case: str, **changes: Any) -> PreTrainedModel:
    """The model of a case, some of its settings changed."""
    model_type, settings = CASES[case]
    ends = {"bos_token_id": None, "eos_token_id": None}
    return built(AutoConfig.for_model(model_type, **ends | settings | changes))


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, with noise on all of its parameters."""
    config._attn_implementation = kernel_of(config)
    architecture = next(family.architecture for family in FAMILIES if family.model_type == config.model_type)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, architecture)(config).eval()
        if not getattr(config, "scale_decoder_outputs", True):  # the files of T5 1.1 have a head, its class none
            model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
        biases = (buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
        for weight in (*model.parameters(), *biases):
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def kernel_of(config: PreTrainedConfig) -> str:
    """Their written-out attention; with ALiBi, Falcon's would add the biases twice (transformers 5.23)."""
    return "sdpa" if getattr(config, "alibi", False) else "eager"


def reload(folder: Path) -> PreTrainedModel:
    """The model that transformers loads from a folder, with every weight in it, and no other."""
    config = AutoConfig.from_pretrained(folder)
    architecture = getattr(transformers, config.architectures[0])
    model, info = architecture.from_pretrained(folder, output_loading_info=True, attn_implementation=kernel_of(config))
    assert not any(info.values()), info
    return model.eval()


def their_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits `(B, T, V)`; a source is the tokens from the last."""
    given = {"input_ids": tokens.flip(1), "decoder_input_ids": tokens}
    logits = model(**given if model.config.is_encoder_decoder else {"input_ids": tokens}).logits
    assert isinstance(logits, Tensor)
    return logits


def our_logits(model: Decoder, tokens: Tensor) -> Tensor:
    """The same by ours."""
    logits = model(tokens, None, *[tokens.flip(1)] * (len(model.towers) - 1))
    assert isinstance(logits, Tensor)
    return logits


def their_text(model: PreTrainedModel, prompts: Tensor) -> list[list[int]]:
    """What follows the prompts by `generate`, greedily, up to the context."""
    n = prompts.shape[1]
    settings = GenerationConfig(max_new_tokens=CONTEXT - n, do_sample=False, pad_token_id=0, decoder_start_token_id=0)
    written = model.generate(prompts, settings, attention_mask=torch.ones_like(prompts))
    return written[:, 1 if model.config.is_encoder_decoder else n :].tolist()


def our_text(model: Decoder, prompts: Tensor, eot_id: int | None = None) -> list[list[int]]:
    """The same by ours."""
    n = prompts.shape[1]
    steps = generate(model, prompts.tolist(), CONTEXT - n, Sampling(temperature=0), eot_id)
    return torch.tensor(list(steps)).T.tolist()
