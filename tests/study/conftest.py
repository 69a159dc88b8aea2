"""A browser for the test of TensorBoard."""

from tests.browser import browser

__all__ = ["browser"]
