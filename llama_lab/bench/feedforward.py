"""Time of every option of the config group `ffn`, at equal parameters, forward and backward."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from llama_lab.config.components import CONF_DIR, build
from llama_lab.model.feedforward import GatedFeedForward

from .measurement import Measurement, backward, measure
from .subjects import compose

FIRST = "relu"  # that of 2017, without biases: the others are compared with it


def measure_feedforwards(dim: int, tokens: int, rounds: int, device: torch.device) -> list[Measurement]:
    """Measure each option on `tokens` float32 vectors of width `dim`; the forward pass is that of training.

    As in the configs, gated options have two thirds of the hidden width, to a multiple of 8. If `dim` is a multiple of
    24, all have exactly equal parameters, except for biases.
    """
    x = torch.randn(1, tokens, dim, device=device, requires_grad=True)
    layers = {option: feedforward(option, dim).to(device) for option in options()}
    forwards: dict[str, Callable[[], Tensor]] = {option: partial(layer, x) for option, layer in layers.items()}
    backwards = {option: backward(forwards[option](), [x, *layer.parameters()]) for option, layer in layers.items()}
    return [
        *measure("ffn", str(dim), "forward", forwards, rounds),
        *measure("ffn", str(dim), "backward", backwards, rounds),
    ]


def options() -> list[str]:
    """The options of the group, starting with `FIRST`."""
    return sorted((path.stem for path in (CONF_DIR / "ffn").glob("*.yaml")), key=lambda name: (name != FIRST, name))


def feedforward(option: str, dim: int) -> nn.Module:
    """The feed-forward of `ffn=option` in a model of width `dim`, with mlp_ratio 4."""
    cfg = compose(f"ffn={option}", f"model.dim={dim}", "size.mlp_ratio=4.0").model
    layer: nn.Module = build(cfg.ffn, "model.ffn")(dim=dim, hidden_dim=cfg.hidden_dim)
    return layer


def feedforward_finding(measurements: Sequence[Measurement]) -> str:
    """The speed of gated options relative to ReLU."""
    options_with_gate = [option for option in options() if isinstance(feedforward(option, 8), GatedFeedForward)]
    gated = [m for m in measurements if m.what in options_with_gate]
    found = []
    for direction in ("forward", "backward"):
        speeds = [m.speed_ratio for m in gated if m.direction == direction]
        found.append(f"{min(speeds):.2f} to {max(speeds):.2f} times {direction}")
    return f"gated ones to ReLU's speed: {', '.join(found)}"
