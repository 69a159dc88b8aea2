"""Evaluation of trained runs: losses, memory and speed of generation, and text."""
