"""LLaMA Lab: architecture ablations of decoder-only language models.

The names below are the library; see docs/library.md. They import PyTorch on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .util.version import __version__ as __version__

if TYPE_CHECKING:
    from .api import ConfigError, build_model, compare, cost, generate, load, load_config, read_runs

__all__ = ["ConfigError", "build_model", "compare", "cost", "generate", "load", "load_config", "read_runs"]


def __getattr__(name: str) -> Any:
    """A name of the library, imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.api"), name)


def __dir__() -> list[str]:
    """The names of the library with the module's own."""
    return [*globals(), *__all__]
