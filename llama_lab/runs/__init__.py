"""A run's folder: its record, checkpoints and metrics."""
