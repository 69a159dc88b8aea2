"""Hydra configs: composing, checking, and building objects from them."""
