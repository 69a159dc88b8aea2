"""Searches over settings with Optuna: what to train next, and what to stop early."""
