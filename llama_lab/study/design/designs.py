"""Designs: the rules that make a study's arms. A design knows recipes and options by name, and no models.

Each design is a class and an option in `conf/study/`. To add one, write a class with `variants` and a YAML.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Protocol

from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from llama_lab.config.composing import compose, of_hydra, options_of, run_config
from llama_lab.config.grammar import format_value, override_key
from llama_lab.config.schema import COMPONENTS, ENCODERS, WORDS, groups, is_kind
from llama_lab.runs.study import Arm
from llama_lab.util.errors import ConfigError, suggestion
from llama_lab.util.formatting import conjoin


@dataclass(frozen=True)
class Variants:
    """The arms of a design, the baseline first, without their runs.

    notes: caveats, as sentences. title: of the report; default: design and baseline. lead: see Study. hint: what may
    help where an arm is refused.
    """

    arms: tuple[Arm, ...]
    notes: tuple[str, ...] = ()
    title: str = ""
    lead: str = ""
    hint: str = ""


class Composer:
    """Composes the configs of a study's runs: shared overrides included, the study's settings removed."""

    def __init__(self, shared: Sequence[str] = ()) -> None:
        self._shared = [override for override in shared if not of_hydra(override_key(override))]

    def compose(self, *overrides: str) -> tuple[DictConfig, dict[str, Any]]:
        """The config of a run, and its choice per group. Raises ConfigError for a key that the run does not have."""
        try:
            cfg, choices = compose([*overrides, *self._shared])
        except ConfigCompositionException as error:
            if not (key := re.search(r"Could not override '([^']+)'", str(error))):
                raise
            raise ConfigError(
                f"{key[1]}: there is no such key with {' '.join(overrides)}; leave it out, or choose the group that "
                f"has it for all arms"
            ) from None
        return run_config(cfg, choices)


class Design(Protocol):
    """The object that a study's YAML describes. Its name is the option's."""

    def variants(self, configs: Composer) -> Variants:
        """The arms. Raises ConfigError for an invalid axis, recipe or level."""


def matched_arms(arms: Mapping[str, tuple[dict[str, str], Sequence[str]]], is_step: bool = False) -> tuple[Arm, ...]:
    """Arms with these axes and overrides, by name, all matched to and compared with the first.

    is_step: whether that is because they are a step from it; else because it is the study's baseline.
    """
    first = next(iter(arms))
    previous = {name: first for name in arms if is_step and name != first}
    return tuple(
        Arm(name, axes, previous=previous.get(name), overrides=tuple(overrides), reference=first)
        for name, (axes, overrides) in arms.items()
    )


def label(axis: str, option: Any, axes: Mapping[str, Sequence[Any]]) -> str:
    """The option as part of an arm's name, with the last part of its axis where it would be ambiguous.

    axes: the options of each.
    """
    text = re.sub(r"[^\w.+-]+", "_", format_value(option)).strip("_")
    last = axis.rpartition(".")[2]
    key = axis if sum(name.rpartition(".")[2] == last for name in axes) > 1 else last
    is_clear = axis in groups() and axis not in ("embedding", "init") and text != "none"
    shared = sum(option in options for options in axes.values()) > 1
    return text if is_clear and not shared else f"{key}={text}"


def compose_recipe(recipe: str, key: str, configs: Composer) -> tuple[DictConfig, dict[str, Any]]:
    """The config of a recipe, and its options. Raises ConfigError if there is no such recipe."""
    known = options_of("arch")
    if recipe not in known:
        raise ConfigError(
            f"study.{key}={recipe}: no such recipe{suggestion(str(recipe), known)}; choose {' | '.join(known)}"
        )
    return configs.compose(f"arch={recipe}")


def compose_base(base: str, configs: Composer) -> DictConfig:
    """The config of a recipe that predicts next tokens. Raises ConfigError if there is none, and for an encoder."""
    cfg, choices = compose_recipe(base, "base", configs)
    if choices["family"] in ENCODERS:
        problem = "an encoder has no cache, and predicts no next token"
        raise ConfigError(f"study.base={base}: {problem}; choose another, or another family")
    return cfg


@dataclass(frozen=True)
class AlongLine:
    """Base class of designs between two recipes. axes: default: all on which they differ."""

    base: str
    target: str
    axes: Sequence[str] | None = None

    def turned(self, labels: Mapping[str, str]) -> tuple[str, dict[str, Collection[str]]]:
        """The title, and by arm the axes on which it has the target's option; the first arm is a recipe of that name.

        labels: by axis, the target's option as part of an arm's name.
        """
        raise NotImplementedError

    def variants(self, configs: Composer) -> Variants:
        """The arms. All have the options of the first arm's recipe in the groups that are no axis."""
        levels, notes = self.levels(configs)
        targets = {axis: [option] for axis, (_, option) in levels.items()}
        title, turned = self.turned({axis: label(axis, option, targets) for axis, (option,) in targets.items()})
        recipe = next(iter(turned))
        arms: list[Arm] = []
        for name, on in turned.items():
            axes = {axis: options[axis in on] for axis, options in levels.items()}
            overrides = (f"arch={recipe}", *(f"{axis}={option}" for axis, option in axes.items()))
            previous = arms[-1].name if isinstance(self, Ladder) and arms else None
            arms.append(Arm(name, axes, previous=previous, overrides=overrides, reference=recipe))
        return Variants(tuple(arms), notes, title)

    def levels(self, configs: Composer) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
        """(base's option, target's option) by axis, and notes on axes that are none. Raises ConfigError."""
        base, target = self.base, self.target
        (_, ours), (_, theirs) = compose_recipe(base, "base", configs), compose_recipe(target, "target", configs)
        differ = {axis: (ours[axis], theirs[axis]) for axis in COMPONENTS if ours[axis] != theirs[axis]}
        asked = list(differ if self.axes is None else self.axes)
        choose = f"choose among {', '.join(COMPONENTS)}"
        if self.axes is not None and not asked:
            raise ConfigError(f"study.axes=[]: is empty; leave it out, or {choose}")
        if unknown := [str(axis) for axis in asked if axis not in COMPONENTS]:
            raise ConfigError(f"study.axes: {unknown[0]} is not an axis{suggestion(unknown[0], COMPONENTS)}; {choose}")
        if len(set(asked)) < len(asked):
            raise ConfigError(f"study.axes=[{','.join(asked)}]: names an axis twice")
        levels = {axis: differ[axis] for axis in asked if axis in differ}
        if not levels:
            on = f" on {', '.join(asked)}" if asked else ""
            others = f"they differ on {', '.join(differ) or '-'}"
            raise ConfigError(f"study.target={target}: is the same as study.base={base}{on}; {others}")
        alike = [axis for axis in asked if axis not in differ]
        notes = [f"No arm for {axis}: {base} and {target} both have {ours[axis]}." for axis in alike]
        if left := [axis for axis in differ if axis not in levels]:
            stay = "stays" if len(left) == 1 else "stay"
            notes.append(f"{base} and {target} also differ on {', '.join(left)}, which {stay} as in the baseline.")
        return levels, tuple(notes)


