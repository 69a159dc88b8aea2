"""LLaMA Lab: architecture ablations of decoder-only language models."""

from typing import Any

from .deferred import defer_torchmetrics

__version__ = "0.2.0"

defer_torchmetrics()  # before anything imports Lightning


def __getattr__(name: str) -> Any:
    """`llama_lab.load`, which imports PyTorch, on first use."""
    if name == "load":
        from .exchange import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
