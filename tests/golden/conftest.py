"""The command that exports."""

from tests.hf.conftest import converting

__all__ = ["converting"]
