"""The command that exports."""

from tests.exchange.conftest import converting

__all__ = ["converting"]
