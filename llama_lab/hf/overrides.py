"""Find the overrides that compose a model: an option per group, plus keys."""

from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import register_resolvers
from llama_lab.config.composing import merged, with_extended
from llama_lab.config.grammar import to_override
from llama_lab.config.schema import COMPONENTS, options

from .by_layer import node_key, spelt_out, without_layers
from .family import as_factory, flat_settings
from .settings import Settings, equal, flatten, nest

SIZES = ("dim", "n_layers", "n_heads", "head_dim", "n_kv_heads", "hidden_dim", "max_seq_len", "vocab_size")


def overrides_of(settings: Settings) -> list[str]:
    """Overrides of `train.py` that compose a model with these `settings`: an option for each group, then keys.

    Each group's option is the one that leaves the fewest keys to set. Layers that differ get a pattern of their own,
    and experts that are of no option are written out.
    """
    register_resolvers()
    node = without_layers(settings)
    different = node.pop("layers")
    settings = spelt_out(flatten(node))
    has_experts = "expert" in (node["ffn"] or {})
    others = ("embedding", "init", "pattern", *["ffn"] * (node["ffn"] is None))
    groups = ["embedding", *(group for group in COMPONENTS if group not in others)]
    chosen: dict[str, str] = {"family": "encoder_decoder"} if "encoder_layers" in settings else {}
    sizes = nest({f"model.{key}": settings[key] for key in SIZES})
    cfg = OmegaConf.merge(sizes, *(option_node(*one) for one in chosen.items()))
    for group in (*groups, *["expert"] * has_experts):  # some read what the embedding sets, experts what ffn does
        found = choices(group)
        keys_to_set = {o: distance(group, settings, composed(cfg, option, sizes)) for o, option in found.items()}
        chosen[group] = min(found, key=lambda option: (keys_to_set[option], len(option)))
        cfg = OmegaConf.merge(cfg, found[chosen[group]])
    ours = composed(cfg, sizes)
    wanted = {key: settings[key] for key in SIZES}
    wanted |= {key: value for key, value in settings.items() if not equal(ours.get(key), value)}
    if has_experts and any(key.startswith("ffn.") for key in wanted):
        wanted = {key: value for key, value in wanted.items() if not key.startswith("ffn.")}
        wanted["ffn.expert"] = as_factory(node["ffn"]["expert"])
    keys = {node_key(key): to_override(value) for key, value in wanted.items()}
    return [
        *(f"{group}={option}" for group, option in chosen.items() if option != "null"),
        *(f"model.{key}={value}" for key, value in keys.items()),
        *(f"+pattern.other{n}={to_override(rule_of(one, node))}" for n, one in enumerate(different, 1)),
    ]


def rule_of(different: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The rule of `pattern` for layers that have these parts instead."""
    rule = dict(different)
    for slot, own in different.items():
        if isinstance(own, dict) and own["_target_"] == usual[slot]["_target_"]:
            rule[slot] = {key: value for key, value in own.items() if value != usual[slot].get(key)}
        elif isinstance(own, dict):
            rule[slot] = as_factory(own)
    return rule


def choices(group: str) -> dict[str, DictConfig]:
    """The options of a packaged group, or of the key `expert`, and what they set, unresolved."""
    if group != "expert":
        return {option: option_node(group, option) for option in options(group)}
    plain = (option for option, node in choices("ffn").items() if "expert" not in node.model.ffn)
    return {option: OmegaConf.create({"expert": None if option == "null" else option}) for option in ("null", *plain)}


@cache
def option_node(group: str, option: str) -> DictConfig:
    """The settings of a packaged option, with those of the options that it extends, unresolved."""
    return OmegaConf.create(merged(with_extended(f"{group}/{option}")))


def composed(*parts: Any) -> Settings:
    """The settings that parts of a config compose, the later before the earlier."""
    node: Any = OmegaConf.to_container(OmegaConf.merge(*parts).model, resolve=True)
    return flat_settings(node)


def distance(group: str, wanted: Settings, found: Settings) -> tuple[bool, int, int]:
    """Whether the component of a group is another, and how many classes below it and keys are to be set."""
    parts = {"ffn": ("experts.", "ffn."), "expert": ("ffn.",)}.get(group, (f"{group}.",))
    keys = [key for key in wanted | found if key.startswith(parts)]
    differing = [key for key in keys if not equal(found.get(key), wanted.get(key))]
    is_other = any(key == f"{parts[0]}_target_" or key not in wanted for key in differing)
    return is_other, sum(key.endswith("._target_") for key in differing), len(differing)
