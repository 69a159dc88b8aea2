"""LLaMA Lab: architecture ablations of decoder-only language models."""

from .deferred import defer_torchmetrics

__version__ = "0.2.0"

defer_torchmetrics()  # before anything imports Lightning
