"""The tables of Hugging Face's families: what they refuse, and defaults against transformers' own."""

import json
import re
from typing import Any

import pytest
from omegaconf import OmegaConf
from transformers import AutoConfig

from llama_lab.config.grammar import to_override
from llama_lab.hf.by_layer import at_layer, each
from llama_lab.hf.families import FAMILIES, MISSING
from llama_lab.hf.family import Family, flat_settings, model_node
from llama_lab.hf.settings import Settings, equal
from tests.composing import compose_config, options
from tests.hf.theirs import RECIPES, products

LLAMA, *_ = FAMILIES
TINY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 20}


def settings_of(*overrides: str) -> Settings:
    """Our settings of the model that these overrides compose."""
    sizes = ("model.dim=48", "model.n_layers=2", "model.n_heads=6", "model.max_seq_len=20", "size.n_kv_heads=2")
    cfg = compose_config("size=pico", *sizes, "model.vocab_size=61", *overrides)
    return flat_settings(OmegaConf.to_container(cfg.model, resolve=True))


# What published models have that is not the default of their class, where a recipe follows them.
LLAMA_1 = {"rms_norm_eps": 1e-5}
BASE_500K = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
T5_HEAD = ("tie_word_embeddings", "scale_decoder_outputs")  # of which the class says the second alone
PUBLISHED_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_1,
    "llama2": LLAMA_1,
    "llama3": LLAMA_1 | BASE_500K,
    "mistral": {"rms_norm_eps": 1e-5},
    "olmo2": {"rms_norm_eps": 1e-6} | BASE_500K,
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "olmo_hybrid": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "kimi_linear": {"layer_types": [("linear_attention", "full_attention")[i % 4 == 3] for i in range(27)]},
    "lfm2": {"layer_types": [("conv", "conv", "full_attention")[i % 3] for i in range(32)]},
    "bamba": {"mamba_d_state": 128, "attn_layer_indices": [8, 17, 26]},
    "mamba2": {"n_groups": 1, "tie_word_embeddings": True},
    "t5_v1_1": {
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,
        "dense_act_fn": "gelu_new",
        **dict.fromkeys(T5_HEAD, False),
    },
    "granite": {
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 128,
        "logits_scaling": 16.0,
    },
}


@pytest.mark.parametrize("recipe", products(RECIPES, ("llama3", "gpt2", "gpt_oss", "mamba2", "bert", "t5_v1_1")))
def test_a_recipe_is_the_default_of_its_family_but_for_sizes(recipe: str) -> None:
    family = next(f for f in FAMILIES if f.model_type == RECIPES[recipe] and not f.variant)
    defaults = json.loads(AutoConfig.for_model(family.model_type).to_json_string(use_diff=False))
    theirs = family.read_config(defaults | PUBLISHED_SETTINGS.get(recipe, {}))
    sizes = ("vocab_size", "dim", "n_layers", "n_heads", "head_dim", "max_seq_len", "hidden_dim")
    last, kv_heads = at_layer(theirs, theirs["n_layers"] - 1), min(each(theirs, "n_kv_heads"))
    overrides = [f"model.{key}={to_override(last[key])}" for key in sizes] + [f"size.n_kv_heads={kv_heads}"]
    if isinstance(theirs["hidden_dim"], list):
        overrides.append(f"+pattern.dense.hidden_dim={theirs['hidden_dim'][0]}")
    if windows := [window for window in each(theirs, "attention.window") if window]:
        overrides.append(f"model.attention.window={windows[0]}")
    cfg = compose_config(f"arch={recipe}", *overrides)
    ours = flat_settings(OmegaConf.to_container(cfg.model, resolve=True))
    assert ours.keys() == theirs.keys()
    assert {key: (ours[key], value) for key, value in theirs.items() if not equal(ours[key], value)} == {}
    assert [] in [own.obstacles(ours)[0] for own in FAMILIES if own.model_type == family.model_type], "it can leave"


def test_every_recipe_has_a_family_but_three() -> None:
    assert set(options("arch")) - RECIPES.keys() == {"transformer2017", "vanilla", "palm"}


# What a model needs to have no experts, where its family's default does.
DENSE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 32},
    "mistral4": {"first_k_dense_replace": 36},
    "afmoe": {"num_dense_layers": 32},
    "qwen3_next": {"mlp_only_layers": list(range(48))},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.model_type}{'*' * bool(family.variant)}")
def test_a_setting_that_is_absent_is_what_transformers_takes_for_it(family: Family) -> None:
    """Both of a config without a setting, and of one with every setting at its default."""
    needed = {**family.variant, **DENSE.get(family.model_type, {})}
    theirs = json.loads(AutoConfig.for_model(family.model_type, **needed).to_json_string(use_diff=False))
    full, empty = family.read_config(theirs), family.read_config(needed)
    if family.model_type == "bloom":
        full["max_seq_len"] = empty["max_seq_len"]  # of ALiBi, which has no limit
    assert full == empty
    assert family.obstacles(empty)[0] == [], "it can hold what it was read from"
    assert flat_settings(model_node(empty, family.model)) == empty


