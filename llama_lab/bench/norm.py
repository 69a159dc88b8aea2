"""LayerNorm against RMSNorm, forward and backward, built into PyTorch and written out in plain tensor operations."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from llama_lab.model.norm import LayerNorm, RMSNorm

from .measurement import Measurement, backward, measure, ratios


def layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    """`norm(x)` for `x (..., dim)`, written out (Ba et al. 2016, eq. 4)."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)` for `x (..., dim)`, written out (Zhang & Sennrich 2019, eq. 4)."""
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


# (class with the parameters, timed function) by name and kind.
# Built in: one operator of PyTorch, which may be fused; on a CPU, RMSNorm is composed of the same steps as written out.
CONTENDERS: dict[str, dict[str, tuple[type[nn.Module], Callable[..., Tensor]]]] = {
    "written out": {"LayerNorm": (LayerNorm, layer_norm), "RMSNorm": (RMSNorm, rms_norm)},
    "built in": {"LayerNorm": (LayerNorm, LayerNorm.forward), "RMSNorm": (RMSNorm, RMSNorm.forward)},
}


def measure_norms(dims: Sequence[int], rows: int, rounds: int, device: torch.device) -> list[Measurement]:
    """Measure both norms on `rows` float32 vectors at every width; the forward pass is that of training."""
    return [m for dim in dims for kind in CONTENDERS for m in measure_kind(kind, dim, rows, rounds, device)]


def measure_kind(kind: str, dim: int, rows: int, rounds: int, device: torch.device) -> list[Measurement]:
    """Measure LayerNorm and RMSNorm of one kind, forward and backward."""
    x = torch.randn(rows, dim, device=device, requires_grad=True)
    forwards: dict[str, Callable[[], Tensor]] = {}
    backwards: dict[str, Callable[[], object]] = {}
    for name, (build, function) in CONTENDERS[kind].items():
        norm = build(dim).to(device)
        what = f"{name} {kind}"
        forwards[what] = partial(function, norm, x)
        backwards[what] = backward(forwards[what](), [x, *norm.parameters()])
    return [
        *measure("norm", str(dim), "forward", forwards, rounds),
        *measure("norm", str(dim), "backward", backwards, rounds),
    ]


def norm_finding(measurements: Sequence[Measurement]) -> str:
    """The speed of RMSNorm relative to LayerNorm, over the widths."""
    found = (
        f"{kind} {ratios(measurements, f'RMSNorm {kind}', 'forward')} times forward, "
        f"{ratios(measurements, f'RMSNorm {kind}', 'backward')} backward"
        for kind in CONTENDERS
    )
    return f"RMSNorm to LayerNorm of its kind: {'; '.join(found)}"
