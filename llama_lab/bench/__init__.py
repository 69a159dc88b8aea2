"""Benchmarks of parts and whole decoders on this machine: `python -m llama_lab.bench`."""
