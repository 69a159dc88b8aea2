"""Norms equal PyTorch's own, computed in float64."""

import pytest
import torch
from torch import nn

from llama_lab.model.norm import Centring, LayerNorm, RMSNorm

X = 3 * torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0)) + 1
GAIN, BIAS = torch.randn(2, 12, generator=torch.Generator().manual_seed(1))


def agree(ours: nn.Module, oracle: nn.Module) -> None:
    """Outputs and the gradients of input and parameters equal those of `oracle` in float64."""
    results = []
    for module, x in ((ours, X), (oracle.double(), X.double())):
        x = x.clone().requires_grad_()
        y = module(x)
        grads = torch.autograd.grad((y * torch.arange(12.0)).sum(), [x, *module.parameters()])
        results.append([y.double(), *(g.double() for g in grads)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_equals_pytorchs(bias: bool, eps: float) -> None:
    ours, oracle = LayerNorm(12, eps, bias), nn.LayerNorm(12, eps, bias=bias)
    agree(ours, oracle)
    for module in (ours, oracle):
        module.load_state_dict({"weight": GAIN} | ({"bias": BIAS} if bias else {}))
    agree(ours, oracle)


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rmsnorm_equals_pytorchs(unit_offset: bool, eps: float) -> None:
    ours, oracle = RMSNorm(12, eps, unit_offset), nn.RMSNorm(12, eps)
    agree(ours, oracle)  # both start as the plain normalisation
    ours.load_state_dict({"weight": GAIN - 1 if unit_offset else GAIN})
    oracle.load_state_dict({"weight": GAIN})
    agree(ours, oracle)


@pytest.mark.parametrize(("ours", "oracle"), [(LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)])
def test_norms_without_a_gain_learn_nothing(ours: type[nn.Module], oracle: type[nn.Module]) -> None:
    options = {"bias": False} if ours is LayerNorm else {}
    norm = ours(12, 0.1, gain=False, **options)
    assert not list(norm.parameters())
    agree(norm, oracle(12, 0.1, elementwise_affine=False))
    with torch.no_grad():
        torch.testing.assert_close(norm(X), ours(12, 0.1)(X))


def test_centring_is_what_layernorm_does_before_rmsnorm() -> None:
    agree(nn.Sequential(Centring(12), RMSNorm(12, 0.1, gain=False)), nn.LayerNorm(12, 0.1, elementwise_affine=False))


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_norms_compute_in_float32_whatever_the_dtype(norm: type[nn.Module]) -> None:
    ours, x = norm(12).bfloat16(), X.bfloat16()
    nn.init.normal_(ours.weight)
    y = ours(x)
    exact = ours.float()(x.float())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())
