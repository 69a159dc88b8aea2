"""Tests that look at a page in the chromium that is installed."""

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """The chromium that is installed; one for the session, since Playwright starts once in a process."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
