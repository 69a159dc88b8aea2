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
from tests.hf.theirs import products, their_model

EXPECTED = {
    "gpt2": ["embedding=tied", "block=prenorm", "norm=layernorm", "position=learned", "ffn=gelu_tanh_bias"],
    "gemma3, scaled": ["model.position.theta=500.0", "position=rope_linear"],
    "gpt_neo": ["model.attention.window=7", "+pattern.other1={at:[0],attention:{window:null}}"],
    "deepseek_v2, yarn": ["attention=mla", "position=rope_yarn", "norm=rmsnorm_1e-6"],
    "mamba2": ["attention=mamba2", "block=mixer_only", "model.hidden_dim=null", "model.attention.n_groups=2"],
    "mistral4, yarn": ["attention=mla_step_temperature", "model.attention.temperature.scale=0.5"],
    "nemotron, a fraction that is rounded": ["model.position.fraction=0.375"],
    "olmoe, normalised": ["ffn=moe", "expert=geglu", "model.ffn.n_experts=6"],
    "gpt_oss": ["ffn=moe_gpt_oss", "attention=gqa_gpt_oss", "model.position.scaling.truncate=false"],
}
OTHERS = ("llama, llama3 scaling", "ctrl", "gemma2", "gemma3", "exaone4", "cohere2, listed", "granite_swa", "glm")
OTHERS += (
    "olmo_hybrid, no positions",
    "kimi_linear, listed",
    "lfm2",
    "qwen3_next",
    "qwen3_5, hybrid",
    "mixtral",
    "mpt",
)
OTHERS += ("bamba, biases, groups", "smollm3, listed", "ministral3", "minicpm3", "apertus", "olmoe", "gpt_oss, plain")
OTHERS += ("deepseek_v3, experts",)


@pytest.mark.matrix
@pytest.mark.parametrize("family", [LLAMA, GPT2, NEMOTRON])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_overrides(activation: str, family: Family) -> None:
    (name,) = {"hidden_act", "activation_function"} & {name for setting in family.settings for name in setting.names}
    wanted = family.read_config({name: activation})
    composed = compose_config(*overrides_of(wanted)).model
    assert {**wanted} == pytest.approx(flat_settings(OmegaConf.to_container(composed, resolve=True)))


@pytest.mark.parametrize("case", products((*EXPECTED, *OTHERS), ("gemma3, scaled",)))
def test_the_overrides_of_an_import_compose_the_same_model(case: str, tmp_path: Path) -> None:
    their_model(case).save_pretrained(tmp_path / "theirs")
    import_model(str(tmp_path / "theirs"), tmp_path / "imported")
    overrides = list(OmegaConf.load(tmp_path / "imported" / "overrides.yaml"))
    assert set(EXPECTED.get(case, ())) <= {*overrides}
    assert len({*overrides}) == len(overrides), "a key is set twice"
    composed = flat_settings(OmegaConf.to_container(compose_config(*overrides).model, resolve=True))
    wanted = settings_of(load(tmp_path / "imported"))
    assert composed.keys() == wanted.keys()
    assert not [key for key in wanted if not equal(composed[key], wanted[key])]
