"""A browser for the tests of pages."""

from tests.browser import browser

__all__ = ["browser"]
