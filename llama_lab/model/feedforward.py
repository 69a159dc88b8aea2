"""Feed-forward layers `(B, T, dim) -> (B, T, dim)`. `hidden_dim` is always the real width of the matrices."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .init import ResidualOutput
from .packing import together

Activation = Callable[[], nn.Module]  # a factory, so that every layer has its own


class SquaredReLU(nn.Module):
    """max(0, x)² (So et al. 2021, Primer)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply elementwise."""
        return F.relu(x).square()


class FeedForward(nn.Module):
    """down(activation(up(x))): the feed-forward of Vaswani et al. 2017, eq. 2."""

    packs = ("up",)

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation, up_bias: bool = False, down_bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation()
        self.up = nn.Linear(dim, hidden_dim, bias=up_bias)
        self.down = ResidualOutput(hidden_dim, dim, bias=down_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x (B, T, dim)` to the same shape."""
        (up,) = together(x, self.up)
        return self.down(self.activation(up))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)): the gated linear units of Shazeer 2020, eqs. 5 and 6."""

    packs = ("gate", "up")

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: Activation,
        gate_bias: bool = False,
        up_bias: bool = False,
        down_bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation()
        self.gate = nn.Linear(dim, hidden_dim, bias=gate_bias)
        self.up = nn.Linear(dim, hidden_dim, bias=up_bias)
        self.down = ResidualOutput(hidden_dim, dim, bias=down_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x (B, T, dim)` to the same shape."""
        gate, up = together(x, self.gate, self.up)
        return self.down(self.activation(gate) * up)  # type: ignore[no-any-return]
