"""The decoder: plain PyTorch, no Lightning, no Hydra, nothing of ours outside this folder."""

from .cost import Cost, measure_cost
from .decoder import Decoder
from .generate import Sampling, generate
from .vector_math import choose_kernels

__all__ = ["Cost", "Decoder", "Sampling", "generate", "measure_cost"]

choose_kernels()  # on import, so before anything trains or evaluates a model