class Ladder(AlongLine):
    """From base to target, one axis after the other; each arm is compared with the previous one."""

    def turned(self, labels: Mapping[str, str]) -> tuple[str, dict[str, Collection[str]]]:
        """The base, then a rung per axis."""
        rungs = {f"+{option}": [*labels][: i + 1] for i, option in enumerate(labels.values())}
        return f"From {self.base} to {self.target}, one change at a time", {self.base: [], **rungs}


class AddOne(AlongLine):
    """The base, and the base with the target's option on one axis at a time."""

    def turned(self, labels: Mapping[str, str]) -> tuple[str, dict[str, Collection[str]]]:
        """The base, then an arm per axis."""
        added = {f"{self.base}+{option}": [axis] for axis, option in labels.items()}
        return f"What each part of {self.target} does for {self.base}", {self.base: [], **added}


class LeaveOneOut(AlongLine):
    """The target, and the target with the base's option on one axis at a time."""

    def turned(self, labels: Mapping[str, str]) -> tuple[str, dict[str, Collection[str]]]:
        """The target, then an arm per axis."""
        kept = {f"{self.target}-{option}": labels.keys() - {axis} for axis, option in labels.items()}
        return f"What each part of {self.target} does for it", {self.target: [*labels], **kept}


@dataclass(frozen=True)
class Factorial(AlongLine):
    """Every combination of base and target on the axes, or a regular fraction of them (Box, Hunter & Hunter, ch. 6).

    fraction: 1: all; 0.5, 0.25, ...: the half, quarter, ... with the least confounding; it contains the base.
    """

    fraction: float = 1.0

    def turned(self, labels: Mapping[str, str]) -> tuple[str, dict[str, Collection[str]]]:
        """The base, then the other combinations."""
        rows = sorted(combinations(len(labels), self.fraction))
        turned = [[axis for axis, is_on in zip(labels, row, strict=True) if is_on] for row in rows]
        share = "all combinations" if self.fraction == 1 else f"1 in {1 / self.fraction:g} combinations"
        title = f"{conjoin([*labels])} between {self.base} and {self.target}: {share}"
        return title[0].upper() + title[1:], {
            "+".join([self.base, *(labels[axis] for axis in on)]): on for on in turned
        }


