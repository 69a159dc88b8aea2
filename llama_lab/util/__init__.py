"""Helpers for all packages; imports none of them."""
