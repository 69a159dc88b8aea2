"""Models in and out: runs, folders of Hugging Face's transformers, and folders of our own."""

from .loading import Loaded, load

__all__ = ["Loaded", "load"]
