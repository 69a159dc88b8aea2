"""Normalisation layers over the last dimension. All take and return `(..., dim)` and compute in float32."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # a factory, of the width


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016, eq. 4): subtract the mean, divide by the standard deviation."""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        check_eps(eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain normalisation."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x (..., dim)`."""
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps).type_as(x)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang & Sennrich 2019, eq. 4).

    `unit_offset` stores the gain as its distance from one (Gemma), so that weight decay pulls towards the identity.
    """

    def __init__(self, dim: int, eps: float = 1e-5, unit_offset: bool = False) -> None:
        super().__init__()
        check_eps(eps)
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain normalisation."""
        nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x (..., dim)`."""
        gain = self.weight.float() + 1.0 if self.unit_offset else self.weight.float()
        return F.rms_norm(x.float(), gain.shape, gain, self.eps).type_as(x)


class NoNorm(nn.Module):
    """No normalisation: the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` unchanged."""
        return x


def check_eps(eps: float) -> None:
    """Raise ValueError for an epsilon that could lead to the root of a negative number."""
    if eps < 0:
        raise ValueError(f"norm.eps={eps}: must not be negative")
