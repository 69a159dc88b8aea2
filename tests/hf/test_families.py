"""Every family goes in and out: transformers' logits and texts are ours, and what we write is what it wrote."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from llama_lab.hf.convert import export_model, import_model, settings_of
from llama_lab.hf.families import FAMILIES
from llama_lab.hf.loading import Loaded, load
from llama_lab.util.errors import ConfigError
from tests.hf.theirs import (
    CASES,
    CONTEXT,
    KINDS,
    PROMPT,
    VOCAB,
    our_logits,
    our_text,
    products,
    reload,
    their_logits,
    their_model,
    their_text,
)

TOLERANCE = 1e-4  # of float32 logits whose standard deviation is about one
EXPORTED = ("falcon 40B", "gpt_oss")  # whose weights are fused, and of experts


@dataclass(frozen=True, repr=False)
class Case:
    name: str
    theirs: PreTrainedModel
    saved: Path
    ours: Loaded


@pytest.fixture(scope="module", params=products(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    theirs = their_model(request.param)
    saved = tmp_path_factory.mktemp("saved")
    theirs.save_pretrained(saved)
    return Case(request.param, theirs, saved, load(saved))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_an_imported_model_has_their_logits_and_writes_their_text(case: Case, tokens: Tensor) -> None:
    expected = their_logits(case.theirs, tokens)
    assert expected.std() > 0.5
    assert (our_logits(case.ours.model, tokens) - expected).abs().max() <= TOLERANCE
    prompts = tokens[:, :PROMPT]
    if case.ours.model.decodes:
        assert our_text(case.ours.model, prompts) == their_text(case.theirs, prompts)


@pytest.mark.parametrize("case", products(CASES, EXPORTED), indirect=True)
def test_an_exported_model_is_theirs_again(case: Case, tokens: Tensor, tmp_path: Path) -> None:
    """As it was imported, too: every tensor is bit for bit what they saved."""
    import_model(str(case.saved), tmp_path / "imported")
    assert (tmp_path / "imported" / "config.json").exists(), "as transformers has it"
    export_model(tmp_path / "imported", tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == case.theirs.config.model_type
    again = reload(tmp_path / "theirs")
    before, after = (load_file(folder / "model.safetensors") for folder in (case.saved, tmp_path / "theirs"))
    if case.name.startswith("opt"):
        before["model.decoder.embed_positions.weight"][:2] = 0  # for padding; they reach no logits
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    assert torch.equal(their_logits(again, tokens), their_logits(case.theirs, tokens))


# One for each kind of setting that no other test of gradients has.
TRAINED = (
    "bert",
    "granite",
    "nemotron",
    "olmo, clipped",
    "cohere, QK norm",
    "nanochat",
    "stablelm, QK norm",
    "falcon, alibi",
    "phi3, longrope, whose context is longer",
    "mistral4, yarn",
    "apertus",
    *("mixtral", "olmoe", "qwen3_moe, some experts", "deepseek_v3, experts", "gpt_oss"),
    *("qwen3_5, hybrid", "qwen3_next, experts", "lfm2, rounded, biases, untied", "olmo_hybrid, no positions", "mamba2"),
    "bamba, biases, groups",
    "kimi_linear, listed",
    *("t5", "t5, 1.1"),
)


@pytest.mark.parametrize("name", products(TRAINED, (*KINDS, "olmo_hybrid, no positions", "apertus")))
def test_an_imported_model_has_their_gradients(name: str, tokens: Tensor, tmp_path: Path) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    ours.model.train()
    family = next(family for family in FAMILIES if family.model_type == CASES[name][0] and not family.variant)
    settings = settings_of(ours)
    found, expected = (
        torch.autograd.grad(cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), [*model.parameters()])
        for model, logits in ((ours.model, our_logits(ours.model, tokens)), (theirs, their_logits(theirs, tokens)))
    )
    names = family.canonical_names(key for key, _ in theirs.named_parameters())
    gradients = dict(zip(names.values(), expected, strict=True))
    by_name = family.of_layout(gradients, settings).to_ours(gradients, settings)
    assert by_name.keys() == {key for key, _ in ours.model.named_parameters()}
    for (key, _), gradient in zip(ours.model.named_parameters(), found, strict=True):
        scale = max(by_name[key].abs().max().item(), 1e-3)
        assert (gradient - by_name[key]).abs().max() <= 1e-4 * scale, key


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3, experts"])
def test_a_file_with_all_experts_in_one_tensor_is_read_as_one_with_a_tensor_for_each(name: str, tmp_path: Path) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    expected = load(tmp_path).model.state_dict()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    found = load(tmp_path).model.state_dict()
    assert found.keys() == expected.keys()
    assert not [key for key in found if not torch.equal(found[key], expected[key])]


def test_convolutions_of_unequal_widths_are_read_as_released_not_in_the_thirds_that_transformers_saves(
    tokens: Tensor, tmp_path: Path
) -> None:
    theirs = their_model("olmo_hybrid", linear_value_head_dim=8)
    theirs.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"k_conv1d.weight is \(40, 1, 4\), and its config makes it \(36, 1, 4\)"):
        load(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, weight in theirs.state_dict().items():
        if name.endswith("conv1d.weight"):
            parts = zip("qkv", weight.split([36, 36, 48]), strict=True)
            saved |= {name.replace("conv1d", f"{part}_conv1d"): own.contiguous() for part, own in parts}
    save_file(saved, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    expected = their_logits(theirs, tokens)
    import_model(str(tmp_path / "saved"), tmp_path / "imported")
    assert (load(tmp_path / "imported").model(tokens) - expected).abs().max() <= TOLERANCE
    export_model(tmp_path / "imported", tmp_path / "theirs")
    assert torch.equal(their_logits(reload(tmp_path / "theirs"), tokens), expected)


@pytest.mark.slow
def test_an_export_in_16_bits_is_checked_with_the_bias_of_the_choice_that_was_written(tmp_path: Path) -> None:
    theirs = their_model("deepseek_v3, experts")
    for name, buffer in theirs.named_buffers():
        if name.endswith("correction_bias"):
            buffer += 100  # of which bfloat16 keeps no fractions
    theirs.save_pretrained(tmp_path / "saved")
    import_model(str(tmp_path / "saved"), tmp_path / "imported")
    said = export_model(tmp_path / "imported", tmp_path / "theirs", torch.bfloat16)
    assert said.endswith("loads it, with the same logits")


def test_a_file_of_16_bits_keeps_the_bias_of_the_choice_in_32(tmp_path: Path) -> None:
    theirs = their_model("deepseek_v3, experts").bfloat16()
    bias = theirs.model.layers[-1].mlp.gate.e_score_correction_bias
    bias.data = bias.float() + torch.rand(len(bias))
    theirs.save_pretrained(tmp_path / "saved")
    import_model(str(tmp_path / "saved"), tmp_path / "imported")
    model = load(tmp_path / "imported").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.blocks[-1].ffn.choice_bias, bias)  # type: ignore[arg-type]


def test_the_context_of_longrope_ends_where_its_long_factors_begin(tmp_path: Path) -> None:
    their_model("phi3, longrope, whose context is longer").save_pretrained(tmp_path / "theirs")
    found = import_model(str(tmp_path / "theirs"), tmp_path / "imported")
    assert f"max_position_embeddings={4 * CONTEXT} (for texts up to {CONTEXT} tokens)" in found
    assert load(tmp_path / "imported").model.max_seq_len == CONTEXT


def test_every_family_is_among_the_cases() -> None:
    assert {family.model_type for family in FAMILIES} == {model_type for model_type, _ in CASES.values()}
