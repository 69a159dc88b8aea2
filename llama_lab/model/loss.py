"""Chunked cross-entropy without full logits.

Logits are the largest tensor of a training step: in float32, 128 kB per token at a vocabulary of 32,000, and as much
again for their gradient. Here the forward pass computes the logits of one chunk of tokens at a time, turns them in
place into their gradient, and accumulates the gradients of head and input: exact to rounding, with no extra products.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocked_attention import compute_type
from .embedding import Embedding, is_plain

IGNORE = -100
"""The target of a position that is not predicted; `torch.nn.functional.cross_entropy` ignores it."""

ELSEWHERE = IGNORE - 1
"""The same before `Decoder.cut`, of a position that belongs to another text, and so to no source of this one."""

CHUNK = {"cpu": 2**20, "cuda": 2**27}
"""Logits in a chunk. A CPU's stay in its cache; a GPU's are as large as its matrix products need."""


def head_loss(
    embedding: Embedding, x: Tensor, targets: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of `x (B, T, D)` through the head against `targets (B, T)`, the objective, and the loss of each token.

    The first two are sums over tokens, in float32 or better; negative targets add nothing. The loss is cross-entropy.
    The objective spreads `label_smoothing` of each target over the vocabulary (Szegedy et al. 2015, section 7), and
    adds `z_loss` times the squared log-partition. It alone has a gradient.
    """
    head = embedding.head
    if type(embedding).logits is not Embedding.logits or not is_plain(head):
        return plain_loss(embedding.logits(x), targets, z_loss, label_smoothing)
    inputs = [embedding.scaled(x).flatten(0, -2), head.weight, head.bias]
    if not torch.is_grad_enabled():  # which the function cannot see: it would compute gradients for nobody
        inputs = [p if p is None else p.detach() for p in inputs]
    nll, objective, of_tokens = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        *inputs, targets.flatten(), embedding.logit_softcap, z_loss, label_smoothing
    )
    return nll, objective, of_tokens.view_as(targets)


def plain_loss(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`head_loss` from full `logits (B, T, V)`: for custom heads, and the reference of the chunked one."""
    logits, flat = logits.to(wide_type(logits.dtype)).flatten(0, -2), targets.flatten().clamp(min=-1)
    logs = logits.log_softmax(-1)
    nll = objective = F.nll_loss(logs, flat, ignore_index=-1, reduction="sum")
    if label_smoothing:
        objective = F.cross_entropy(logits, flat, ignore_index=-1, reduction="sum", label_smoothing=label_smoothing)
    if z_loss:
        objective = objective + z_loss * logits[flat >= 0].logsumexp(-1).square().sum()
    of_tokens = F.nll_loss(logs.detach(), flat, ignore_index=-1, reduction="none")
    return nll.detach(), objective, of_tokens.view_as(targets)


class ChunkedLoss(torch.autograd.Function):
    """Autograd function of `head_loss`: the forward pass also computes the gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        z_loss: float,
        smoothing: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two sums, and the losses `(N,)`, for `x (N, D)`, `weight (V, D)`, `bias (V,)` and `targets (N,)`."""
        device = x.device.type
        kind = compute_type(x)
        inputs = (x, weight, bias)
        grads = [
            torch.zeros_like(p, dtype=wide_type(kind)) if p is not None and wanted else None
            for p, wanted in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        grad_x, grad_weight, grad_bias = grads
        sums, of_tokens = (torch.zeros(n, dtype=wide_type(kind), device=x.device) for n in (2, len(x)))
        size = max(1, CHUNK.get(device, CHUNK["cuda"]) // len(weight))
        with torch.autocast(device, enabled=False):
            w, b = weight.to(kind), None if bias is None else bias.to(kind)
            for part in chunks(len(x), size):
                rows, ignored = x[part].to(kind), targets[part, None] < 0
                logits = F.linear(rows, w, b).to(wide_type(kind))
                if softcap is not None:
                    logits = logits.div_(softcap).tanh_().mul_(softcap)
                logs = logits.log_softmax(-1)
                losses = chunk_losses(logits, logs, targets[part, None], z_loss, smoothing)
                sums += losses.sum(0)
                of_tokens[part] = losses[:, 0]
                if not any(ctx.needs_input_grad):
                    continue
                grad = chunk_gradient(logits, logs, targets[part, None], softcap, z_loss, smoothing).to(kind)
                del logits, logs  # before the products, which need memory of their own
                if grad_x is not None:
                    grad_x[part] = (grad @ w).masked_fill_(ignored, 0)
                if grad_weight is not None:
                    add_product(grad_weight, grad.T, rows.masked_fill(ignored, 0))
                if grad_bias is not None:
                    add_product(grad_bias[:, None], grad.T, (~ignored).type_as(grad))
        ctx.save_for_backward(*grads)
        nll, objective = (total.clone() for total in sums)  # FSDP warns of views
        ctx.mark_non_differentiable(nll, of_tokens)
        return nll, objective, of_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `x`, `weight` and `bias`."""
        return (*(g if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors), *4 * [None])


def chunks(n: int, size: int) -> Iterator[slice]:
    """The chunks of `n` tokens, of `size` each but for the last."""
    return (slice(start, start + size) for start in range(0, n, size))


def chunk_losses(logits: Tensor, logs: Tensor, targets: Tensor, z_loss: float, smoothing: float) -> Tensor:
    """Loss and objective `(N, 2)` of each token, of `logits (N, V)` and their log-softmax; `targets (N, 1)`."""
    index = targets.clamp(min=0)
    nll = -logs.gather(-1, index)
    objective = nll + z_loss * (logits.gather(-1, index) + nll).square()
    if smoothing:
        objective -= smoothing * (logs.mean(-1, keepdim=True) + nll)
    return torch.cat((nll, objective), -1).masked_fill(targets < 0, 0)


def chunk_gradient(
    logits: Tensor, logs: Tensor, targets: Tensor, softcap: float | None, z_loss: float, smoothing: float
) -> Tensor:
    """Gradient `(N, V)` of the objective by the logits before `softcap`; arbitrary for negative `targets (N, 1)`.

    Overwrites `logits` and their log-softmax.
    """
    index = targets.clamp(min=0)
    factor = 1 + 2 * z_loss * (logits.gather(-1, index) - logs.gather(-1, index)) if z_loss else None
    grad = logs.exp_()
    if factor is not None:
        grad *= factor
    if smoothing:
        grad -= smoothing / grad.shape[-1]
    grad.scatter_add_(-1, index, grad.new_full(index.shape, smoothing - 1))
    if softcap is not None:
        grad *= logits.square_().mul_(-(softcap**-2)).add_(1)  # 1 - tanh²
    return grad


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, whose dtype may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Float32, or `dtype` where that is better."""
    return torch.promote_types(dtype, torch.float32)
