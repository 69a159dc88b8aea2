"""Tests that look at a page in the chromium that is installed."""

import shutil
from collections.abc import Callable

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run", "--disable-quic"]

browsing = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH; no browser is downloaded"),
]


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a browser."""
    for mark in browsing:
        test = mark(test)
    return test
