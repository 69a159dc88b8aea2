"""Norms and feed-forwards on float32 vectors, forward and backward."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from llama_lab.config.components import CONF_DIR, build
from llama_lab.model.feedforward import GatedFeedForward
from llama_lab.model.norm import LayerNorm, RMSNorm

from .rows import Row, measure, speeds
from .subjects import compose

Pass = tuple[Callable[[], Tensor], Sequence[Tensor]]

FIRST = "relu"  # the feed-forward of 2017, without biases: the others are compared with it


def layer_norm(norm: LayerNorm, x: Tensor) -> Tensor:
    """`norm(x)` for `x (..., dim)`, written out (Ba et al. 2016, eq. 4)."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def rms_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    """`norm(x)` for `x (..., dim)`, written out (Zhang & Sennrich 2019, eq. 4)."""
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


# The functions of LayerNorm and RMSNorm that are compared with each other.
# Built in: one operator of PyTorch, which may be fused; on a CPU, RMSNorm is composed of the same steps as written out.
KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "written out": (layer_norm, rms_norm),
    "built in": (LayerNorm.forward, RMSNorm.forward),
}


def measure_norms(
    rounds: int, device: torch.device, dims: Sequence[int] = (256, 512, 1024, 2048, 4096), vectors: int = 2048
) -> list[Row]:
    """Measure both norms of each kind at every width."""
    rows = []
    for dim in dims:
        x = torch.randn(vectors, dim, device=device, requires_grad=True)
        norms = (LayerNorm(dim).to(device), RMSNorm(dim).to(device))
        for kind, functions in KINDS.items():
            pairs = zip(norms, functions, strict=True)
            contenders = {f"{type(n).__name__} {kind}": (partial(f, n, x), [x, *n.parameters()]) for n, f in pairs}
            rows += measure_passes("norm", str(dim), contenders, rounds)
    return rows


def measure_feedforwards(rounds: int, device: torch.device, dim: int = 768, tokens: int = 512) -> list[Row]:
    """Measure every option of the config group `ffn`.

    As in the configs, gated options have two thirds of the hidden width, to a multiple of 8. If the width is a multiple
    of 24, all have exactly equal parameters, except for biases.
    """
    x = torch.randn(1, tokens, dim, device=device, requires_grad=True)
    layers = {option: feedforward(option, dim).to(device) for option in options()}
    contenders = {option: (partial(layer, x), [x, *layer.parameters()]) for option, layer in layers.items()}
    return measure_passes("ffn", str(dim), contenders, rounds)


def measure_passes(component: str, size: str, contenders: Mapping[str, Pass], rounds: int) -> list[Row]:
    """Measure each forward pass, as in training, and the backward pass to the tensors beside it."""
    forwards = {what: forward for what, (forward, _) in contenders.items()}
    backwards = {what: backward(forward(), inputs) for what, (forward, inputs) in contenders.items()}
    return [
        *measure(component, size, "forward", forwards, rounds),
        *measure(component, size, "backward", backwards, rounds),
    ]


def backward(output: Tensor, inputs: Sequence[Tensor]) -> Callable[[], object]:
    """A function that computes only the gradients of `inputs`, from a random gradient of `output`."""
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def options() -> list[str]:
    """The options of the group `ffn`, starting with `FIRST`."""
    return sorted((path.stem for path in (CONF_DIR / "ffn").glob("*.yaml")), key=lambda name: (name != FIRST, name))


def feedforward(option: str, dim: int) -> nn.Module:
    """The feed-forward of `ffn=option` in a model of width `dim`, with mlp_ratio 4."""
    cfg = compose(f"ffn={option}", f"model.dim={dim}", "size.mlp_ratio=4.0").model
    layer: nn.Module = build(cfg.ffn, "model.ffn")(dim=dim, hidden_dim=cfg.hidden_dim)
    return layer


def norm_finding(rows: Sequence[Row]) -> str:
    """The speed of RMSNorm relative to LayerNorm, over the widths."""
    found = (f"{kind} {speeds(rows, f'RMSNorm {kind}')}" for kind in KINDS)
    return f"RMSNorm to LayerNorm of its kind: {'; '.join(found)}"


def feedforward_finding(rows: Sequence[Row]) -> str:
    """The speed of gated options relative to ReLU."""
    gated = (option for option in options() if isinstance(feedforward(option, 8), GatedFeedForward))
    return f"gated ones to ReLU's speed: {speeds(rows, *gated)}"
