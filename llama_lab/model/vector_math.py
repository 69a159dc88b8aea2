"""Call each elementwise function that PyTorch passes to Intel's oneMKL on CPUs once, before any is needed.

oneMKL chooses the kernel of each function and precision at its first call. If several threads make that call at once,
one of them may compute its share with the least accurate kernel, so that RoPE's first table differs from its second
(PyTorch issue 188792). A call on one element runs on one thread, and makes the choice for the whole process.
"""

import torch

# Those of aten/src/ATen/cpu/vml.h, as torch 2.13 compiles it.
NAMES = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"
FUNCTIONS = [getattr(torch, name) for name in NAMES.split()]


def choose_kernels() -> None:
    """Make the first call of every function, in both precisions that oneMKL has."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            function(x)