OBSTACLES = {
    "position=alibi": "position=Alibi (Rope)",
    "block=sandwich": "block=Sandwich (PreNorm)",
    "ffn=relu2": "ffn=FeedForward (GatedFeedForward)",
    "norm=layernorm": "norm=LayerNorm (RMSNorm)",
    "model.attention.softcap=5": "attention.softcap=5 (null)",
    "model.embedding.scale=2": "embedding.scale=2 (1.0)",
    "attention=mla": "attention=LatentAttention (GroupedQueryAttention)",
    "model.attention.sinks=true": "attention.sinks=true (false)",
}


@pytest.mark.parametrize("override", OBSTACLES)
def test_a_switch_that_llama_does_not_have_stands_in_the_way(override: str) -> None:
    assert LLAMA.obstacles(settings_of("arch=llama2", override))[0] == [OBSTACLES[override]]


def test_how_fast_the_bias_of_the_choice_moved_is_of_training_but_not_whether_there_is_one() -> None:
    family = next(family for family in FAMILIES if family.model_type == "deepseek_v3")
    assert family.obstacles(settings_of("arch=deepseek_v3", "model.ffn.balance_bias=0.01"))[0] == []
    (obstacle,) = family.obstacles(settings_of("arch=deepseek_v3", "model.ffn.balance_bias=null"))[0]
    assert obstacle.startswith("ffn.balance_bias=")


DEFAULT = {"rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {"short_factor": [1.0], "long_factor": [1.0]}
# By what is told of the key, the model_type, and the settings.
NO_SWITCH: dict[str, tuple[str, dict[str, Any]]] = {
    "full_attention: no switch for positions by kind": ("llama", {"rope_parameters": {"full_attention": DEFAULT}}),
    "rope_scaling type proportional: no switch": ("llama", {"rope_scaling": {"type": "proportional"}}),
    "attention_factor=0.5: no switch": ("llama", {"rope_scaling": {**YARN, "attention_factor": 0.5}}),
    "hidden_act=mish: no switch": ("llama", {"hidden_act": "mish"}),
    "quantization_config.bits=4: is no setting of llama": ("llama", {"quantization_config": {"bits": 4}}),
    "no switch for layers that are all of one kind": ("olmo_hybrid", {"layer_types": ["full_attention"] * 32}),
    "no switch for none": ("kimi_linear", {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}),
    "num_dense_layers=1: no switch for the experts": ("afmoe", {"score_func": "sigmoid"}),
    "first_k_dense_replace=0: no switch for the experts": ("deepseek_v2", {}),
    "rope_parameters: has no llama_4_scaling_beta": ("ministral3", {"rope_parameters": {"rope_type": "default"}}),
    "of 96 dimensions is 31.999968, which transformers rounds down; ": (
        "nemotron",
        {"head_dim": 96, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.333333}},
    ),
    "needs a scaling and a share of 0.5, not default and 0.333333": (
        "mistral4",
        {"rope_theta": 10.0, "rope_scaling": {**DEFAULT, "partial_rotary_factor": 0.333333}, **DENSE["mistral4"]},
    ),
}


@pytest.mark.parametrize("message", NO_SWITCH)
def test_a_setting_that_we_cannot_express_is_refused_by_name(message: str) -> None:
    model_type, config = NO_SWITCH[message]
    family = next(family for family in FAMILIES if family.model_type == model_type and not family.variant)
    with pytest.raises(ValueError, match=re.escape(message)):
        family.read_config(config)


def test_files_of_older_versions_are_read_as_newer_ones() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    older = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    newer = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert LLAMA.read_config(TINY | older) == LLAMA.read_config(TINY | newer)
    neox = next(family for family in FAMILIES if family.model_type == "gpt_neox")
    assert neox.read_config({"rotary_pct": 0.5, "rotary_emb_base": 5e5}) == neox.read_config(
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    )


def test_ntk_scaling_is_written_as_a_larger_theta() -> None:
    settings = settings_of("arch=llama", "position=rope_ntk", "model.position.scaling.factor=4")
    assert LLAMA.obstacles(settings)[0] == []
    assert LLAMA.write_config(settings)["rope_parameters"]["rope_theta"] == pytest.approx(10000 * 4 ** (8 / 6))


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("gemma3_text", "arch=gemma3 model.n_layers=6 position=rope_ntk"),  # two thetas
        ("smollm3", "arch=smollm3 model.n_layers=4 position=rope_ntk"),  # none in some layers
        ("qwen3_next", "arch=qwen3_next model.n_layers=4 pattern.attention.position=rope_ntk"),
        ("deepseek_v3", "arch=llama attention=mla norm=rmsnorm_1e-6"),
        ("granite_swa", "arch=llama model.attention.sinks=true"),
        ("qwen3_5_text", "arch=llama norm=rmsnorm_offset attention=gqa_qk_norm model.attention.gate=element"),
    ],
)
def test_a_mix_has_the_class_that_can_hold_it(model_type: str, overrides: str) -> None:
    settings = settings_of(*overrides.split())
    assert model_type in {family.model_type for family in FAMILIES if not family.obstacles(settings)[0]}


def test_a_family_without_a_switch_is_none_that_we_have() -> None:
    assert not MISSING.keys() & {family.model_type for family in FAMILIES}
    assert all(AutoConfig.for_model(model_type) for model_type in MISSING)
