"""Analyses of which few tests read the curves of differences."""

import pytest

from llama_lab.analysis import analyse


@pytest.fixture
def with_curves() -> None:
    """Keep the curves of differences."""


@pytest.fixture(autouse=True)
def without_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the curves of differences, which take half of an analysis, unless a test has `with_curves`."""
    if "with_curves" not in request.fixturenames:
        monkeypatch.setattr(analyse, "difference_curves", lambda *_: ())
