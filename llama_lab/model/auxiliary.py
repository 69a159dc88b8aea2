"""Terms of the objective, and metrics, that any module adds in its forward pass, whatever calls it.

    x = add_term(x, "balance", value, weight=0.01)   the objective gains 0.01 times value, logged as train/balance
    add_metric("gate", gate.mean())                  logged as train/gate

A term enters as an identity on an activation: the backward pass that reaches `x` adds the term's gradient, scaled as
that of the mean loss of the micro-batch, under accumulation and on several ranks alike. Outside of training, as in
validation and where activations are computed again, both do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Auxiliary:
    """What modules add to the forward passes of training. values: of each metric, since they were taken."""

    active: ClassVar["Auxiliary | None"] = None

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}
        self._scale: Tensor | None = None  # the gradient of the objective
        self._unused: list[str] = []  # terms that no backward pass has reached

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context manager: what modules add is added here."""
        Auxiliary.active = self
        try:
            yield
        finally:
            Auxiliary.active = None

    def join(self, objective: Tensor) -> Tensor:
        """The mean objective of a micro-batch, with the gradients of the terms that were added in its forward pass."""
        return Anchor.apply(objective, self)  # type: ignore[no-any-return, no-untyped-call]

    def check(self) -> None:
        """Raise RuntimeError after a backward pass that has not reached all terms."""
        if self._unused:
            name = self._unused[0]
            raise RuntimeError(f"train/{name}: the term reaches no objective; use what add_term returns")

    def add(self, name: str, value: Tensor) -> None:
        """Add a value of a metric."""
        self.values.setdefault(name, []).append(value.detach())

    def take(self) -> dict[str, Tensor]:
        """The mean of each metric since the last call, over modules and micro-batches."""
        means = {name: torch.stack(values).mean() for name, values in sorted(self.values.items())}
        self.values.clear()
        return means


class Anchor(torch.autograd.Function):
    """The identity on an objective; its backward pass, the first of all, keeps the gradient that scales the terms."""

    @staticmethod
    def forward(ctx: Any, objective: Tensor, auxiliary: Auxiliary) -> Tensor:
        """The objective."""
        ctx.auxiliary = auxiliary
        return objective.view_as(objective)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, unchanged."""
        ctx.auxiliary._scale = grad
        return grad, None


class Term(torch.autograd.Function):
    """The identity on an activation `x`; its backward pass gives a term its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, name: str, weight: float, auxiliary: Auxiliary) -> Tensor:
        """The activation."""
        ctx.name, ctx.weight, ctx.auxiliary = name, weight, auxiliary
        auxiliary._unused.append(name)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """The activation's gradient, unchanged, and the term's."""
        ctx.auxiliary._unused.remove(ctx.name)
        return grad, ctx.weight * ctx.auxiliary._scale, None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_term(x: Tensor, name: str, value: Tensor, weight: float) -> Tensor:
    """Return `x`; in training, add `weight` times the scalar `value` to the objective, and log it as train/<name>."""
    auxiliary = Auxiliary.active
    if auxiliary is None or not torch.is_grad_enabled():
        return x
    auxiliary.add(not_loss(name), value)
    return Term.apply(x, value, name, weight, auxiliary)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_metric(name: str, value: Tensor) -> None:
    """In training, log the scalar `value` as train/<name>: the mean over modules, micro-batches and ranks."""
    if Auxiliary.active is not None:
        Auxiliary.active.add(not_loss(name), value)


def not_loss(name: str) -> str:
    """The name. Raises ValueError for that of the loss itself."""
    if name == "loss":
        raise ValueError("train/loss: is the loss of the model; give the term or metric another name")
    return name


def is_collecting() -> bool:
    """Whether this is a forward pass of training, for the first time."""
    return Auxiliary.active is not None


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, all of which must call this."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(x)
    return x
