"""The overrides beside an import compose the model that was imported."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from llama_lab.hf.convert import import_model, settings_of
from llama_lab.hf.family import Family, flat_settings
from llama_lab.hf.gpt_families import GPT2, NEMOTRON
from llama_lab.hf.llama_families import LLAMA
from llama_lab.hf.loading import load
from llama_lab.hf.overrides import overrides_of
from llama_lab.hf.settings import equal
from llama_lab.hf.terms import ACTIVATIONS
from tests.composing import compose_config
from tests.hf.theirs import their_model

EXPECTED = {
    "gpt2": ["embedding=tied", "block=prenorm", "norm=layernorm", "position=learned", "ffn=gelu_tanh_bias"],
    "llama, llama3 scaling": ["position=rope_llama3", "model.position.scaling.factor=4.0", "ffn=swiglu"],
    "ctrl": ["position=sinusoidal_concatenated", "embedding=scaled_bias"],
    "gemma2": ["+pattern.other1={at:[1],attention:{window:null}}", "model.attention.softcap=2.0"],
    "gemma3": ["attention=gqa_qk_norm", "position=rope", "block=sandwich"],
    "gemma3, scaled": ["model.position.theta=500.0", "position=rope_linear"],
    "exaone4": ["block=reordered", "model.attention.window=7"],
    "cohere2, listed": ["position=none", "attention=gqa_bias"],
    "gpt_neo": ["model.attention.window=7", "+pattern.other1={at:[0],attention:{window:null}}"],
    "deepseek_v2, yarn": ["attention=mla", "position=rope_yarn", "norm=rmsnorm_1e-6"],
    "granite_swa": ["model.attention.sinks=true", "position=none"],
    "olmo_hybrid, no positions": ["attention=gated_delta_olmo_hybrid", "position=none"],
    "kimi_linear, listed": ["attention=kimi_delta", "position=none"],
    "lfm2": ["attention=conv", "position=none", "embedding=tied"],
    "qwen3_next": ["attention=gqa_gated", "norm=rmsnorm_offset", "position=rope_half"],
    "qwen3_5, hybrid": ["attention=gated_delta_qwen3_next", "position=none"],
    "bamba, biases, groups": ["attention=mamba2", "position=none", "model.attention.n_groups=2"],
    "mamba2": ["attention=mamba2", "block=mixer_only", "model.hidden_dim=null", "model.attention.n_groups=2"],
    "smollm3, listed": ["position=none"],
    "glm": ["model.position.interleaved=true", "attention=gqa_qkv_bias"],
    "ministral3": ["attention=gqa_step_temperature", "position=rope_yarn", "model.attention.window=7"],
    "mistral4, yarn": ["attention=mla_step_temperature", "model.attention.temperature.scale=0.5"],
    "minicpm3": ["attention=mla_kimi_linear", "model.attention.kv_rank=20"],  # which has the norms' epsilon
    "apertus": ["ffn=xielu", "position=rope_llama3"],
    "nemotron, a fraction that is rounded": ["model.position.fraction=0.375"],
    "mixtral": ["ffn=moe", "model.ffn.n_experts=4"],
    "olmoe": ["ffn=moe_olmoe", "attention=mha_qk_norm"],
    "olmoe, normalised": ["ffn=moe", "expert=geglu", "model.ffn.n_experts=6"],
    "deepseek_v3, experts": ["ffn=moe_deepseek_v3", "model.ffn.n_groups=4"],
    "gpt_oss": ["ffn=moe_gpt_oss", "attention=gqa_gpt_oss", "model.position.scaling.truncate=false"],
    "gpt_oss, plain": ["ffn=moe_gpt_oss", "model.attention.sinks=true"],
    "mpt": ["position=alibi", "norm=layernorm_no_bias"],
}


@pytest.mark.parametrize(
    ("activation", "family"),
    [
        pytest.param(activation, family, marks=[pytest.mark.matrix] * (i % 3 != number))
        for i, activation in enumerate(ACTIVATIONS)
        for number, family in enumerate([LLAMA, GPT2, NEMOTRON])
    ],
)
def test_every_activation_has_overrides(activation: str, family: Family) -> None:
    (name,) = {"hidden_act", "activation_function"} & {name for setting in family.settings for name in setting.names}
    wanted = family.read_config({name: activation})
    composed = compose_config(*overrides_of(wanted)).model
    assert {**wanted} == pytest.approx(flat_settings(OmegaConf.to_container(composed, resolve=True)))


QUICK = {"gpt2", "gemma2", "gemma3, scaled", "deepseek_v2, yarn", "granite_swa", "ministral3"}
QUICK |= {"qwen3_5, hybrid", "mamba2", "olmoe, normalised", "deepseek_v3, experts", "gpt_oss, plain"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.matrix] * (name not in QUICK)) for name in EXPECTED]
)
def test_the_overrides_of_an_import_compose_the_same_model(case: str, tmp_path: Path) -> None:
    their_model(case).save_pretrained(tmp_path / "theirs")
    import_model(str(tmp_path / "theirs"), tmp_path / "imported")
    overrides = list(OmegaConf.load(tmp_path / "imported" / "overrides.yaml"))
    assert set(EXPECTED[case]) <= {*overrides}
    assert len({*overrides}) == len(overrides), "a key is set twice"
    composed = flat_settings(OmegaConf.to_container(compose_config(*overrides).model, resolve=True))
    wanted = settings_of(load(tmp_path / "imported"))
    assert composed.keys() == wanted.keys()
    assert not [key for key in wanted if not equal(composed[key], wanted[key])]
