"""Optimizers, built from a model so that they can tell matrices from the rest."""

import math

from torch import nn
from torch.optim import AdamW, Optimizer

from llama_lab.errors import ConfigError


def adamw(model: nn.Module, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2017) that decays matrices and tables, but no vectors: neither biases nor norms.

    Raises ConfigError for a setting outside its range.
    """
    for name, value, lowest, limit in (
        ("lr", lr, 0, math.inf),
        ("beta1", beta1, 0, 1),
        ("beta2", beta2, 0, 1),
        ("eps", eps, 0, math.inf),
        ("weight_decay", weight_decay, 0, math.inf),
    ):
        if not isinstance(value, int | float) or not lowest <= value < limit:
            raise ConfigError(f"optim.{name}={value}: must be a number from {lowest} up to, but not including, {limit}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr, betas=(beta1, beta2), eps=eps, fused=True)
