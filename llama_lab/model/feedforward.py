"""Feed-forward layers `(B, T, dim) -> (B, T, dim)`. `hidden_dim` is always the real width of the matrices."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .init import ResidualOutput, check_positive

Activation = Callable[[], nn.Module]  # a factory, so that every layer has its own


class SquaredReLU(nn.Module):
    """max(0, x)² (So et al. 2021, Primer)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply elementwise."""
        return F.relu(x).square()


class Swish(nn.Module):
    """x sigmoid(beta x) (Ramachandran et al. 2017); SiLU at 1, and close to GELU at 1.702."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """Apply elementwise."""
        return x * torch.sigmoid(self.beta * x)


class XIELU(nn.Module):
    """xIELU (Huang & Schlag 2024, section 4): x beta, with a trained square above 0 and exponential below.

    beta and eps are buffers, since files of Apertus hold them with the slopes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.beta, self.eps = nn.Buffer(torch.tensor(0.5)), nn.Buffer(torch.tensor(-1e-6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with slopes of 0.8 on both sides."""
        nn.init.constant_(self.alpha_p, math.log(math.expm1(0.8)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(0.8 - 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        """Apply elementwise."""
        beta = self.beta.type_as(x)
        positive, negative = F.softplus(self.alpha_p).type_as(x), F.softplus(self.alpha_n).type_as(x) + beta
        below = torch.expm1(torch.minimum(x, self.eps.type_as(x))) - x
        return torch.where(x > 0, positive * x * x, negative * below) + beta * x


class FeedForward(nn.Module):
    """down(activation(up(x))): the feed-forward of Vaswani et al. 2017, eq. 2."""

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation, up_bias: bool = False, down_bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation()
        self.up = nn.Linear(dim, hidden_dim, bias=up_bias)
        self.down = ResidualOutput(hidden_dim, dim, bias=down_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x (B, T, dim)` to the same shape."""
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)): the gated linear units of Shazeer 2020, eqs. 5 and 6."""

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
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class ClampedFeedForward(GatedFeedForward):
    """Gated, with inputs of at most `limit`, and one more than the linear one (gpt-oss, OpenAI 2025).

    down(activation(min(gate(x), limit)) * (clamp(up(x), -limit, limit) + 1)); other arguments: of `GatedFeedForward`.
    """

    def __init__(self, limit: float, **gated: Any) -> None:
        check_positive("ffn.limit", limit)
        super().__init__(**gated)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """Map `x (B, T, dim)` to the same shape."""
        gate, up = self.gate(x).clamp(max=self.limit), self.up(x).clamp(-self.limit, self.limit)
        return self.down(self.activation(gate) * (up + 1))  # type: ignore[no-any-return]