def combinations(n_axes: int, fraction: float) -> list[tuple[bool, ...]]:
    """The combinations of a two-level factorial: all, or the `fraction` of best resolution. Raises ConfigError."""
    if fraction == 1:
        return list(product((False, True), repeat=n_axes))
    from pyDOE3 import fracfact

    found = {0.5**n: generators for n in range(1, n_axes) if (generators := fraction_generators(n_axes, n))}
    if fraction not in found:
        possible = ", ".join(f"{known:g}" for known in (1, *found))
        raise ConfigError(f"study.fraction={fraction:g}: with {n_axes} axes choose {possible}")
    rows = fracfact(found[fraction]) > 0
    # XOR with one of its own rows gives a regular fraction of equal resolution that contains the base.
    return [tuple(bool(on) for on in row) for row in rows ^ rows[0]]


def fraction_generators(n_axes: int, halvings: int) -> str:
    """The generators of the fraction with the least confounding; empty if every one confounds two axes."""
    from pyDOE3 import fracfact_opt

    if 2 ** (n_axes - halvings) <= n_axes:  # a row for the mean and one for each axis
        return ""
    try:
        return str(fracfact_opt(n_axes, halvings)[0])
    except ValueError:  # pyDOE3 finds no saturated designs
        return ""


@dataclass(frozen=True)
class Recipes:
    """Whole recipes at one size, matched to the first.

    lengths: multiples of the context at which every run is evaluated; default: none.
    """

    recipes: Sequence[str]
    lengths: Sequence[float] | None = None

    def variants(self, configs: Composer) -> Variants:
        """An arm per recipe."""
        check_levels("recipes", self.recipes, str, least=2)
        lengths = () if self.lengths is None else (eval_lengths(self.lengths),)
        for recipe in self.recipes:
            compose_recipe(recipe, "recipes", configs)
        arms = matched_arms({recipe: ({"arch": recipe}, (f"arch={recipe}", *lengths)) for recipe in self.recipes})
        note = "Recipes are compared at one size and budget; at others they may rank otherwise."
        return Variants(arms, (note,), f"{conjoin(self.recipes)} compared")


class LearningRate(Recipes):
    """Recipes whose losses over learning rates are the question."""

    def variants(self, configs: Composer) -> Variants:
        """An arm per recipe."""
        return replace(super().variants(configs), lead="Learning rate")


@dataclass(frozen=True)
class KVHeads:
    """One recipe with different numbers of key and value heads: MHA, GQA-n, MQA.

    kv_heads: default: all divisors of the number of heads. `variants` raises ConfigError for a recipe without
    grouped-query attention.
    """

    base: str
    kv_heads: Sequence[int] | None = None

    def variants(self, configs: Composer) -> Variants:
        """An arm per number, in descending order."""
        wanted, n_heads = kv_head_levels(self.base, self.kv_heads, configs)
        arms = {
            heads_name(n, n_heads): ({"n_kv_heads": str(n)}, (f"arch={self.base}", f"model.n_kv_heads={n}"))
            for n in wanted
        }
        title = f"{self.base} with {conjoin([*map(str, wanted)])} key and value heads"
        return Variants(matched_arms(arms), title=title, lead="Cost")


def kv_head_levels(base: str, kv_heads: Sequence[int] | None, configs: Composer) -> tuple[list[int], int]:
    """The numbers of key and value heads in descending order, default: all divisors of the number of heads; and that.

    Raises ConfigError for a recipe without grouped-query attention, and for a number that does not divide the heads.
    """
    model = compose_base(base, configs).model
    if not model.attention._target_.endswith(".GroupedQueryAttention"):
        raise ConfigError(
            f"study.base={base}: its attention has a fixed number of key and value heads; add attention=gqa"
        )
    if kv_heads is not None:
        check_levels("kv_heads", kv_heads, int)
    n_heads = model.n_heads
    divisors = [n for n in range(n_heads, 0, -1) if n_heads % n == 0]
    wanted = divisors if kv_heads is None else sorted(set(kv_heads), reverse=True)
    for n in wanted:
        if n not in divisors:
            raise ConfigError(f"study.kv_heads: {n} does not divide model.n_heads={n_heads}; choose among {divisors}")
    return wanted, n_heads


