"""Find the overrides that compose a model: an option per group, plus keys."""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import register_resolvers
from llama_lab.config.grammar import to_override
from llama_lab.config.schema import COMPONENTS, option_file, options

from .by_layer import without_layers
from .family import flat_settings
from .settings import Settings, equal, flatten, nest

SIZES = ("dim", "n_layers", "n_heads", "head_dim", "n_kv_heads", "hidden_dim", "max_seq_len", "vocab_size")


def overrides_of(settings: Settings) -> list[str]:
    """Overrides of `train.py` that compose a model with these `settings`: an option for each group, then keys.

    Each group's option is the one that leaves the fewest keys to set. Layers that differ get a pattern of their own.
    """
    register_resolvers()
    node = without_layers(settings)
    different = node.pop("layers")
    settings = flatten(node)
    chosen: dict[str, str] = {}
    nodes: list[DictConfig] = []
    for group in ("embedding", *(group for group in COMPONENTS if group not in ("embedding", "init", "pattern"))):
        found = {option: option_node(group, option) for option in options(group)}  # some read what the embedding sets
        keys_to_set = {
            o: distance(group, settings, composed([*nodes[:1], node], settings)) for o, node in found.items()
        }
        chosen[group] = min(found, key=lambda option: (keys_to_set[option], len(option)))
        nodes.append(found[chosen[group]])
    ours = composed(nodes, settings)
    keys = [*SIZES, *(key for key in settings if key not in SIZES and not equal(ours.get(key), settings[key]))]
    choices = [f"{group}={option}" for group, option in chosen.items()]
    rules = [f"+pattern.other{n}={to_override(rule_of(one, node))}" for n, one in enumerate(different, 1)]
    return choices + [f"model.{key}={to_override(settings[key])}" for key in keys] + rules


def rule_of(different: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The rule of `pattern` for layers that have these parts instead."""
    rule = dict(different)
    for slot, own in different.items():
        if isinstance(own, dict) and own["_target_"] == usual[slot]["_target_"]:
            rule[slot] = {key: value for key, value in own.items() if value != usual[slot].get(key)}
        elif isinstance(own, dict):
            rule[slot] = own | {"_partial_": True}
    return rule


def option_node(group: str, option: str) -> DictConfig:
    """What an option of a packaged group sets, with the options in its defaults list, unresolved."""
    text = option_file(group, option).read_text(encoding="utf-8")
    content = OmegaConf.create(text)
    header = re.match(r"# @package (\S+)", text)
    assert isinstance(content, DictConfig)
    assert header is not None
    parents = [option_node(group, parent) for parent in content.pop("defaults", []) if parent != "_self_"]
    merged = OmegaConf.merge(*parents, nest({header[1]: content}))
    assert isinstance(merged, DictConfig)
    return merged


def composed(nodes: list[DictConfig], settings: Settings) -> Settings:
    """The settings that options compose at the sizes of `settings`."""
    sizes = nest({f"model.{key}": settings[key] for key in SIZES})
    cfg = OmegaConf.merge(sizes, *nodes, sizes)
    node = OmegaConf.to_container(cfg.model, resolve=True)
    assert isinstance(node, dict)
    return flat_settings({str(key): value for key, value in node.items()})


def distance(group: str, wanted: Settings, found: Settings) -> tuple[bool, int, int]:
    """Whether the component of a group is another, and how many classes below it and keys are to be set."""
    keys = [key for key in wanted | found if key.startswith(f"{group}.")]
    differing = [key for key in keys if not equal(found.get(key), wanted.get(key))]
    is_other = any(key == f"{group}._target_" or key not in wanted for key in differing)
    return is_other, sum(key.endswith("._target_") for key in differing), len(differing)
