"""The interface of mixers: attention, or what replaces it. Only in the mixer do tokens see other tokens.

A factory of mixers is called with those of these arguments that its signature names: dim, n_heads, n_kv_heads,
head_dim, hidden_dim, max_seq_len, n_layers, norm, layer, counted from 0, and causal, which is False in an encoder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attention_context import AttentionContext
from .encoding import HOOKS, Position, has_hook
from .init import check_positive
from .norm import Norm
from .state import State

NEW_STATE = "new_state(batch_size, length, device, dtype)"


class Mixer(nn.Module, ABC):
    """Base class of mixers. Subclasses implement `forward` and `flops_per_token`, and `new_state` if they can decode.

    max_state_tokens: the most tokens that the state holds: a window, or 0 for a recurrence; None for all.
    prefix: number of first tokens that see each other, and of which the model predicts only the first.
    kernel: name of the implementation, for a run's summary.
    int8_state: whether `new_state` supports torch.int8, beside floating dtypes of 16 bits or more.
    documents: whether no token sees another document; where `context.positions` is 0, one starts.
    reads: what it applies of a position encoding: of "rotation", "bias" and "relation", see `encoding.py`.
    """

    max_state_tokens: int | None = None
    prefix: int = 0
    kernel: str = "eager"
    int8_state: ClassVar[bool] = False
    documents: ClassVar[bool] = False
    reads: tuple[str, ...] = ()

    @abstractmethod
    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Mix tokens `x (B, T, D)` at `context.positions`, which follow those in `state`; updates `state` in place."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token, averaged over a sequence of `seq_len` tokens, counting visible keys only."""

    def flops_per_token_dense(self, seq_len: int) -> float:
        """The same with every key counted for every query, as kernels may compute it; default: `flops_per_token`."""
        return self.flops_per_token(seq_len)

    def kernel_in_training(self, batch_size: int, length: int, device: str, kind: torch.dtype) -> str:
        """The implementation that trains on windows of `length` tokens, by products in this type; default: `kernel`."""
        return self.kernel

    def bind_position(self, position: Position) -> None:
        """Called when the model is built, with the position encoding of the layer.

        Raises ValueError for one that the mixer would ignore.
        """
        for hook in HOOKS:
            if has_hook(position, hook) and hook not in self.reads:
                raise ValueError(
                    f"attention={class_name(self)}: would ignore the {hook} of {type(position).__name__} positions; "
                    f'choose position=none, or have it use context.{hook}, and say so with `reads = ("{hook}",)`'
                )

    def bind_first_layer(self, first: "Mixer") -> None:
        """Called on later layers when the model is built, with the first layer's mixer; does nothing by default.

        Tensors are passed on in `context.shared`. Raises ValueError if the first mixer has not what this one needs.
        """

    def active_params(self) -> int:
        """Parameters that one token uses; default: all."""
        return sum(p.numel() for p in self.parameters())

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> State:
        """An empty state for `batch_size` sequences of up to `length` tokens.

        Raises NotImplementedError by default: such a mixer trains, but cannot decode.
        """
        raise NotImplementedError(f"{type(self).__name__} has no {NEW_STATE}")

    @property
    def has_state(self) -> bool:
        """Whether it overrides `new_state`."""
        return type(self).new_state is not Mixer.new_state

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's state after `length` tokens; default: the size of a `new_state`."""
        return self.new_state(1, length, torch.device("meta"), dtype).nbytes

    def state_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one more token adds before the state is full."""
        return self.state_bytes(2, dtype) - self.state_bytes(1, dtype)


def require_kv_heads(n_kv_heads: int, wanted: int, rule: str) -> None:
    """Raise ValueError, which states the `rule`, unless `n_kv_heads` has the required value."""
    if n_kv_heads != wanted:
        raise ValueError(f"n_kv_heads={n_kv_heads}: {rule}; leave n_kv_heads out, or choose attention=gqa")


def linear_flops(module: nn.Module) -> int:
    """FLOPs per token of all linear maps and convolutions of a module, each used once."""
    return sum(2 * part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear | nn.Conv1d))


def class_name(module: nn.Module) -> str:
    """The dotted name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def takes(factory: Callable[..., Any], name: str) -> bool:
    """Whether a factory accepts an argument. A class's `**kwargs` go to its base; a function's accept any."""
    if isinstance(factory, partial):
        return name not in factory.keywords and takes(factory.func, name)
    is_class = isinstance(factory, type)
    functions = [vars(kind).get("__init__") for kind in factory.mro()] if isinstance(factory, type) else [factory]
    for function in filter(None, functions):
        parameters = signature(function).parameters
        if name in parameters:
            return True
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return False
    return not is_class


def norm_with(norm: Norm, key: str, name: str, value: float | None) -> Norm:
    """The model's `norm` with its setting `name` as the mixer's `key` has it; None: as it is. Raises ValueError."""
    if value is None:
        return norm
    if name == "eps":
        check_positive(f"attention.{key}", value)
    function = norm
    while isinstance(function, partial):
        function = function.func
    if not takes(function, name):
        raise ValueError(f"attention.{key}={value}: the model's norm has no {name}; set it to null")
    return partial(norm, **{name: value})
