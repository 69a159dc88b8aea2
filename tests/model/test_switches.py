"""Every setting of every component does something or is refused, and what cannot work is refused in one line."""

import re
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_lab.config.components import build_model
from llama_lab.config.schema import flatten
from llama_lab.model import measure_cost
from llama_lab.training.prepare import check_complete
from llama_lab.util.errors import ConfigError
from tests.composing import END_OF_TEXT, compose_config, decoder, kinds, options, softmaxes
from tests.model.cases import GROUPS

NODES = {group: [f"model.{key}" for key in keys] for group, keys in GROUPS.items()}
# Long enough for every bucket of relative positions, and heads wide enough for scalings to choose among frequencies.
LENGTH = 256
BASE = ("size=pico", f"model.max_seq_len={LENGTH}", "model.head_dim=64")
NEEDS = {one: ["position=none"] for one in options("attention") if one not in softmaxes()}
NEEDS["rope_yarn"] = ["model.position.scaling.original_max_seq_len=4096"]  # else its ramp starts at 0 whatever is set
# What to change a setting to where it is null, or where the generic change is refused or lost in rounding.
SUITABLE: dict[str, Any] = {
    "fraction": 0.75,
    "offset": 2,
    "window": 3,
    "chunk": 5,
    "prefix": 3,
    "qk_norm": "head",
    "qk_gain": "none",
    "qk_bias": False,
    "scale": 0.3,
    "minimum": 0.5,
    "clip_qkv": 0.1,
    "temperature": {"_target_": "llama_lab.model.temperature.LogTemperature", "length": 9},
    "softcap": 1.0,
    "gate": "element",
    "value_residual": 0.5,
    "query_rank": 4,
    "latent_eps": 0.1,
    "norm_eps": 0.1,
    "norm_offset": True,
    "logit_softcap": 1.0,
    "conv": 2,
    "decay": "retnet",
    "scores": "sigmoid",
    "n_shared": 1,
    "n_groups": 2,
    "top_groups": 1,
    "scaling": {"_target_": "llama_lab.model.position.LinearScaling", "factor": 2.0},
    "vocab_size": 100,
    "model.position.scaling.max_seq_len": 64,
}
# Idle in what the others are tested by, which is no training.
TRAINED = tuple(f"model.ffn.{name}" for name in ("balance_loss", "scope", "balance_bias", "z_loss"))
OF_TRAINING = ("size.batch_size", "size.learning_rate")
OWN_TESTS = (
    "model.attention.kernel",
    "model.attention.chunk_size",
    "model.position.scaling.short_factors",
    *TRAINED,
    *OF_TRAINING,
)
OTHER_WORD = {
    "none": "tanh",
    "tanh": "none",
    "head": "projection",
    "sigmoid": "softmax",
    "elu": "identity",
    "element": "head",
}


def settings_of(cfg: DictConfig, nodes: list[str]) -> dict[str, Any]:
    """The leaves of the model and its size under some nodes, as `{"model.attention.window": 16}`."""
    leaves = flatten({key: OmegaConf.to_container(cfg[key], resolve=True) for key in ("model", "size")})
    of_nodes = [key for key in leaves if any(key == node or key.startswith(f"{node}.") for node in nodes)]
    return {key: leaves[key] for key in of_nodes if not key.endswith(("_target_", "_partial_"))}


