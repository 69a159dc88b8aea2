"""Optimizers, built from a model so that they can tell matrices from the rest.

All decay matrices, stacks of them and tables, but no vectors: neither biases, norms nor depthwise convolutions. Each
raises ConfigError for a setting outside its range.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from llama_lab.model import Decoder
from llama_lab.model.init import StackedLinear
from llama_lab.util.errors import ConfigError

Closure = Callable[[], float]
LIKE_ADAMW = "match_rms_adamw"  # PyTorch's name of Muon's updates with the size of AdamW's
BELOW_ONE = ("beta1", "beta2", "momentum")  # at 1, an average would never forget


def adamw(model: nn.Module, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Optimizer:
    """AdamW: Adam whose decay is no part of the gradient (Loshchilov & Hutter 2017, algorithm 2)."""
    check(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return AdamW(groups(model, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps, fused=True)


def adam(model: nn.Module, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Optimizer:
    """Adam (Kingma & Ba 2014, algorithm 1); `weight_decay` times the weight is added to the gradient."""
    check(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    return Adam(groups(model, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps, fused=True)


def sgd(model: nn.Module, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> Optimizer:
    """Stochastic gradient descent with momentum (Sutskever et al. 2013, section 2); decay as in `adam`."""
    check(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ConfigError(f"optim.nesterov={nesterov}: there is no momentum to look ahead with; set optim.momentum")
    return SGD(groups(model, weight_decay), lr=lr, momentum=momentum, nesterov=nesterov, foreach=True)


def adafactor(model: nn.Module, lr: float, beta2_decay: float, clip: float, weight_decay: float) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018, algorithm 4): Adam's second moment by rows and columns, without the first.

    `lr` multiplies the root mean square of a parameter, and is at most 1 / sqrt(step). beta2 is 1 - step^beta2_decay;
    updates larger than `clip`, by their root mean square, are scaled down to it.
    """
    check(lr=lr, clip=clip, weight_decay=weight_decay)
    if not isinstance(beta2_decay, int | float) or not beta2_decay < 0:
        raise ConfigError(f"optim.beta2_decay={beta2_decay}: must be a negative number; the paper's is -0.8")
    if not clip:
        raise ConfigError("optim.clip=0: nothing would be learned; the paper's is 1")
    eps = (1e-15, 1e-3)  # the paper's: PyTorch squares the first one, whose default makes steps depend on the scale
    return Adafactor(groups(model, weight_decay), lr=lr, beta2_decay=beta2_decay, eps=eps, d=clip)


def lion(model: nn.Module, lr: float, beta1: float, beta2: float, weight_decay: float) -> Optimizer:
    """Lion (Chen et al. 2023, algorithm 2)."""
    check(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    return Lion(groups(model, weight_decay), {"lr": lr, "beta1": beta1, "beta2": beta2})


def muon(
    model: nn.Module,
    lr: float,
    momentum: float,
    nesterov: bool,
    newton_schulz_steps: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Optimizer:
    """Muon (Jordan et al. 2024) for the matrices of the blocks and stacks of them, AdamW for all else.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, section 2.2), so that both share `lr` and
    `weight_decay`.
    """
    check(lr=lr, momentum=momentum, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    if not isinstance(newton_schulz_steps, int) or not 1 <= newton_schulz_steps < 100:
        raise ConfigError(f"optim.newton_schulz_steps={newton_schulz_steps}: must be a whole number from 1 to 99")
    head = cast(Decoder, model).embedding.head
    excluded = vectors(model) | {m.weight for m in model.modules() if isinstance(m, nn.Embedding) or m is head}
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim in (2, 3) and p not in excluded]
    chosen = {id(p) for p in matrices}
    rest = [
        group | {"params": [p for p in group["params"] if id(p) not in chosen]} for group in groups(model, weight_decay)
    ]
    parts: list[Optimizer] = []
    if matrices:
        orthogonal = StackedMuon(
            matrices, lr, weight_decay, momentum, nesterov, ns_steps=newton_schulz_steps, adjust_lr_fn=LIKE_ADAMW
        )
        parts.append(orthogonal)
    parts.append(AdamW([g for g in rest if g["params"]], lr=lr, betas=(beta1, beta2), eps=eps, fused=True))
    return CombinedOptimizer(parts)


def check(**settings: Any) -> None:
    """Raise ConfigError unless each setting is a number in its range."""
    for name, value in settings.items():
        limit = 1 if name in BELOW_ONE else math.inf
        if not isinstance(value, int | float) or not 0 <= value < limit:
            raise ConfigError(f"optim.{name}={value}: must be a number from 0 up to, but not including, {limit}")


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: those that decay, and those that do not."""
    parameters, small = [p for p in model.parameters() if p.requires_grad], vectors(model)
    found = [
        {"params": [p for p in parameters if p not in small], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p in small], "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


def vectors(model: nn.Module) -> set[Tensor]:
    """The parameters that act as vectors: those of one dimension, stacked biases, and depthwise convolutions."""
    found: set[Tensor] = {p for p in model.parameters() if p.ndim < 2}
    for module in model.modules():
        if isinstance(module, StackedLinear) and module.bias is not None:
            found.add(module.bias)
        elif isinstance(module, nn.Conv1d) and module.groups == module.in_channels:
            found.add(module.weight)
    return found


class StackedMuon(Muon):
    """Muon that takes a parameter `(n, out, in)` as `n` matrices; a shard of one holds whole matrices."""

    def __init__(self, matrices: list[nn.Parameter], *settings: Any, **named: Any) -> None:
        super().__init__([p for p in matrices if p.ndim == 2], *settings, **named)
        self.param_groups[0]["params"][:] = matrices  # PyTorch's own refuses stacks

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        """Fill the lists of parameters, gradients and averages with those of each matrix."""
        has_complex: bool = super()._init_group(group, *lists)
        for entries in lists:
            entries[:] = [matrix for entry in entries for matrix in as_matrices(entry)]
        return has_complex


def as_matrices(tensor: Tensor) -> list[Tensor]:
    """Views of the matrices in a stack, of this process's shard; of a matrix, itself."""
    if tensor.ndim == 2:
        return [tensor]
    from torch.distributed.tensor import DTensor  # takes half a second to import, and every plan makes an optimizer

    return list((tensor.to_local() if isinstance(tensor, DTensor) else tensor).unbind())


class Lion(Optimizer):
    """See `lion`."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Decay, add the sign of one average of gradients, and update another."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:  # one by one: all signs at once would take the memory of all weights
                if p.grad is not None:
                    if "mean" not in self.state[p]:
                        self.state[p]["mean"] = torch.zeros_like(p)
                    mean = self.state[p]["mean"]
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(p.grad.lerp(mean, group["beta1"]).sign_(), alpha=-group["lr"])
                    mean.lerp_(p.grad, 1 - group["beta2"])
        return loss


class CombinedOptimizer(Optimizer):
    """Several optimizers, of different parameters, as one."""

    def __init__(self, parts: list[Optimizer]) -> None:
        super().__init__([group | {"part": i} for i, part in enumerate(parts) for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """A step of each, on the groups and states that this one has now, which a checkpoint may have replaced."""
        loss = None if closure is None else closure()
        for i, part in enumerate(self.parts):
            part.param_groups = [group for group in self.param_groups if group["part"] == i]
            part.state = self.state
            part.step()
        return loss
