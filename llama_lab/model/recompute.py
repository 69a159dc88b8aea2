"""Activation checkpointing: parts of a model recompute their activations in the backward pass, to save memory.

Chen et al. 2016, section 3; of attention alone, Korthikanti et al. 2022, section 5. Losses and gradients are the same
to the last bit, dropout included; only the gradient of a trained bias of the scores is summed in another order.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention_context import AttentionContext
from .cost import cost_units, flops_per_token
from .decoder import Decoder
from .state import State

Forward = Callable[[Tensor, AttentionContext, State | None], Tensor]

PARTS: dict[str, Callable[[Decoder], list[nn.Module]]] = {
    "none": lambda model: [],
    "attention": lambda model: [block.attention for block in model.all_blocks],
    "block": lambda model: list(model.all_blocks),
}
"""What may be recomputed: the mixer of every block, or whole blocks, of which only the inputs are kept."""


def recompute(model: Decoder, parts: str) -> None:
    """Make `model` recompute the parts of this name in the backward pass; inference is unchanged.

    In place: modules and names of parameters are the same. Call it once, before the model is compiled or sharded.
    """
    for part in PARTS[parts](model):
        part.forward = partial(recomputed, part.forward)


def recomputed(forward: Forward, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
    """Call `forward` with checkpointing; without, if gradients are disabled or there is a state.

    Only `x (B, T, D)` is saved, and what `context` already holds.
    """
    if state is not None or not torch.is_grad_enabled():
        return forward(x, context, state)
    # Each time with masks of its own: one that is kept from the first time would not be made again the second time.
    return checkpoint(lambda x: forward(x, context.unshared(), None), x, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed_flops(model: Decoder, parts: str) -> float:
    """Upper bound of the recomputed FLOPs per token: a forward pass of the parts of this name.

    PyTorch stops after the last tensor that the backward pass needs, so it leaves out the last product of a part.
    """
    units = [unit for part in PARTS[parts](model) for unit in cost_units(part)]
    return flops_per_token(model, units, model.max_seq_len)
