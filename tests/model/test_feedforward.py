"""Feed-forwards equal the formulas of Shazeer 2020, and cost what they should."""

import math

import pytest
import torch
from torch import Tensor
from transformers.activations import XIELUActivation

from llama_lab.config.components import build_model
from llama_lab.model.feedforward import XIELU, FeedForward, GatedFeedForward
from tests.composing import cover, decoder, kinds
from tests.model.cases import switched


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": gelu_tanh,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu2": lambda x: x * x * (x > 0),
    "xielu": lambda x: 0.8 * torch.where(x > 0, x * x, torch.exp(x) - 1 - x) + 0.5 * x,
}
GATES = {
    "bilinear": lambda x: x,
    "geglu": ACTIVATIONS["gelu"],
    "geglu_tanh": gelu_tanh,
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "reglu": ACTIVATIONS["relu"],
    "swiglu": ACTIVATIONS["silu"],
    "swiglu_clamped": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


PLAIN = [option for option in kinds("ffn") if not option.startswith("moe")]


@pytest.mark.parametrize(("option", "biased"), cover(PLAIN, [False, True], meeting=1))
def test_feedforwards_equal_their_formulas(option: str, biased: bool) -> None:
    kind = option.removesuffix("_bias")
    maps = ["gate", "up", "down"] if kind in GATES else ["up", "down"]
    cfg = switched("llama", "ffn", option)
    for name in maps:
        cfg.model.ffn[f"{name}_bias"] = biased
    ffn = build_model(cfg, 97).blocks[0].ffn.double()
    generator = torch.Generator().manual_seed(0)
    for name, p in ffn.named_parameters():
        if not name.startswith("activation"):
            p.data.normal_(0, 0.5, generator=generator)
    weights = dict(ffn.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    x = torch.randn(3, 5, 32, dtype=torch.float64, generator=generator)
    up = linear("up", x)
    if kind == "swiglu_clamped":
        assert up.abs().max() > 7
        hidden = GATES[kind](linear("gate", x).minimum(torch.tensor(7.0))) * (up.clip(-7, 7) + 1)
    else:
        hidden = GATES[kind](linear("gate", x)) * up if kind in GATES else ACTIVATIONS[kind](up)
    torch.testing.assert_close(ffn(x), linear("down", hidden), rtol=1e-6, atol=1e-5)
    assert {name for name in weights if "bias" in name} == {f"{name}.bias" for name in maps if biased}


def test_xielu_is_apertus_s_with_its_gradients() -> None:
    ours, theirs = XIELU(), XIELUActivation(dtype=torch.float32)
    state = {"alpha_p": torch.tensor([-0.3]), "alpha_n": torch.tensor([0.7])}
    for module in (ours, theirs):
        assert not module.load_state_dict(state, strict=False).unexpected_keys
    points = [-200.0, -3.0, -1e-7, 0.0, 0.5, 200.0]  # without a gradient that is no number
    xs = [torch.tensor(points, requires_grad=True) for _ in range(2)]
    found, expected = (
        (y := module(x), *torch.autograd.grad(y.sum(), [x, module.alpha_p, module.alpha_n]))
        for module, x in zip((ours, theirs), xs, strict=True)
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    assert ours.bfloat16()(torch.tensor(points, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("size", ["nano", "gpt2", "llama_7b"])
def test_a_gated_model_has_the_parameters_of_an_ungated_one(size: str) -> None:
    shared = (f"size={size}", "model.vocab_size=null")
    gated, ungated = (decoder(*shared, f"ffn={ffn}", vocab_size=1024, device="meta") for ffn in ("swiglu", "silu"))
    assert [type(model.blocks[0].ffn) for model in (gated, ungated)] == [GatedFeedForward, FeedForward]
    counts = [sum(p.numel() for p in model.parameters()) for model in (gated, ungated)]
    assert counts[0] == pytest.approx(counts[1], rel=0.005)