def heads_name(n_kv_heads: int, n_heads: int) -> str:
    """mha, gqa-4 or mqa."""
    return "mha" if n_kv_heads == n_heads else "mqa" if n_kv_heads == 1 else f"gqa-{n_kv_heads}"


@dataclass(frozen=True)
class Depth:
    """Blocks at several depths, with and without warm-up (Xiong et al. 2020; Wang et al. 2022, DeepNet).

    warmups: fractions of the budget. Arms are matched to, and compared with, the first block at the same depth and
    warm-up.
    """

    base: str
    blocks: Sequence[str]
    depths: Sequence[int]
    warmups: Sequence[float]

    def variants(self, configs: Composer) -> Variants:
        """An arm per depth, warm-up and block."""
        compose_recipe(self.base, "base", configs)
        check_levels("blocks", self.blocks, str)
        check_levels("depths", self.depths, int)
        check_levels("warmups", self.warmups, float)
        arms: tuple[Arm, ...] = ()
        for depth, warmup in product(self.depths, self.warmups):
            own = f"model.n_layers={depth}", f"schedule.warmup={warmup}"
            alike = {
                f"{block}-{depth}-warmup={warmup:g}": (
                    {"block": block, "n_layers": str(depth), "warmup": f"{warmup:g}"},
                    (f"arch={self.base}", f"block={block}", *own),
                )
                for block in self.blocks
            }
            arms += matched_arms(alike, is_step=True)
        note = "Arms are matched within one depth: deeper ones have more parameters."
        return Variants(arms, (note,), f"{conjoin(self.blocks)} at {conjoin([*map(str, self.depths)])} layers")


@dataclass(frozen=True)
class Context:
    """Position encodings trained short and evaluated long (Press et al. 2021).

    lengths: multiples of the context at which every run is evaluated.
    """

    base: str
    positions: Sequence[str]
    lengths: Sequence[float]

    def variants(self, configs: Composer) -> Variants:
        """An arm per position encoding."""
        compose_base(self.base, configs)
        check_levels("positions", self.positions, str)
        base, lengths = f"arch={self.base}", eval_lengths(self.lengths)
        arms = {name: ({"position": name}, (base, f"position={name}", lengths)) for name in self.positions}
        title = f"{conjoin(self.positions)} at the trained context and beyond"
        return Variants(matched_arms(arms), title=title, lead="Context length")


def eval_lengths(lengths: Sequence[float]) -> str:
    """The override that evaluates runs at these multiples of the context. Raises ConfigError if one repeats."""
    check_levels("lengths", lengths, float)
    return f"train.eval_lengths=[{','.join(f'{length:g}' for length in lengths)}]"


@dataclass(frozen=True)
class Families:
    """A decoder, a prefix decoder and an encoder-decoder of one recipe (Raffel et al. 2020, table 2; Wang et al. 2022).

    match: of the study. Each tower of the encoder-decoder has half of the decoder's layers; all of them if parameters
    are not matched, since it reads half of a window.
    """

    base: str
    match: str

    def variants(self, configs: Composer) -> Variants:
        """An arm per family."""
        layers = compose_recipe(self.base, "base", configs)[0].model.n_layers
        depth = layers if self.match in ("flops", "none") else max(1, layers // 2)
        decoder = {"family": "decoder", "objective": "next_token", "model.n_layers": str(layers)}
        families = {
            "decoder": decoder,
            "prefix_decoder": {**decoder, "objective": "prefix"},
            "encoder_decoder": {**decoder, "family": "encoder_decoder", "model.n_layers": str(depth)},
        }
        arms = {name: (axes, [f"arch={self.base}", *map("=".join, axes.items())]) for name, axes in families.items()}
        return Variants(matched_arms(arms), title=f"{self.base} as {conjoin([*arms])}")


def check_levels(key: str, levels: Sequence[object], kind: type, least: Literal[1, 2] = 1) -> None:
    """Raise ConfigError for fewer levels than `least`, a repeated one, or one that is not of `kind`."""
    if len(set(levels)) < max(least, len(levels)) or not all(is_kind(level, kind) for level in levels):
        setting, number = f"study.{key}=[{','.join(map(str, levels))}]", {1: "one", 2: "two"}[least]
        raise ConfigError(f"{setting}: must be {number} or more distinct levels, each {WORDS[kind]}")
