"""Composing further configs beside one that is being read, in a command or after it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra

from . import CONF_DIR

_loaders: list[ConfigLoader] = []


def last_loader() -> ConfigLoader | None:
    """Hydra's config loader; after it, when a config is still read, the last one; None before. It keys caches."""
    if GlobalHydra.instance().is_initialized():
        _loaders[:] = [GlobalHydra.instance().config_loader()]
    return _loaders[0] if _loaders else None


@contextmanager
def composing() -> Iterator[ConfigLoader]:
    """Inside, `hydra.compose` works; with the user's folders in a command."""
    is_ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_ready else hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
