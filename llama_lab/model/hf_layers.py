"""Layers that differ, in flat settings: where they do, the value of a setting is a list, one for each layer.

A setting of a component that only some layers have is the value of those, or a list with None for the others.
"""

from collections.abc import Mapping
from typing import Any

from .hf_settings import ABSENT, MODEL, Settings, agreed, each, flatten, nest

NOPE = f"{MODEL}.position.Position"  # no position encoding, which has no settings


def with_layers(node: Mapping[str, Any]) -> Settings:
    """The flat settings of a model node."""
    usual = {key: value for key, value in node.items() if key != "layers"}
    different = node.get("layers") or ()
    layers = []
    for layer in range(node["n_layers"] if different else 1):
        own = dict(usual)
        for one in different:
            own |= {key: value for key, value in one.items() if key != "at"} if layer in one["at"] else {}
        layers.append(flatten(own))
    keys = dict.fromkeys(key for own in layers for key in own)
    return {key: agreed([own.get(key, ABSENT) for own in layers]) for key in keys}


def without_layers(settings: Settings) -> dict[str, Any]:
    """The model node of flat settings, which has `layers`; the inverse of `with_layers`."""
    nodes = [nest(at_layer(settings, layer)) for layer in range(settings["n_layers"])]
    groups: dict[str, list[int]] = {}  # of equal layers, by what they have
    for layer, node in enumerate(nodes):
        groups.setdefault(str(node), []).append(layer)
    most = max(groups.values(), key=len)
    usual = nodes[most[0]]
    layers = [
        {"at": group} | {part: own for part, own in nodes[group[0]].items() if own != usual[part]}
        for group in groups.values()
        if group is not most
    ]
    return usual | {"layers": layers}


def at_layer(settings: Settings, layer: int) -> Settings:
    """The flat settings of one layer."""
    own = {key: each(value, settings["n_layers"])[layer] for key, value in settings.items()}
    if own.get("position._target_") == NOPE:
        return {key: value for key, value in own.items() if key == "position._target_" or key[:9] != "position."}
    return own
