"""Every setting of every component does something or is refused, and what cannot work is refused in one line."""

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
from tests.composing import compose_config, decoder, kinds, options

# What a group's options set: the component, and the size that belongs to it.
NODES = {
    "norm": ["model.norm"],
    "block": ["model.block"],
    "position": ["model.position"],
    "attention": ["model.attention", "model.n_kv_heads"],
    "ffn": ["model.ffn", "model.hidden_dim"],
    "embedding": ["model.embedding"],
    "init": ["model.init"],
}
# Long enough for every bucket of relative positions, and heads wide enough for scalings to choose among frequencies.
LENGTH = 256
BASE = ("size=pico", f"model.max_seq_len={LENGTH}", "model.head_dim=64")
NEEDS = {"rope_yarn": ["model.position.scaling.original_max_seq_len=4096"]}  # else its ramp starts at 0 whatever is set
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
    "logit_softcap": 1.0,
    "scaling": {"_target_": "llama_lab.model.position.LinearScaling", "factor": 2.0},
    "vocab_size": 100,
    "model.position.scaling.max_seq_len": 64,
}
OWN_TESTS = ("model.attention.kernel", "model.position.scaling.short_factors")  # idle in what the others are tested by
OTHER_WORD = {"none": "tanh", "tanh": "none", "head": "projection"}  # of GELU's `approximate`, and of `qk_norm`


def settings_of(cfg: DictConfig, nodes: list[str]) -> dict[str, Any]:
    """The leaves of the model and its size under some nodes, as `{"model.attention.window": 16}`."""
    leaves = flatten({key: OmegaConf.to_container(cfg[key], resolve=True) for key in ("model", "size")})
    return {
        key: value
        for key, value in leaves.items()
        if any(key == node or key.startswith(f"{node}.") for node in nodes)
        and not key.endswith(("_target_", "_partial_"))
    }


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
    if (
        a["cost"] != b["cost"]
        or a["initial"].keys() != b["initial"].keys()
        or not torch.equal(a["logits"], b["logits"])
    ):
        return True
    return not all(torch.equal(a["initial"][name], b["initial"][name]) for name in a["initial"])


def inert_settings(cfg: DictConfig, nodes: list[str]) -> list[str]:
    """The settings whose change is neither seen nor refused."""
    before, inert = behaviour(cfg), []
    assert not differ(before, behaviour(cfg)), "the measure itself is not repeatable"
    for key, value in settings_of(cfg, nodes).items():
        if key in OWN_TESTS:
            continue
        other = cfg.copy()
        OmegaConf.update(other, key, changed(key, value), merge=False)
        try:
            if not differ(before, behaviour(other)):
                inert.append(f"{key}: {value} -> {changed(key, value)}")
        except (ConfigError, OmegaConfBaseException):
            pass
    return inert


