"""What all tests of studies share."""

import pytest


@pytest.fixture(autouse=True)
def _no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """statsmodels collects garbage after each correction, which takes up to half a second in a process of tests."""
    monkeypatch.setattr("gc.collect", lambda: 0)
