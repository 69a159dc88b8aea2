"""Layers that differ: from the rules of the config group `pattern` to `Decoder`'s argument `layers`.

A rule selects layers and overrides keys of `model`, or options of a group, in them:

    pattern:
      global: {at: "5::6", attention: {window: null}, position: {theta: 1e6}}
      nope: {at: [0, -1], position: none}
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from llama_lab.util.errors import ConfigError, require_positive, suggestion

from .composing import options_of, with_options
from .schema import flatten

# What a layer may have of its own: components, each with the sizes that its options set, and sizes.
SLOTS: dict[str, tuple[str, ...]] = {
    "attention": ("n_kv_heads",),
    "ffn": ("hidden_dim",),
    "position": (),
    "norm": (),
    "block": (),
}
SIZES = ("n_kv_heads", "hidden_dim")
MOST_LAYERS = 2048  # of a model that is built, twice the deepest published


@dataclass(frozen=True)
class Rule:
    """layers: in ascending order. parts: what they have instead, by key of `Decoder`. keys: below `model`, changed.

    idle: keys of the rule, below its name, that are what the other layers have.
    """

    name: str
    layers: list[int]
    parts: dict[str, Any]
    keys: set[str]
    idle: list[str]


def different_layers(pattern: Any, *, _root_: DictConfig) -> ListConfig:
    """The argument `layers` of `Decoder`: for each rule, the layers `at`, and their components and sizes.

    Raises ConfigError for a rule that names no layer, leaves a setting of the others idle, or changes what another rule
    changes in the same layer.
    """
    rules = read_rules(pattern, _root_.model)
    for one, other in combinations(rules, 2):
        parts, layers = one.parts.keys() & other.parts.keys(), sorted({*one.layers} & {*other.layers})
        if parts and layers:
            taken = f"layer {layers[0]} has its {min(parts)} from pattern.{one.name} already"
            raise ConfigError(f"pattern.{other.name}: {taken}; give them other layers, or make one rule of them")
    for key in sorted({key for rule in rules for key in rule.keys}, key=len):
        if len({layer for rule in rules if key in rule.keys for layer in rule.layers}) == _root_.model.n_layers:
            problem = f"changes {key} in every layer, and leaves model.{key} idle"
            raise ConfigError(f"pattern: {problem}; set that instead, or leave a layer out")
    return OmegaConf.create([{"at": rule.layers} | rule.parts for rule in rules if rule.parts], parent=_root_.model)


def read_rules(pattern: Any, model: DictConfig) -> list[Rule]:
    """All rules of a pattern."""
    asked: Any = OmegaConf.to_container(pattern, resolve=True) if pattern else {}
    return [read_rule(str(name), rule, model) for name, rule in asked.items()]


def read_rule(name: str, rule: Any, model: DictConfig) -> Rule:
    """A rule as it is written, checked by itself."""
    if not isinstance(rule, dict) or "at" not in rule or len(rule) < 2:
        example = '{at: "3::4", position: none}'
        raise ConfigError(f"pattern.{name}={rule}: must say which layers have what, such as {example}")
    layers = layers_at(f"pattern.{name}.at", rule.pop("at"), model.n_layers)
    parts: dict[str, Any] = {}
    keys: set[str] = set()
    idle: list[str] = []
    # A size wins over that of an option, and a feed-forward of its own over a block that leaves it out.
    for slot in sorted(rule, key=lambda slot: (slot in SIZES) - (slot == "block")):
        own = rule[slot]
        new = of_slot(f"pattern.{name}.{slot}", str(slot), own, model)
        parts |= new
        if not isinstance(own, dict) or "_target_" in own:
            idle += [] if new else [slot]
            changed = [part for part in new if part == slot or part not in SIZES]
            keys |= {key for part in changed for key in (part, *flatten(written(model)[part], part))}
        else:
            idle += [key for key, value in flatten(own, slot).items() if value == OmegaConf.select(model, key)]
            keys |= flatten(own, slot).keys() if new else set()
    return Rule(name, layers, parts, keys, idle)


def layers_at(key: str, at: Any, n_layers: int) -> list[int]:
    """The layers that `at` names: Python's slice, such as "3::4", or numbers from 0, negative ones from the end."""
    check_depth(n_layers)
    of = f"the layers are 0 to {n_layers - 1}"
    if isinstance(at, str) and at.count(":") in (1, 2):
        try:
            layers = sorted(range(n_layers)[slice(*(int(part) if part.strip() else None for part in at.split(":")))])
        except ValueError:
            raise ConfigError(f"{key}={at}: is no slice; write begin:end:step, such as 3::4") from None
    else:
        numbers = at if isinstance(at, list) else [at]
        if not all(type(n) is int for n in numbers):
            raise ConfigError(f'{key}={at}: must be a slice such as "3::4", or numbers of layers such as [0, 5, -1]')
        if beyond := [n for n in numbers if not -n_layers <= n < n_layers]:
            raise ConfigError(f"{key}={at}: there is no layer {beyond[0]}; {of}")
        layers = sorted({n % n_layers for n in numbers})
        if len(layers) < len(numbers):
            raise ConfigError(f"{key}={at}: names a layer twice; {of}")
    if not layers:
        raise ConfigError(f"{key}={at}: names no layer; {of}")
    return layers


