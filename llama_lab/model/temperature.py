"""Temperatures of queries by position: factors, as `attention.temperature`, that keep attention sharp in long texts.

A factor multiplies the scores of a query before the softmax. Each takes positions, integers `(..., T)` from 0, and
returns float32 of the same shape.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .init import check_positive

Temperature = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LogTemperature:
    """log(p + 1) / log(length): one at `length` keys, and as sharp with fewer or more (Chiang & Cholak 2022).

    minimum: 1 leaves texts of up to `length` tokens as they are, and acts beyond that (Qwen's `use_logn_attn`).
    """

    length: int
    minimum: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a length whose logarithm is not positive, or a negative minimum."""
        if self.length < 2:
            raise ValueError(f"attention.temperature.length={self.length}: must be at least 2")
        if self.minimum < 0:
            raise ValueError(f"attention.temperature.minimum={self.minimum}: must not be negative")

    def __call__(self, positions: Tensor) -> Tensor:
        """The factors at `positions`."""
        return (torch.log(positions.float() + 1) / math.log(self.length)).clamp(min=self.minimum)


@dataclass(frozen=True)
class StepTemperature:
    """1 + scale * log(1 + floor((p + 1) / step)): one in the first `step` tokens (Llama 4, after Nakanishi 2025)."""

    scale: float
    step: int

    def __post_init__(self) -> None:
        """Raise ValueError unless both are positive."""
        for name, value in vars(self).items():
            check_positive(f"attention.temperature.{name}", value)

    def __call__(self, positions: Tensor) -> Tensor:
        """The factors at `positions`."""
        return 1 + self.scale * torch.log(1 + torch.floor((positions.float() + 1) / self.step))