def changed(key: str, value: Any) -> Any:
    """Another value for a setting."""
    for name in (key, key.split(".")[-1]):
        if name in SUITABLE and SUITABLE[name] != value:
            return SUITABLE[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value
    if isinstance(value, float):
        return 1.5 * value + 0.1
    return OTHER_WORD[value]


def behaviour(cfg: DictConfig) -> dict[str, Any]:
    """All that a setting may change: initial parameters, costs, and logits with weights far from linear."""
    model = build_model(cfg, 97)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data.mul_(5)
    torch.manual_seed(0)  # of dropout
    return {"initial": initial, "cost": measure_cost(model), "logits": model(torch.arange(LENGTH)[None] % 97).detach()}


def differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two behaviours differ in anything, to the last bit."""
    one, other = a["initial"], b["initial"]
    return (
        (a["cost"], one.keys()) != (b["cost"], other.keys())
        or not torch.equal(a["logits"], b["logits"])
        or not all(torch.equal(one[name], other[name]) for name in one)
    )


def inert_settings(cfg: DictConfig, nodes: list[str]) -> list[str]:
    """The settings whose change is neither seen nor refused."""
    before, inert = behaviour(cfg), []
    assert not differ(before, behaviour(cfg)), "the measure itself is not repeatable"
    for key, value in settings_of(cfg, nodes).items():
        if key in OWN_TESTS:
            continue
        other = cfg.copy()
        try:
            OmegaConf.update(other, key, changed(key, value), merge=False)
            if not differ(before, behaviour(other)):
                inert.append(f"{key}: {value} -> {changed(key, value)}")
        except (ConfigError, OmegaConfBaseException):
            pass
    return inert


USUAL = [
    ("norm", "layernorm"),
    ("block", "prenorm"),
    ("position", "rope_yarn"),
    ("attention", "gqa"),
    ("ffn", "moe"),
    ("embedding", "tied"),
    ("init", "trunc"),
]
EVERY = [(group, option) for group in NODES for option in kinds(group)]
OTHERS = [pytest.param(*one, marks=pytest.mark.matrix) for one in EVERY if one not in USUAL]


@pytest.mark.parametrize(("group", "option"), [*USUAL, *OTHERS])
def test_every_setting_of_every_component_changes_something_or_is_refused(group: str, option: str) -> None:
    cfg = compose_config(*BASE, f"{group}={option}", *NEEDS.get(option, []))
    assert inert_settings(cfg, NODES[group]) == []


def test_every_size_changes_something_or_is_refused() -> None:
    cfg = compose_config(*BASE, "arch=mistral")
    components = {node for nodes in NODES.values() for node in nodes} | {"model.layers"}
    nodes = [f"model.{key}" for key in cfg.model if f"model.{key}" not in components]
    assert inert_settings(cfg, ["size", *nodes, "model.hidden_dim", "model.n_kv_heads"]) == []


def test_the_kernel_setting_chooses_the_kernel() -> None:
    for overrides, kernel in {
        ("attention=gqa",): "sdpa",
        ("attention=mla",): "sdpa",
        ("attention=gqa_gemma2",): "reference",  # which caps scores
        ("attention=gqa", "model.attention.kernel=reference"): "reference",
        ("attention=mla", "model.attention.kernel=reference"): "reference",
    }.items():
        assert {mixer.kernel for mixer in decoder(*overrides).mixers} == {kernel}


# What the last setting makes impossible, and is named; a dot stands for `model.attention.`.
REFUSED = [
    "model.n_heads=5",
    "attention=gqa model.n_kv_heads=3",
    "attention=mqa model.n_kv_heads=4",
    "attention=mha model.n_kv_heads=2",
    "attention=mla model.n_kv_heads=2",
    "attention=linear position=none model.n_kv_heads=2",
    "attention=mamba2 position=none .value_heads=0",
    "attention=mamba2 position=none .n_groups=3",
    "attention=mamba2 position=none .chunk_size=1.5",
    "attention=gated_delta position=none .key_heads=3",
    "attention=gated_delta position=none norm=none .norm_eps=0.1",
    "attention=gated_delta position=none .norm_eps=0",
    "attention=gated_delta position=none .decay=none",
    "attention=gated_delta position=none .gate=tanh",
    "attention=gated_delta position=none .conv=1",
    "attention=linear position=none .features=relu",
    "attention=linear position=none .decay=head",
    "ffn=moe model.ffn.n_experts=1",
    "ffn=moe model.ffn.top_k=9",
    "ffn=moe model.ffn.top_k=1",
    "ffn=moe model.ffn.top_k=some",
    "ffn=moe model.ffn.scores=relu",
    "ffn=moe model.ffn.n_groups=2",
    "ffn=moe model.ffn.top_groups=1 model.ffn.n_groups=3",
    "ffn=moe model.ffn.top_groups=few model.ffn.n_groups=2",
    "ffn=moe model.ffn.n_groups=8 model.ffn.top_groups=1",
    "ffn=moe model.ffn.balance_loss=null model.ffn.scope=batch",
    "ffn=moe model.ffn.shared_gate=true",
    "ffn=moe model.ffn.n_shared=-1",
    "ffn=moe model.hidden_dim=8 model.ffn.n_shared=1.5",
    "ffn=moe model.ffn.scale=0",
    "ffn=moe model.ffn.balance_bias=-0.1",
    "ffn=moe model.ffn.balance_loss=-1",
    "ffn=moe model.ffn.z_loss=-1",
    "ffn=moe expert=moe",
    "ffn=moe expert=swiglo",
    "model.position.fraction=0",
    "model.position.fraction=1.5",
    "position=relative model.position.max_distance=16",
    "position=relative model.position.n_buckets=1",
    "position=shaw model.position.clip=0",
    "position=shaw .kernel=sdpa",
    "position=rope_linear model.position.scaling.factor=0",
    "position=rope_yarn model.position.scaling.beta_slow=0",
    "position=rope_llama3 model.position.scaling.low_freq_factor=-1",
    ".window=32",
    ".window=0",
    ".window=4 .chunk=4",
    ".chunk=32",
    ".chunk=0",
    ".prefix=1",
    ".prefix=32",
    "data.document_mask=true .prefix=4",
    ".qk_norm=heads",
    "norm=none .qk_norm=head",
    ".qk_gain=heads .qk_norm=projection",
    ".qk_norm_rotated=true .qk_norm=projection",
    ".qk_bias=false .qk_norm=head .qk_gain=none",
    ".qk_norm=head .qk_gain=all",
    ".scale=0",
    ".clip_qkv=-1",
    ".kernel=flash",
    "attention=gqa_gemma2 .kernel=sdpa",
    ".softcap=0",
    ".gate=heads",
    ".value_residual=1.0",
    "model.n_layers=1 .value_residual=0.5",
    "attention=mha_log_temperature .temperature.length=1",
    "attention=mha_log_temperature .temperature.minimum=-1",
    "attention=mha_step_temperature .temperature.step=0",
    "attention=mha_step_temperature .temperature.offset=-1",
    "attention=mla .kv_rank=0",
    "attention=mla .kernel=flash",
    "attention=mla norm=none .latent_eps=0.1",
    "attention=mla norm=rmsnorm .latent_eps=0",
    "model.embedding.logit_softcap=-1",
    "model.vocab_size=50",
    "model.dropout=1",
    "model.dim=-32",
    "model.n_layers=0",
    "model.head_dim=-8",
    "model.hidden_dim=-8",
    "model.hidden_dim=null",
    "model.max_seq_len=-4",
    "size.mlp_ratio=-1",
]
LONG_FACTORS = "position=rope_long model.position.scaling.long_factors"
# What makes impossible another setting, which is named.
REFUSED_ELSEWHERE = {
    "attention=linear": "model.attention=llama_lab.model.recurrent.LinearAttention: would ignore the rotation of Rope",
    "attention=conv position=alibi": "model.attention=llama_lab.model.convolution.GatedConv: would ignore the bias of",
    "position=shaw attention=mla": "model.attention=llama_lab.model.latent_attention.LatentAttention: would ignore the",
    "attention=linear position=none .features=identity": ".normalise=true: ",
    "ffn=moe expert=xielu": "model.ffn.expert: XIELU.alpha_p is in no nn.Linear",
    "model.head_dim=7": "model.position.fraction=1.0: ",
    "position=sinusoidal model.dim=33 model.n_heads=3": "model.dim=33: ",
    f"{LONG_FACTORS}=[1,2,3]": "model.position.scaling.long_factors: has 3 numbers for 4 frequencies",
    f"{LONG_FACTORS}=[1,0,1,1]": "model.position.scaling.long_factors=0: ",
    ".qk_gain=heads": ".qk_norm=null: ",
    ".qk_norm_rotated=true": ".qk_norm=null: ",
    ".qk_norm=head .qk_bias=true": ".qk_bias: the model's norm has no argument bias",
    ".value_residual=0.5 +pattern.few={at:[0],attention:mqa}": ".value_residual: the first layer has not 4 heads of 8",
    "norm=layernorm model.norm.gain=false": "model.norm.bias=true: ",
    "norm=rmsnorm_offset model.norm.gain=false": "model.norm.unit_offset=true: ",
    "embedding=tied_norm norm=none": "model.embedding.norm_input=true: ",
    "block=mixer_only model.hidden_dim=8": "model.hidden_dim: the block of layer 0 has no feed-forward",
    "+pattern.a={at:1,ffn:gelu,block:mixer_only}": "model.ffn: the block of layer 1 has no feed-forward",
    "block=mixer_only +pattern.a={at:1,block:prenorm}": "model.ffn=null: the block of layer 1 has a feed-forward",
}
CASES = REFUSED_ELSEWHERE | {overrides: f"{overrides.split()[-1]}: " for overrides in REFUSED}


@pytest.mark.parametrize("overrides", CASES)
def test_what_cannot_work_is_refused_in_one_line_that_names_key_value_and_fix(overrides: str) -> None:
    whole, told = (re.sub(r"(^| )\.", r"\1model.attention.", text) for text in (overrides, CASES[overrides]))
    cfg = compose_config("size=pico", *whole.split())
    with pytest.raises(ConfigError) as error:  # noqa: PT012
        check_complete(cfg)
        build_model(cfg, 97, END_OF_TEXT)
    message = str(error.value)
    assert message.startswith(told)
    assert "\n" not in message
    assert "; " in message or "must " in message, "no fix"
