"""Elementwise functions that PyTorch hands to Intel's oneMKL on CPUs, each called once before any of them is needed.

oneMKL chooses the kernel of each function and precision at its first call. If several threads make that call at once,
one of them may compute its share with the least accurate kernel, so that RoPE's first table differs from its second
(PyTorch issue 188792). A call on one element runs on one thread, and settles the choice for the process.
"""

import torch

# Those of aten/src/ATen/cpu/vml.h, as torch 2.13 compiles it.
FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


def choose_kernels() -> None:
    """Make the first call of every function, in both precisions that oneMKL has."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            function(x)
