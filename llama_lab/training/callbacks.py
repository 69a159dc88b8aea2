"""The callbacks of a run: those that settings enable, and the user's own."""

import lightning as L
from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.devices.hardware import current_rank
from llama_lab.util.errors import ConfigError

from .profile import Profile
from .telemetry import Telemetry


def build_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """The callbacks that a config asks for. Raises ConfigError for a node that is no callback."""
    callbacks: list[L.Callback] = [Profile()] if cfg.trainer.profile and current_rank() == 0 else []
    if cfg.train.telemetry:
        callbacks.append(Telemetry())
    nodes = cfg.get("callbacks") or {}  # configs that were stored by earlier versions have none
    for name, node in nodes.items() if isinstance(nodes, DictConfig) else enumerate(nodes):
        key = f"callbacks.{name!s}"
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ConfigError(f"{key}={node}: must name its class, such as {{_target_: mylab.callbacks.Mine}}")
        callback = build(node, key)
        if not isinstance(callback, L.Callback):
            raise ConfigError(f"{key}={node._target_}: builds a {type(callback).__name__}; name a Lightning callback")
        callbacks.append(callback)
    return callbacks
