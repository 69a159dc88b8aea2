"""Normalisation layers over the last dimension. All take and return `(..., dim)` and compute in float32."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Norm = Callable[..., nn.Module]  # a factory, of the width


class LayerNorm(nn.LayerNorm):
    """Layer normalisation (Ba et al. 2016, eq. 4): subtract the mean, divide by the standard deviation.

    gain, bias: whether it learns them; OLMo does neither (Groeneveld et al. 2024, section 2.1).
    unit_offset, heads: see `RMSNorm`; the offset is NeMo's `layernorm1p` (Nemotron).
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        bias: bool = True,
        gain: bool = True,
        unit_offset: bool = False,
        heads: int = 1,
    ) -> None:
        check_norm(eps, gain, bias=bias, unit_offset=unit_offset)
        self.unit_offset, self.heads = unit_offset, heads  # first, since `reset_parameters` reads it
        super().__init__(heads * dim, eps, elementwise_affine=gain, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise as plain normalisation, with a gain of one and a bias of zero."""
        reset_gain(self)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x (..., dim)`, or `(..., heads, T, dim)`."""
        gain, bias = gain_of(self), None if self.bias is None else self.bias.float()
        if self.heads == 1:
            return F.layer_norm(x.float(), self.normalized_shape, gain, bias, self.eps).type_as(x)
        normed = F.layer_norm(x.float(), x.shape[-1:], None, None, self.eps)
        return per_head(normed, self.heads, gain, bias).type_as(x)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation (Zhang & Sennrich 2019, eq. 4).

    gain: whether it learns one; Llama 4's queries and keys have none.
    unit_offset: store the gain as its distance from one (Gemma), so that weight decay pulls towards the identity.
    heads: how many heads have a gain (and a bias) of their own.
    """

    eps: float

    def __init__(
        self, dim: int, eps: float = 1e-5, unit_offset: bool = False, gain: bool = True, heads: int = 1
    ) -> None:
        check_norm(eps, gain, unit_offset=unit_offset)
        self.unit_offset, self.heads = unit_offset, heads  # first, since `reset_parameters` reads it
        super().__init__(heads * dim, eps, elementwise_affine=gain)

    def reset_parameters(self) -> None:
        """Initialise as plain normalisation, with a gain of one."""
        reset_gain(self)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x (..., dim)`, or `(..., heads, T, dim)`."""
        gain, width = gain_of(self), x.shape[-1:]
        shared = gain if self.heads == 1 else None
        # GPUs and compilers have kernels of their own, and for a single token one call is faster than parts.
        if x.is_cuda or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            normed = F.rms_norm(x.float(), width, shared, self.eps)
        else:
            ones = x.new_ones(width, dtype=torch.float32) if shared is None else shared
            normed = RootMeanSquare.apply(x.float(), ones, self.eps)  # type: ignore[no-untyped-call]
        return (normed if self.heads == 1 else per_head(normed, self.heads, gain)).type_as(x)


def reset_gain(norm: LayerNorm | RMSNorm) -> None:
    """Set the gain, if there is one, to one."""
    if norm.weight is not None:
        nn.init.constant_(norm.weight, 0.0 if norm.unit_offset else 1.0)


def gain_of(norm: LayerNorm | RMSNorm) -> Tensor | None:
    """The gain that a norm multiplies by, float32."""
    if norm.weight is None:
        return None
    return norm.weight.float() + 1.0 if norm.unit_offset else norm.weight.float()


def per_head(x: Tensor, heads: int, gain: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Multiply `x (..., heads, T, dim)` by the gain, and add the bias, of its head; both `(heads * dim,)`."""
    x = x if gain is None else x * gain.view(heads, 1, -1)
    return x if bias is None else x + bias.view(heads, 1, -1)


class RootMeanSquare(torch.autograd.Function):
    """RMSNorm for a CPU, where PyTorch's takes 3.5 times as long forward and back, and saves four tensors for one.

    Its backward pass is PyTorch's kernel for layer normalisation, with a mean of zero. That kernel also takes away
    the mean of the gradient, which went through the mean of x there; it is added again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Normalise `x (..., dim)`, float32, and multiply by `gain (dim,)`."""
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, scale)
        normed: Tensor = (x * scale).mul_(gain)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of `x` and `gain`."""
        x, gain, scale = ctx.saved_tensors
        by_x, by_gain, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, gain.shape, torch.zeros_like(scale), scale, gain, None, [True, True, False]
        )
        by_x.addcmul_((grad @ gain)[..., None], scale, value=1 / len(gain))
        return by_x, by_gain, None


class Centring(nn.Identity):
    """Subtract the mean: of LayerNorm, what RMSNorm leaves out (Zhang & Sennrich 2019, section 3)."""

    def forward(self, x: Tensor) -> Tensor:
        """Centre `x (..., dim)`."""
        return (x.float() - x.float().mean(-1, keepdim=True)).type_as(x)


class NoNorm(nn.Identity):
    """No normalisation: the identity, for any width."""


def check_norm(eps: float, gain: bool, **others: bool) -> None:
    """Raise ValueError for a negative epsilon, with which the root could be of a negative number, and idle settings."""
    if eps < 0:
        raise ValueError(f"norm.eps={eps}: must not be negative")
    for name, is_set in others.items():
        if is_set and not gain:
            raise ValueError(f"norm.{name}=true: a norm without a gain has none; set norm.gain=true, or this to false")
