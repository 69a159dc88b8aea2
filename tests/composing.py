"""Compose the real configs and build real models, as every test of a switch does."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from llama_lab.config.components import CONF_DIR, build_model, register_resolvers
from llama_lab.config.composing import compose
from llama_lab.model import Decoder
from llama_lab.util.errors import ConfigError

register_resolvers()
END_OF_TEXT = 0  # the token with which a document starts, under data.document_mask


def compose_config(*overrides: str) -> DictConfig:
    """The config that `python train.py *overrides` would run."""
    return compose(overrides)[0]


def eval_settings(*overrides: str) -> DictConfig:
    """The settings that `python eval.py run=here *overrides` would evaluate by."""
    return compose(["run=here", *overrides], "eval")[0]


def decoder(*overrides: str, vocab_size: int = 97, device: str = "cpu") -> Decoder:
    """The decoder that `python train.py *overrides` would train, default: `size=pico`."""
    if not any(o.startswith("size=") for o in overrides):
        overrides = ("size=pico", *overrides)
    with torch.device(device):
        return build_model(compose_config(*overrides), vocab_size, END_OF_TEXT)


@cache
def lively(*overrides: str) -> Decoder:
    """A model whose attention is far from uniform."""
    model = decoder(*overrides).eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.3, generator=generator)
    return model


def options(group: str) -> list[str]:
    """The names of a group's options."""
    return sorted(p.stem for p in (CONF_DIR / group).glob("*.yaml"))


def refusal(*overrides: str) -> str:
    """The line with which a model of these overrides is refused."""
    with pytest.raises(ConfigError) as refused:
        decoder(*overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# The recipes that predict next tokens and need no source; the others: tests/model/test_encoder{,_decoder}.py.
ENCODER_DECODERS = ("transformer2017", "t5", "t5_v1_1")
DECODERS = [recipe for recipe in options("arch") if recipe not in ("bert", *ENCODER_DECODERS)]


@cache
def kinds(group: str) -> list[str]:
    """The options of a group but for those that differ from another in numbers alone, and run wherever that does."""
    found: dict[str, str] = {}
    for option in options(group):
        found.setdefault(str(without_numbers(written(group, option))), option)
    return list(found.values())


@cache
def softmaxes() -> list[str]:
    """The options of `attention` that have a softmax; the others are recurrent, and read no positions."""
    return [option for option in options("attention") if "kernel" in written("attention", option).attention]


def written(group: str, option: str) -> Any:
    """The body of an option with those of the options that it extends."""
    own = OmegaConf.load(CONF_DIR / group / f"{option}.yaml")
    bases = [written(group, base) for base in own.pop("defaults", []) if base != "_self_"]
    return OmegaConf.merge(*bases, own)


def without_numbers(node: Any) -> Any:
    """A node with the type in place of every number."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node)
    if isinstance(node, dict):
        return {key: without_numbers(value) for key, value in node.items()}
    return "number" if type(node) in (int, float) else node


def cover(*axes: Sequence[Any], meeting: int = 2) -> list[tuple[Any, ...]]:
    """Few combinations of a choice of each axis, in which any choices of `meeting` axes meet; found greedily."""

    def meetings(row: Sequence[Any]) -> set[Any]:
        return set(combinations([at for at in enumerate(row) if at[1] is not ...], meeting))

    missing = {some for row in product(*axes) for some in meetings(row)}
    rows = []
    while missing:
        row = [dict(min(missing, key=str)).get(axis, ...) for axis in range(len(axes))]
        for axis in (axis for axis, choice in enumerate(row) if choice is ...):
            grown = [[*row[:axis], choice, *row[axis + 1 :]] for choice in axes[axis]]
            row = max(grown, key=lambda candidate: len(meetings(candidate) & missing))
        missing -= meetings(row)
        rows.append(tuple(row))
    return rows


def crossed(*axes: Sequence[Any], meeting: int = 2) -> list[Any]:
    """Every combination of a choice of each axis, for a test; those that `cover` leaves out are marked `matrix`."""
    covering = cover(*axes, meeting=meeting)
    return [pytest.param(*row, marks=() if row in covering else pytest.mark.matrix) for row in product(*axes)]
