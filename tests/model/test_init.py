"""Initialisation: seeded by name, materialised where the model is, and distributed as promised."""

import math
import re
from typing import Any, ClassVar

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from llama_lab.config.components import build_model
from llama_lab.hf.encoder_families import T5
from llama_lab.hf.family import flat_settings
from llama_lab.hf.loading import named_weights
from llama_lab.model import Decoder
from llama_lab.model.init import Normal, ResidualOutput, initialise
from tests.composing import compose_config, cover, decoder, options

SEEDS = (("seed", 1), ("model.seed", 1), ("seed", 2))
RESIDUAL = ("attention.output.weight", "ffn.down.weight")


def weights(model: Decoder, kind: type[nn.Module] = nn.Linear) -> dict[str, Tensor]:
    """Weights of the modules of a kind, by name."""
    return {f"{name}.weight": m.weight.detach() for name, m in model.named_modules() if isinstance(m, kind)}


def wide(*overrides: str) -> Decoder:
    """A model whose matrices are large enough to estimate a standard deviation to 1%."""
    return decoder("size=nano", *overrides, vocab_size=200)


def equal(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(p, other.get_parameter(name)) for name, p in one.named_parameters())


def test_the_same_seed_agrees_and_another_differs() -> None:
    """Whether it is the run's or the model's, and whatever the global generator has drawn."""
    one, again, other = (decoder(f"{key}={seed}", "position=learned") for key, seed in SEEDS)
    assert equal(one, again)
    others = dict(other.named_parameters())
    assert not any(torch.equal(p, others[name]) for name, p in one.named_parameters() if "norm" not in name)
    assert equal(decoder("model.n_layers=2"), decoder("model.n_layers=4")), "layers of a deeper model begin alike"
    firsts = [w.flatten()[:4].tolist() for w in (weights(one) | weights(one, nn.Embedding)).values()]
    assert len({tuple(first) for first in firsts}) == len(firsts), "two matrices start alike"


class Drawing(nn.Module):
    """A user's component that starts at random; places: where a new tensor of it lay as it started."""

    places: ClassVar[list[str]] = []

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, device="cpu"))

    def reset_parameters(self) -> None:
        self.places.append(torch.ones(1).device.type)
        nn.init.normal_(self.weight)


def test_initial_values_are_drawn_on_the_cpu_whatever_the_default_device() -> None:
    """From seed and name, and the global generator stays as it was."""
    model, starts = decoder("arch=gpt2"), []
    drawn = {name: p.clone() for name, p in model.state_dict().items()}
    for noise, device in enumerate(("cpu", "meta")):
        torch.manual_seed(noise)
        expected = torch.random.get_rng_state()
        mine = nn.ModuleDict({"a": Drawing(4), "b": Drawing(4)})
        with torch.device(device):
            initialise(model, model.weight_init, model.seed)
            initialise(mine, Normal(), seed=3)
        assert torch.equal(torch.random.get_rng_state(), expected)
        assert all(torch.equal(value, drawn[name]) for name, value in model.state_dict().items())
        starts.append(mine)
    assert torch.equal(starts[0]["a"].weight, starts[1]["a"].weight)
    assert not torch.equal(starts[0]["a"].weight, starts[0]["b"].weight)
    assert {*Drawing.places} == {"cpu"}


@pytest.mark.parametrize("arch", ["gpt2", "bert", "mixtral", "qwen3_next", "olmo_hybrid"])
def test_biases_start_at_zero_and_norms_at_the_identity(arch: str) -> None:
    model = decoder(f"arch={arch}")
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    assert all((p == 0).all() for name, p in biases.items() if not name.endswith(("decay.bias", "conv.bias")))
    x = torch.randn(5, 32)
    outside = {name: module for name, module in model.named_modules() if ".attention." not in name}
    for module in (m for name, m in outside.items() if name.split(".")[-1] in ("norm", "attention_norm")):
        centred = x - x.mean(-1, keepdim=True) if hasattr(module, "bias") else x
        rms = centred.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(module(x), centred / rms, rtol=1e-3, atol=0)


def test_normal_has_one_standard_deviation_for_all_matrices() -> None:
    for name, weight in weights(wide("init=normal", "model.init.std=0.03")).items():
        assert weight.std().item() == pytest.approx(0.03, rel=0.03), name
        assert weight.mean().item() == pytest.approx(0, abs=1e-3), name
        assert (weight.abs() > 3 * 0.03).any(), name  # not truncated


def test_scaled_shrinks_residual_outputs_only() -> None:
    n_layers = 7
    model = wide("init=scaled", "model.init.std=0.03", f"model.n_layers={n_layers}", "ffn=geglu")
    for name, weight in weights(model).items():
        std = 0.03 / math.sqrt(2 * n_layers) if name.endswith(RESIDUAL) else 0.03
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
    assert len(weights(model, ResidualOutput)) == 2 * n_layers


