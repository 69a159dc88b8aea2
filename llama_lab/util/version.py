"""The version, alone, so that it is read without the rest."""

__version__ = "0.4.0"