def of_slot(key: str, slot: str, own: Any, model: DictConfig) -> dict[str, Any]:
    """What a layer has instead in one slot: a size, an option's component and its sizes, or other settings of its own.

    Nothing if that is what the others have, as where a recipe's pattern stands beside another choice. Interpolations
    are kept, and follow the run's config.
    """
    if slot in SIZES:
        return {} if own == model[slot] else {slot: own}
    if slot not in SLOTS:
        known = (*SLOTS, *SIZES)
        raise ConfigError(f"{key}: a layer has no such part{suggestion(slot, known)}; choose of {', '.join(known)}")
    usual = written(model)[slot]
    if isinstance(own, str):
        options = options_of(slot)
        if own not in options:
            raise ConfigError(f"{key}={own}: {slot} has no such option{suggestion(own, options)}")
        cfg = with_options({slot: own})
        left_out = ("ffn", "hidden_dim") if cfg.model.ffn is None else ()  # by a block
        chosen = {part: written(cfg.model)[part] for part in (slot, *SLOTS[slot], *left_out)}
        return {} if resolved(chosen[slot], model) == resolved(usual, model) else chosen
    if not isinstance(own, dict):
        raise ConfigError(f"{key}={own}: must be an option of {slot}, or settings of its own such as {{key: value}}")
    if "_target_" in own:
        return {slot: own}
    settings = flatten(usual)
    for name in flatten(own):
        if not any(f"{name}.".startswith(f"{known}.") or known.startswith(f"{name}.") for known in settings):
            close = suggestion(name, settings)
            raise ConfigError(f"{key}.{name}: model.{slot} has no such key{close}; pattern=none makes all layers alike")
    if all(value == OmegaConf.select(model, f"{slot}.{name}") for name, value in flatten(own).items()):
        return {}
    return {slot: OmegaConf.to_container(OmegaConf.merge(usual, own))}


def unchanged(cfg: DictConfig) -> list[str]:
    """The keys of a pattern's rules, such as pattern.a.ffn, without an effect."""
    return [f"pattern.{rule.name}.{key}" for rule in read_rules(cfg.pattern, cfg.model) for key in rule.idle]


def written(node: DictConfig) -> Any:
    """A node as a plain container, with its interpolations."""
    return OmegaConf.to_container(node)


def resolved(node: dict[str, Any], model: DictConfig) -> Any:
    """A component's node without interpolations, as below `model`."""
    root = OmegaConf.create({"node": node}, flags={"allow_objects": True})
    root._set_parent(model._get_root())
    whole: Any = OmegaConf.to_container(root, resolve=True)
    return whole["node"]


def check_depth(n_layers: int) -> None:
    """Raise ConfigError for no layers, or more than are built."""
    require_positive("model.n_layers", n_layers, or_null=False)
    if n_layers > MOST_LAYERS:
        raise ConfigError(f"model.n_layers={n_layers}: at most {MOST_LAYERS} layers are built; use fewer")
