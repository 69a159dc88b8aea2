"""LLaMA Lab: architecture ablations of decoder-only language models.

The names below are the library; see docs/library.md. They import PyTorch on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .comparison import compare, read_runs
    from .errors import ConfigError
    from .hf.loading import load
    from .library import build_model, cost, generate, load_config

__all__ = ["ConfigError", "build_model", "compare", "cost", "generate", "load", "load_config", "read_runs"]

MODULES = {"ConfigError": "errors", "load": "hf.loading", "read_runs": "comparison", "compare": "comparison"}


def __getattr__(name: str) -> Any:
    """A name of the library, imported on first use: from `library.py`, unless MODULES says otherwise."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES.get(name, 'library')}"), name)


def __dir__() -> list[str]:
    """The names of the library with the module's own."""
    return [*globals(), *__all__]
