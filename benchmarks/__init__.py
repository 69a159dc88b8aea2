"""Benchmarks of parts and whole decoders on this machine: `python -m benchmarks`."""