def test_xavier_has_its_variance_and_bound() -> None:
    gain = 0.5
    for name, weight in weights(wide("init=xavier", f"model.init.gain={gain}", "attention=gqa")).items():
        std = gain * math.sqrt(2 / sum(weight.shape))
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert weight.abs().max().item() == pytest.approx(std * math.sqrt(3), rel=0.01), name


def test_deepnorm_shrinks_all_of_a_block_but_queries_and_keys() -> None:
    """Wang et al. 2022, figure 2: values, outputs and feed-forwards by (8 layers)^(-1/4)."""
    n_layers = 7
    model = wide("init=deepnorm", f"model.n_layers={n_layers}", "ffn=geglu", "attention=gqa")
    for name, weight in weights(model).items():
        shrunk = any(part in name for part in ("value", "output", "gate", "up", "down"))
        std = math.sqrt(2 / sum(weight.shape)) * ((8 * n_layers) ** -0.25 if shrunk else 1)
        assert weight.std().item() == pytest.approx(std, rel=0.03), name


@pytest.mark.parametrize("attention", ["gated_delta", "mamba2"])
def test_so_it_does_with_recurrent_mixers_but_where_queries_and_keys_scale_what_is_added(attention: str) -> None:
    overrides = (f"attention={attention}", "position=none")
    plain, shrunk = (weights(wide(f"init={init}", *overrides)) for init in ("xavier", "deepnorm"))
    kept = {name for name in plain if name.startswith("blocks") and plain[name].equal(shrunk[name])}
    assert kept == {name for name in plain if attention != "mamba2" and re.search("attention.(query|key)", name)}


@pytest.mark.parametrize("arch", ["t5", "t5_v1_1"])
def test_t5_begins_as_transformers_draws_it(arch: str) -> None:
    """Every tensor of both towers, tables and heads included, by the standard deviations of a T5 of the same config."""
    cfg = compose_config(f"arch={arch}", "size=nano", "model.n_layers=2", "model.n_heads=8", "model.head_dim=32")
    model = build_model(cfg, 200)
    node: dict[str, Any] = OmegaConf.to_container(cfg.model, resolve=True)  # type: ignore[assignment]
    settings = flat_settings(node | {"vocab_size": 200})
    torch.manual_seed(0)
    theirs = T5ForConditionalGeneration(T5Config(**T5.write_config(settings))).state_dict()
    ours = T5.to_theirs(named_weights(model), settings)
    assert ours.keys() == theirs.keys() - {name for name in theirs if re.fullmatch(T5.idle, name)} - (
        {"lm_head.weight"} if arch == "t5" else set()
    )
    for name, weight in ours.items():
        apart = 5 * weight.numel() ** -0.5  # as far as two samples of so many numbers may differ
        assert weight.std().item() == pytest.approx(theirs[name].std().item(), rel=apart), name
    assert {round(weight.std().item() / 128**-0.5, 1) for weight in ours.values()} >= {0.2, 1.0, 11.3}


@pytest.mark.parametrize("cutoff", [1.0, 3.0])
def test_trunc_stays_within_its_cutoff(cutoff: float) -> None:
    density, mass = math.exp(-(cutoff**2) / 2) / math.sqrt(2 * math.pi), math.erf(cutoff / math.sqrt(2))
    std = 0.04 * math.sqrt(1 - 2 * cutoff * density / mass)  # of a normal truncated on both sides
    for name, weight in weights(wide("init=trunc", "model.init.std=0.04", f"model.init.cutoff={cutoff}")).items():
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert 0.95 * cutoff * 0.04 * 0.9 < weight.abs().max().item() <= cutoff * 0.04, name


@pytest.mark.parametrize(("embedding", "init"), cover(["untied", "tied", "scaled"], options("init"), meeting=1))
def test_tables_keep_their_own_standard_deviation_whatever_the_init(embedding: str, init: str) -> None:
    model = wide(f"init={init}", f"embedding={embedding}", "position=learned")
    std = {"scaled": 128**-0.5, "tied": math.sqrt(2 / (5 * 128)), "untied": 1.0}[embedding]
    assert model.embedding.tokens.weight.std().item() == pytest.approx(std, rel=0.03)
    signal = 1.0 if embedding == "scaled" else std
    assert model.position.table.weight.std().item() == pytest.approx(signal, rel=0.03)
    assert (model.embedding.head.weight is model.embedding.tokens.weight) == (embedding != "untied")


def test_tied_weights_are_drawn_once_under_the_tables_name() -> None:
    tied, untied = (decoder(f"embedding={embedding}", "model.embedding.std=0.02") for embedding in ("tied", "untied"))
    assert torch.equal(tied.embedding.tokens.weight, untied.embedding.tokens.weight)
    assert not torch.equal(untied.embedding.head.weight, untied.embedding.tokens.weight)


class Silent(nn.Module):
    """A user's component that forgot to say how it starts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


def test_a_component_that_cannot_start_itself_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^a: Silent has parameters but no reset_parameters\(\); give it one"):
        initialise(nn.ModuleDict({"a": Silent(4)}), Normal(), seed=3)
