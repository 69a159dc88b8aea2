"""Analyses as fast as in their own tests."""

from tests.analysis.conftest import schedules_called_directly, without_curves

__all__ = ["schedules_called_directly", "without_curves"]
