"""The mixer of a block: attention, or whatever stands in its place. It alone lets a token see the tokens before it.

A decoder calls the factory of its mixers with those of its sizes that the factory names: dim, n_heads, n_kv_heads,
head_dim, hidden_dim, max_seq_len, n_layers, norm, and layer, counted from 0.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from .layout import Layout
from .state import State

NEW_STATE = "new_state(batch_size, length, device, dtype)"


class Mixer(nn.Module, ABC):
    """What a block needs in attention's place: `forward` and `flops_per_token`, and `new_state` to decode with.

    full_after: after how many tokens its state stops growing: a window, or 0 for a recurrence; None if it never does.
    kernel: what computes it, as a run's summary names it.
    int8_state: whether `new_state` takes torch.int8, beside floating dtypes of 16 bits or more.
    """

    full_after: int | None = None
    kernel: str = "eager"
    int8_state: ClassVar[bool] = False

    @abstractmethod
    def forward(self, x: Tensor, layout: Layout, state: State | None = None) -> Tensor:
        """Mix `x (B, T, D)`, whose tokens stand at `layout.positions`, after those in `state`, which it updates."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one token's forward pass, averaged over `seq_len` tokens of which each sees those that it may."""

    def flops_per_token_dense(self, seq_len: int) -> float:
        """The same as kernels without a causal discount compute it; default: `flops_per_token`."""
        return self.flops_per_token(seq_len)

    def active_params(self) -> int:
        """Parameters that one token uses; default: all."""
        return sum(p.numel() for p in self.parameters())

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state of `batch_size` sequences before their first token, for up to `length` tokens.

        A mixer without one trains, but cannot decode.
        """
        raise NotImplementedError(f"{type(self).__name__} has no {NEW_STATE}")

    @property
    def has_state(self) -> bool:
        """Whether it has a `new_state`."""
        return type(self).new_state is not Mixer.new_state

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state after `length` tokens; default: of what `new_state` makes."""
        return self.new_state(1, length, torch.device("meta"), dtype).nbytes

    def state_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one more token adds before the state is full."""
        return self.state_bytes(2, dtype) - self.state_bytes(1, dtype)


def class_name(module: nn.Module) -> str:
    """A module's class as it would be imported."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