@pytest.mark.parametrize(
    ("group", "option"),
    [
        pytest.param(group, option, marks=() if option in kinds(group) else pytest.mark.matrix)
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


@pytest.mark.parametrize("option", options("attention"))
def test_the_kernel_setting_chooses_the_kernel(option: str) -> None:
    for kernel in ("auto", "reference"):
        for block in decoder(f"attention={option}", f"model.attention.kernel={kernel}").blocks:
            plain = kernel == "reference" or option == "gqa_gemma2"
            assert block.attention.kernel == ("reference" if plain else "sdpa")


REFUSED = {  # the beginning of what is told, and the overrides of which it is
    "model.n_heads=5: does not divide model.dim=32; choose a divisor": "model.n_heads=5",
    "model.n_kv_heads=3: does not divide n_heads=4; choose one of 1, 2": "attention=gqa model.n_kv_heads=3",
    "model.n_kv_heads=4: attention=mqa has one kv head; leave": "attention=mqa model.n_kv_heads=4",
    "model.n_kv_heads=2: attention=mha has one kv head per head, 4": "attention=mha model.n_kv_heads=2",
    "model.position.fraction=1.0: turns 7 of head_dim=7 dimensions, but the": "model.head_dim=7",
    "model.position.fraction=0: turns 0 of head_dim=8 dimensions": "model.position.fraction=0",
    "model.position.fraction=1.5: turns 12 of head_dim=8 dimensions": "model.position.fraction=1.5",
    "model.dim=33: sinusoidal positions need": "position=sinusoidal model.dim=33 model.n_heads=3",
    "model.position.max_distance=16: must exceed": "position=relative model.position.max_distance=16",
    "model.position.n_buckets=1: must be": "position=relative model.position.n_buckets=1",
    "model.position.clip=0: must be positive": "position=shaw model.position.clip=0",
    "model.attention.kernel=sdpa: it cannot add to keys and values, as position=shaw": (
        "position=shaw model.attention.kernel=sdpa"
    ),
    "model.attention=llama_lab.model.latent_attention.LatentAttention: adds no vectors to keys": (
        "position=shaw attention=mla"
    ),
    "model.attention.window=32: hides nothing at model.max_seq_len=32": "model.attention.window=32",
    "model.attention.window=0: must be at least 1, or null for none": "model.attention.window=0",
    "model.attention.qk_norm=heads: unknown; choose head, projection or": "model.attention.qk_norm=heads",
    "model.attention.qk_norm=head: the model's norm does": "model.attention.qk_norm=head norm=none",
    "model.attention.qk_norm=null: qk_gain, qk_bias and qk_norm_rotated need": "model.attention.qk_gain=heads",
    "model.attention.qk_norm=null: qk_gain": "model.attention.qk_norm_rotated=true",
    "model.attention.qk_norm=projection: has a gain per element": (
        "model.attention.qk_norm=projection model.attention.qk_gain=heads"
    ),
    "model.attention.qk_norm=projection: has": (
        "model.attention.qk_norm=projection model.attention.qk_norm_rotated=true"
    ),
    "model.attention.qk_gain=none: such a norm has no bias either": (
        "model.attention.qk_norm=head model.attention.qk_gain=none model.attention.qk_bias=false"
    ),
    "model.attention.qk_gain=all: unknown; choose shared, heads or none": (
        "model.attention.qk_norm=head model.attention.qk_gain=all"
    ),
    "model.attention.qk_bias: the model's norm has no argument bias": (
        "model.attention.qk_norm=head model.attention.qk_bias=true"
    ),
    "model.attention.scale=0: must be positive": "model.attention.scale=0",
    "model.attention.clip_qkv=-1: must be positive": "model.attention.clip_qkv=-1",
    "model.embedding.norm_input=true: the model's norm does nothing": "embedding=tied_norm norm=none",
    "model.attention.kernel=flash: unknown; choose auto, sdpa or reference": "model.attention.kernel=flash",
    "model.attention.kernel=sdpa: it cannot cap": "attention=gqa_gemma2 model.attention.kernel=sdpa",
    "model.attention.softcap=0: must be": "model.attention.softcap=0",
    "model.attention.gate=heads: unknown; choose head, element or null": "model.attention.gate=heads",
    "model.attention.value_residual=1.0: must be above 0 and below 1, or learned, or null": (
        "model.attention.value_residual=1.0"
    ),
    "model.attention.value_residual=0.5: the only layer is the first; set it to null": (
        "model.attention.value_residual=0.5 model.n_layers=1"
    ),
    "model.attention.value_residual: the first layer has not 4 heads of 8 values": (
        "model.attention.value_residual=0.5 +pattern.few={at:[0],attention:mqa}"
    ),
    "model.attention.value_residual: the first layer has not 4 heads of 8 values, as": (
        "model.attention.value_residual=0.5 +pattern.latent={at:[0],attention:mla}"
    ),
    "model.n_kv_heads=2: attention=mla has keys and values for each head, 4; leave n_kv_heads out": (
        "attention=mla model.n_kv_heads=2"
    ),
    "model.attention.kv_rank=0: must be a": "attention=mla model.attention.kv_rank=0",
    "model.attention.kernel=flash: unknown;": "attention=mla model.attention.kernel=flash",
    "model.attention.latent_eps=0.1: the model's norm has no eps": (
        "attention=mla norm=none model.attention.latent_eps=0.1"
    ),
    "model.attention.latent_eps=0: must ": "attention=mla norm=rmsnorm model.attention.latent_eps=0",
    "model.embedding.logit_softcap=-1: must be": "model.embedding.logit_softcap=-1",
    "model.vocab_size=50: the tokenizer has 97 ids; raise it to at least that": "model.vocab_size=50",
    "model.dropout=1: must be at least 0 and less than 1": "model.dropout=1",
    "model.dim=-32: must be a positive whole number": "model.dim=-32",
    "model.n_layers=0: must be a positive whole number": "model.n_layers=0",
    "model.head_dim=-8: must be a positive whole number": "model.head_dim=-8",
    "model.hidden_dim=-8: must be a positive whole number": "model.hidden_dim=-8",
    "model.max_seq_len=-4: must be a positive whole number": "model.max_seq_len=-4",
    "size.mlp_ratio=-1: must be": "size.mlp_ratio=-1",
}


def build_checked(cfg: DictConfig) -> None:
    """The model as a run builds it."""
    check_complete(cfg)
    build_model(cfg, 97)


@pytest.mark.parametrize("beginning", REFUSED)
def test_what_cannot_work_is_refused_in_one_line_that_names_key_value_and_fix(beginning: str) -> None:
    cfg = compose_config("size=pico", *REFUSED[beginning].split())
    with pytest.raises(ConfigError) as error:
        build_checked(cfg)
    message = str(error.value)
    assert message.startswith(beginning)
    assert "\n" not in message
    assert "; " in message or "must " in message, "no fix"
