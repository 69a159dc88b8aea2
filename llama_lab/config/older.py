"""Configs that earlier versions stored, in the terms of this one."""

from typing import Any

CHOICES = {"pattern": "none"}  # of groups that earlier versions did not have


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A stored config with what this version calls otherwise, and with what did not exist as it then was.

    Before 0.3: no patterns over layers but `attention.global_every`, whose layers ignored the window.
    """
    model = config.get("model")
    if not isinstance(model, dict) or not isinstance(attention := model.get("attention"), dict) or "layers" in model:
        return config
    attention = dict(attention)
    every = attention.pop("global_every", None)
    layers = []
    if every is not None:
        layers = [{"at": list(range(every - 1, model["n_layers"], every)), "attention": attention | {"window": None}}]
    return config | {"model": model | {"attention": attention, "layers": layers}}
