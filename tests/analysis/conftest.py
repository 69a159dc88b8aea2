"""Analyses of which a test reads the warnings."""

import pytest

from llama_lab.analysis import analyse


@pytest.fixture
def without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the curves of a report, which take half of its time."""
    monkeypatch.setattr(analyse, "difference_curves", lambda *_: ())
