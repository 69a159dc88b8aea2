"""The decoder: plain PyTorch, no Lightning, no Hydra, nothing of ours outside this folder."""

import torch

from .cost import Cost, measure_cost
from .decoder import Decoder
from .encoder import Bert, Encoder
from .encoder_decoder import EncoderDecoder
from .generate import Sampling, generate

__all__ = ["Bert", "Cost", "Decoder", "Encoder", "EncoderDecoder", "Sampling", "generate", "measure_cost"]

# The elementwise functions that PyTorch passes to Intel's oneMKL on CPUs: aten/src/ATen/cpu/vml.h of torch 2.13.
VECTOR_MATH = "acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc"


def choose_kernels() -> None:
    """Work around PyTorch issue 188792: call each of VECTOR_MATH once, in both precisions of oneMKL, on one thread.

    oneMKL selects a function's kernel at its first call; if several threads make that call at once, one may use a less
    accurate kernel. A call on a single element runs on one thread, and selects the kernel for the whole process.
    """
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in VECTOR_MATH.split():
            getattr(torch, name)(x)


choose_kernels()
