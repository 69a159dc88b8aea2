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
from tests.composing import END_OF_TEXT, compose_config, decoder, options, softmaxes
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
OWN_TESTS = ("model.attention.kernel", "model.attention.chunk_size", "model.position.scaling.short_factors", *TRAINED)
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


@pytest.mark.parametrize(
    ("group", "option"),
    [
        pytest.param(group, option, marks=[pytest.mark.slow] * (option != options(group)[0]))
        for group in NODES
        for option in options(group)
    ],
)
def test_every_setting_of_every_component_changes_something_or_is_refused(group: str, option: str) -> None:
    cfg = compose_config(*BASE, f"{group}={option}", *NEEDS.get(option, []))
    assert inert_settings(cfg, NODES[group]) == []


def test_every_size_changes_something_or_is_refused() -> None:
    cfg = compose_config(*BASE, "arch=mistral")
    components = {node for nodes in NODES.values() for node in nodes} | {"model.layers"}
    nodes = [f"model.{key}" for key in cfg.model if f"model.{key}" not in components]
    assert inert_settings(cfg, ["size", *nodes, "model.hidden_dim", "model.n_kv_heads"]) == []


def test_each_length_s_factors_of_longrope_act_in_a_context_of_that_length() -> None:
    for name, original in (("short_factors", LENGTH), ("long_factors", LENGTH - 1)):
        chosen = (*BASE, "position=rope_long", f"model.position.scaling.original_max_seq_len={original}")
        before = behaviour(compose_config(*chosen))
        for other in ("short_factors", "long_factors"):
            after = behaviour(compose_config(*chosen, f"model.position.scaling.{other}=1.5"))
            assert differ(before, after) == (name == other)


@pytest.mark.parametrize("option", softmaxes())
def test_the_kernel_setting_chooses_the_kernel(option: str) -> None:
    for kernel in ("auto", "reference"):
        for block in decoder(f"attention={option}", f"model.attention.kernel={kernel}").blocks:
            plain = kernel == "reference" or option == "gqa_gemma2"
            assert block.attention.kernel == ("reference" if plain else "sdpa")


