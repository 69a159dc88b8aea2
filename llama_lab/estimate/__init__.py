"""Estimates of what a run would cost on some device."""
