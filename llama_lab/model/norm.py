"""Normalisation layers over the last dimension. All take and return `(..., dim)` and compute in float32."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # a factory, of the width


class LayerNorm(nn.LayerNorm):
    """Layer normalisation (Ba et al. 2016, eq. 4): subtract the mean, divide by the standard deviation."""

    def __init__(self, dim: int, eps: float = 1e-5, bias: bool = True) -> None:
        check_eps(eps)
        super().__init__(dim, eps, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x (..., dim)`."""
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).type_as(x)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation (Zhang & Sennrich 2019, eq. 4).

    `unit_offset` stores the gain as its distance from one (Gemma), so that weight decay pulls towards the identity.
    """

    eps: float

    def __init__(self, dim: int, eps: float = 1e-5, unit_offset: bool = False) -> None:
        check_eps(eps)
        self.unit_offset = unit_offset  # first, since `reset_parameters` reads it
        super().__init__(dim, eps)

    def reset_parameters(self) -> None:
        """Initialise as plain normalisation, with a gain of one."""
        nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x (..., dim)`."""
        gain = self.weight.float() + 1.0 if self.unit_offset else self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, gain, self.eps).type_as(x)


class NoNorm(nn.Identity):
    """No normalisation: the identity, for any width."""


def check_eps(eps: float) -> None:
    """Raise ValueError for a negative epsilon: the variance plus epsilon could be negative."""
    if eps < 0:
        raise ValueError(f"norm.eps={eps}: must not be negative")
