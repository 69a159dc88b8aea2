"""Linear maps of one vector for the compiled decoding step, on a CPU at batch 1.

There, a matrix product is limited by reading the weights. The compiler leaves `F.linear` to the math library, whose
matrix-vector product uses one core and is not fused with anything. Of a sum of products it makes a loop of its own,
which uses all cores and is fused with what surrounds it. Without this file, a step of the model of
`python -m benchmarks decode` takes 1.3 times as long on two cores (3.44 against 2.60 ms), and 1.2 times on one (4.38
against 3.56 ms): the fastest of at least 360 calls of each, in turn, on a busy x86-64 machine (torch 2.13.0,
2026-11-22).
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class SummedProducts(TorchFunctionMode):
    """Within this context, `F.linear` of `x (..., 1, in)` is the sum of the products of `x` and each row of weights."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace `F.linear`; call any other function."""
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        x, weight, bias = args
        y = (x.unsqueeze(-2) * weight).sum(-1)
        return y if bias is None else y + bias
