"""LLaMA Lab: architecture ablations of decoder-only language models."""

__version__ = "0.1.0"