LONG_FACTORS = "position=rope_long model.position.scaling.long_factors"
FIRST_VALUES = ".value_residual=0.5 +pattern.few={at:[0],attention:"
# Overrides, and the beginning of what is told of them; in both, a dot stands for `model.attention.`.
REFUSED = [
    ("model.n_heads=5", "model.n_heads=5: does not divide model.dim=32; choose a divisor"),
    ("attention=gqa model.n_kv_heads=3", "model.n_kv_heads=3: does not divide n_heads=4; choose one of 1, 2"),
    ("attention=mqa model.n_kv_heads=4", "model.n_kv_heads=4: attention=mqa has one kv head; leave"),
    ("attention=mha model.n_kv_heads=2", "model.n_kv_heads=2: attention=mha has one kv head per head, 4"),
    ("attention=linear position=none model.n_kv_heads=2", "model.n_kv_heads=2: this attention has no key and v"),
    ("attention=mamba2 position=none .value_heads=0", ".value_heads=0: must be a positive whole number"),
    ("attention=mamba2 position=none .n_groups=3", ".n_groups=3: must divide the 8 heads"),
    ("attention=gated_delta position=none .key_heads=3", ".key_heads=3: must divide attention.value_heads=4"),
    ("attention=gated_delta position=none norm=none .norm_eps=0.1", ".norm_eps=0.1: the model's norm has no eps"),
    ("attention=gated_delta position=none .norm_eps=0", ".norm_eps=0: must be positive"),
    ("attention=gated_delta position=none .decay=none", ".decay=none: unknown; choose head or channel"),
    ("attention=gated_delta position=none .gate=tanh", ".gate=tanh: unknown; choose silu or sigmoid"),
    ("attention=gated_delta position=none .chunk_size=0", ".chunk_size=0: must be a positive whole number"),
    ("attention=linear position=none .chunk_size=-64", ".chunk_size=-64: must be a positive whole number"),
    ("attention=mamba2 position=none .chunk_size=1.5", ".chunk_size=1.5: must be a positive whole number"),
    ("attention=kimi_delta position=none .chunk_size=few", ".chunk_size=few: must be a positive whole number"),
    ("attention=gated_delta position=none .conv=1", ".conv=1: must be a whole number of at least 2"),
    ("attention=linear", "model.attention=llama_lab.model.recurrent.LinearAttention: would ignore the rotation of Ro"),
    (
        "attention=linear .features=identity .normalise=false .key_dim=4",
        "model.attention=llama_lab.model.recurrent.LinearAttention: would ignore the rotation of Rope",
    ),
    ("attention=gated_delta", "model.attention=llama_lab.model.recurrent.GatedDelta: would ignore the rotation of Ro"),
    (
        "attention=conv position=alibi",
        "model.attention=llama_lab.model.convolution.GatedConv: would ignore the bias of",
    ),
    ("attention=linear position=none .features=relu", ".features=relu: unknown; choose identity or elu"),
    ("attention=linear position=none .features=identity", ".normalise=true: identity features may have negative"),
    ("attention=linear position=none .decay=head", ".decay=head: unknown; choose retnet, or null for none"),
    ("attention=mla model.n_kv_heads=2", "model.n_kv_heads=2: attention=mla has keys and values for each head, 4;"),
    ("ffn=moe model.ffn.n_experts=1", "model.ffn.n_experts=1: must be a whole number of at least 2"),
    ("ffn=moe model.ffn.top_k=9", "model.ffn.top_k=9: must be a whole number from 1 to ffn.n_experts=8"),
    ("ffn=moe model.ffn.top_k=1", "model.ffn.top_k=1: the only weight would be 1, which gives the router no gradient"),
    ("ffn=moe model.ffn.scores=relu", "model.ffn.scores=relu: unknown; choose softmax or sigmoid"),
    ("ffn=moe model.ffn.n_groups=2", "model.ffn.n_groups=2: needs ffn.top_groups"),
    ("ffn=moe model.ffn.n_groups=3 model.ffn.top_groups=1", "model.ffn.n_groups=3: does not divide ffn.n_experts=8"),
    ("ffn=moe model.ffn.n_groups=8 model.ffn.top_groups=1", "model.ffn.top_groups=1: must be from 1 to ffn.n_group"),
    ("ffn=moe model.ffn.scope=batch model.ffn.balance_loss=null", "model.ffn.scope=batch: is of the balancing loss;"),
    ("ffn=moe model.ffn.shared_gate=true", "model.ffn.shared_gate=true: there is no shared expert; set"),
    ("ffn=moe model.ffn.top_k=some", "model.ffn.top_k=some: must be a positive whole number"),
    ("ffn=moe model.ffn.n_shared=-1", "model.ffn.n_shared=-1: must be a whole number of at least 0"),
    ("ffn=moe model.ffn.n_shared=1.5 model.hidden_dim=8", "model.ffn.n_shared=1.5: must be a whole number of at l"),
    ("ffn=moe model.ffn.n_groups=2 model.ffn.top_groups=few", "model.ffn.n_groups=2: must be a whole number, as "),
    ("ffn=moe model.ffn.scale=0", "model.ffn.scale=0: must be positive"),
    ("ffn=moe model.ffn.balance_bias=-0.1", "model.ffn.balance_bias=-0.1: must be positive"),
    ("ffn=moe model.ffn.balance_loss=-1", "model.ffn.balance_loss=-1: must be at least 0, or null for none"),
    ("ffn=moe model.ffn.z_loss=-1", "model.ffn.z_loss=-1: must be at least 0, or null for none"),
    ("ffn=moe expert=xielu", "model.ffn.expert: XIELU.alpha_p is in no nn.Linear; choose another expert"),
    ("ffn=moe expert=moe", "expert=moe: has experts itself; choose another option of ffn"),
    ("ffn=moe expert=swiglo", "expert=swiglo: ffn has no such option (did you mean swiglu?)"),
    ("model.head_dim=7", "model.position.fraction=1.0: turns 7 of head_dim=7 dimensions, but the"),
    ("model.position.fraction=0", "model.position.fraction=0: turns 0 of head_dim=8 dimensions"),
    ("model.position.fraction=1.5", "model.position.fraction=1.5: turns 12 of head_dim=8 dimensions"),
    ("position=sinusoidal model.dim=33 model.n_heads=3", "model.dim=33: sinusoidal positions need"),
    ("position=relative model.position.max_distance=16", "model.position.max_distance=16: must exceed"),
    ("position=relative model.position.n_buckets=1", "model.position.n_buckets=1: must be"),
    ("position=shaw model.position.clip=0", "model.position.clip=0: must be positive"),
    ("position=shaw .kernel=sdpa", ".kernel=sdpa: it cannot add to keys and values, as position=shaw"),
    ("position=shaw attention=mla", "model.attention=llama_lab.model.latent_attention.LatentAttention: would i"),
    ("position=rope_linear model.position.scaling.factor=0", "model.position.scaling.factor=0: must be positive"),
    ("position=rope_yarn model.position.scaling.beta_slow=0", "model.position.scaling.beta_slow=0: must be positive"),
    ("position=rope_llama3 model.position.scaling.low_freq_factor=-1", "model.position.scaling.low_freq_factor=-1: mu"),
    (f"{LONG_FACTORS}=[1,2,3]", "model.position.scaling.long_factors: has 3 numbers for 4 frequencies; give all"),
    (f"{LONG_FACTORS}=[1,0,1,1]", "model.position.scaling.long_factors=0: must be positive"),
    (".window=32", ".window=32: hides nothing at model.max_seq_len=32"),
    (".window=0", ".window=0: must be at least 1, or null for none"),
    (".chunk=4 .window=4", ".chunk=4: there is attention.window=4 too; set one of them to null"),
    (".chunk=32", ".chunk=32: hides nothing at model.max_seq_len=32; "),
    (".chunk=0", ".chunk=0: must be at least 1, or null for none"),
    (".prefix=1", ".prefix=1: must be at least 2, or null for none"),
    (".prefix=32", ".prefix=32: max_seq_len=32 ends there; make it"),
    (".prefix=4 data.document_mask=true", ".prefix=4: with documents, sequences would predict unequally many tokens"),
    (".qk_norm=heads", ".qk_norm=heads: unknown; choose head, projection or"),
    (".qk_norm=head norm=none", ".qk_norm=head: the model's norm does"),
    (".qk_gain=heads", ".qk_norm=null: qk_gain, qk_bias and qk_norm_rotated need"),
    (".qk_norm_rotated=true", ".qk_norm=null: qk_gain"),
    (".qk_norm=projection .qk_gain=heads", ".qk_norm=projection: has a gain per element"),
    (".qk_norm=projection .qk_norm_rotated=true", ".qk_norm=projection: has"),
    (".qk_norm=head .qk_gain=none .qk_bias=false", ".qk_gain=none: such a norm has no bias either"),
    (".qk_norm=head .qk_gain=all", ".qk_gain=all: unknown; choose shared, heads or none"),
    (".qk_norm=head .qk_bias=true", ".qk_bias: the model's norm has no argument bias"),
    (".scale=0", ".scale=0: must be positive"),
    (".clip_qkv=-1", ".clip_qkv=-1: must be positive"),
    (".kernel=flash", ".kernel=flash: unknown; choose auto, sdpa or reference"),
    ("attention=gqa_gemma2 .kernel=sdpa", ".kernel=sdpa: it cannot cap"),
    (".softcap=0", ".softcap=0: must be"),
    (".gate=heads", ".gate=heads: unknown; choose head, element or null"),
    (".value_residual=1.0", ".value_residual=1.0: must be above 0 and below 1, or learned, or null"),
    (".value_residual=0.5 model.n_layers=1", ".value_residual=0.5: the only layer is the first; set it to null"),
    (f"{FIRST_VALUES}mqa}}", ".value_residual: the first layer has not 4 heads of 8 values"),
    (f"{FIRST_VALUES}mla}}", ".value_residual: the first layer has not 4 heads of 8 values, as"),
    ("attention=mha_log_temperature .temperature.length=1", ".temperature.length=1: must be at least 2"),
    ("attention=mha_log_temperature .temperature.minimum=-1", ".temperature.minimum=-1: must not be negative"),
    ("attention=mha_step_temperature .temperature.step=0", ".temperature.step=0: must be positive"),
    ("attention=mha_step_temperature .temperature.offset=-1", ".temperature.offset=-1: must not be negative"),
    ("attention=mla .kv_rank=0", ".kv_rank=0: must be a"),
    ("attention=mla .kernel=flash", ".kernel=flash: unknown;"),
    ("attention=mla norm=none .latent_eps=0.1", ".latent_eps=0.1: the model's norm has no eps"),
    ("attention=mla norm=rmsnorm .latent_eps=0", ".latent_eps=0: must "),
    ("norm=layernorm model.norm.gain=false", "model.norm.bias=true: a norm without a gain has none; set norm.gain"),
    ("norm=rmsnorm_offset model.norm.gain=false", "model.norm.unit_offset=true: a norm without a gain has none; set"),
    ("embedding=tied_norm norm=none", "model.embedding.norm_input=true: the model's norm does nothing"),
    ("model.embedding.logit_softcap=-1", "model.embedding.logit_softcap=-1: must be"),
    ("model.vocab_size=50", "model.vocab_size=50: the tokenizer has 97 ids; raise it to at least that"),
    ("model.dropout=1", "model.dropout=1: must be at least 0 and less than 1"),
    ("model.dim=-32", "model.dim=-32: must be a positive whole number"),
    ("model.n_layers=0", "model.n_layers=0: must be a positive whole number"),
    ("model.head_dim=-8", "model.head_dim=-8: must be a positive whole number"),
    ("model.hidden_dim=-8", "model.hidden_dim=-8: must be a positive whole number"),
    ("model.hidden_dim=null", "model.hidden_dim=null: the block of layer 0 has a feed-forward; give"),
    ("block=mixer_only model.hidden_dim=8", "model.hidden_dim: the block of layer 0 has no feed-forward; leave"),
    ("+pattern.a={at:1,ffn:gelu,block:mixer_only}", "model.ffn: the block of layer 1 has no feed-forward; leave"),
    ("block=mixer_only +pattern.a={at:1,block:prenorm}", "model.ffn=null: the block of layer 1 has a feed-f"),
    ("model.max_seq_len=-4", "model.max_seq_len=-4: must be a positive whole number"),
    ("size.mlp_ratio=-1", "size.mlp_ratio=-1: must be"),
]


@pytest.mark.parametrize(("overrides", "beginning"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line_that_names_key_value_and_fix(overrides: str, beginning: str) -> None:
    whole, told = (re.sub(r"(^| )\.", r"\1model.attention.", text) for text in (overrides, beginning))
    cfg = compose_config("size=pico", *whole.split())
    with pytest.raises(ConfigError) as error:  # noqa: PT012
        check_complete(cfg)
        build_model(cfg, 97, END_OF_TEXT)
    message = str(error.value)
    assert message.startswith(told)
    assert "\n" not in message
    assert "; " in message or "must " in message, "no fix"
