"""Hydra configs: composing, checking, and building objects from them."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CONF_DIR = next(d for d in (PACKAGE / "conf", PACKAGE.parent / "conf") if d.is_dir())  # a wheel's, or a checkout's
