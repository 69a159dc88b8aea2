"""Configs that earlier versions stored, in the terms of this one."""

from collections.abc import Mapping
from typing import Any

# Settings of components that they did not have, with the values that do what those versions did.
MODEL = "llama_lab.model"
ATTENTION = {
    **dict.fromkeys(("chunk", "prefix", "scale", "temperature", "clip_qkv", "qk_bias", "gate", "value_residual")),
    "qk_gain": "shared",
    "qk_norm_rotated": False,
    "sinks": False,
}
BLOCKS = ("PostNorm", "PreNorm", "Reordered", "Sandwich", "Parallel", "ParallelSharedNorm")
ADDED: dict[str, dict[str, Any]] = {
    **{f"{MODEL}.attention.{kind}Attention": ATTENTION for kind in ("MultiHead", "GroupedQuery", "MultiQuery")},
    **{f"{MODEL}.block.{kind}": {"residual_scale": 1.0, "learned_scale": False} for kind in BLOCKS},
    f"{MODEL}.embedding.Embedding": {"logit_scale": 1.0},
    f"{MODEL}.latent_attention.LatentAttention": {"scale": None, "latent_eps": None, "temperature": None},
    f"{MODEL}.norm.LayerNorm": {"gain": True, "unit_offset": False},
    f"{MODEL}.norm.RMSNorm": {"gain": True},
    f"{MODEL}.position.Alibi": {"max_exponent": 8.0, "slope_scale": 1.0},
    f"{MODEL}.position.Sinusoidal": {"offset": 0},
    f"{MODEL}.temperature.StepTemperature": {"offset": 1},
    f"{MODEL}.position.YarnScaling": {"mscale": 1.0, "mscale_all_dim": 0.0},
}


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A stored config with what this version calls otherwise, and with what did not exist as it then was.

    Before 0.3: no patterns over layers but `attention.global_every`, whose layers ignored the window.
    """
    config = with_added(config)
    model = config.get("model")
    if not isinstance(model, dict) or not isinstance(attention := model.get("attention"), dict) or "layers" in model:
        return config
    attention = dict(attention)
    every = attention.pop("global_every", None)
    layers = []
    if every is not None:
        layers = [{"at": list(range(every - 1, model["n_layers"], every)), "attention": attention | {"window": None}}]
    return config | {"model": model | {"attention": attention, "layers": layers}}


def choices_before(config: Mapping[str, Any]) -> dict[str, str]:
    """The options of groups that earlier versions did not have, for a flat config that was `upgraded`."""
    layers, n_layers = config.get("model.layers") or [], config.get("model.n_layers", 0)
    is_gemma2 = [one["at"] for one in layers] == [list(range(1, n_layers, 2))]
    return {"pattern": "global_every_2nd" if is_gemma2 else "none"}


def with_added(node: Any) -> Any:
    """A plain container in which every component has these settings, if it has no others in their place."""
    if isinstance(node, list):
        return [with_added(value) for value in node]
    if not isinstance(node, dict):
        return node
    found = {key: with_added(value) for key, value in node.items()}
    return found | {key: value for key, value in ADDED.get(str(node.get("_target_")), {}).items() if key not in found}
