"""A component of a user's own."""

from llama_lab.model.norm import RMSNorm


class OwnNorm(RMSNorm):
    """As ours, under another name."""
