"""What a layer costs in calls of PyTorch and in new tensors: seconds depend on the machine, and these do not.

The limits are what was counted. If a change lowers a count, lower its limit; if one raises it, say why there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_lab.model import Decoder
from llama_lab.model.fusion import fused
from llama_lab.model.generate import eager_step
from tests.composing import decoder

LLAMA = ("arch=llama2", "attention=gqa", "model.n_kv_heads=2")


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of kernels, and those of them that return new memory; views are neither."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.kernels += 1
            results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.allocations += sum(x.untyped_storage().data_ptr() not in before for x in results)
        return out


def per_layer(
    work: Callable[[Decoder], Callable[[], object]], around: Callable[[Decoder], AbstractContextManager[None]]
) -> tuple[int, int]:
    """Kernels and allocations that one more layer adds to what `work` makes of a model."""
    counts = []
    for layers in (2, 3):
        model = decoder(*LLAMA, f"model.n_layers={layers}")
        run = work(model)
        with around(model):
            run()
            with Calls() as calls:
                run()
        counts.append((calls.kernels, calls.allocations))
    (kernels, allocations), (more, larger) = counts
    return more - kernels, larger - allocations


def training(model: Decoder) -> Callable[[], object]:
    """Forward and backward pass."""
    tokens = torch.randint(97, (2, 17))

    def step() -> None:
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:])[1].backward()

    return step


def decoding(model: Decoder) -> Callable[[], object]:
    """One token."""
    step = eager_step(model, model.new_state(1))
    return torch.no_grad()(partial(step, torch.zeros(1, 1, dtype=torch.long)))


def test_a_layer_s_training_step_takes_no_more_calls_than_it_did() -> None:
    kernels, allocations = per_layer(training, nullcontext)
    assert kernels <= 80
    assert allocations <= 56


def test_a_layer_s_token_takes_no_more_calls_than_it_did() -> None:
    kernels, allocations = per_layer(decoding, fused)
    assert kernels <= 31
    assert allocations <= 22
