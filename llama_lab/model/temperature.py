"""Position-dependent temperatures of queries (`attention.temperature`), which keep attention sharp in long texts.

A factor multiplies the scores of a query before the softmax. Each takes positions, integers `(..., T)` from 0, and
returns float32 of the same shape.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_context import AttentionContext, for_heads
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
    """1 + scale * log(1 + floor((p + offset) / step)): one in the first steps (Llama 4, after Nakanishi 2025).

    offset: number of the first position, 1 in Llama 4 and 0 in Ministral 3.
    """

    scale: float
    step: int
    offset: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError unless scale and step are positive, and the offset is not negative."""
        check_positive("attention.temperature.scale", self.scale)
        check_positive("attention.temperature.step", self.step)
        if self.offset < 0:
            raise ValueError(f"attention.temperature.offset={self.offset}: must not be negative")

    def __call__(self, positions: Tensor) -> Tensor:
        """The factors at `positions`."""
        return 1 + self.scale * torch.log(1 + torch.floor((positions.float() + self.offset) / self.step))


def apply_temperature(query: Tensor, temperature: Temperature | None, context: AttentionContext) -> Tensor:
    """Queries `(B, H, T, Dh)`, multiplied by the factors of their positions if there are any."""
    if temperature is None:
        return query
    return (query * temperature(for_heads(context.positions, 1))[..., None]).type_as(query)
