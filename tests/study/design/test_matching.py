"""The feed-forward width that makes an arm as large, or as expensive, as its reference."""

import functools
from itertools import permutations

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from llama_lab.config.components import build_model
from llama_lab.model import Cost, measure_cost
from llama_lab.runs.study import MOST_RESIDUAL
from llama_lab.study.design.matching import MEASURES, match_width
from llama_lab.study.design.plan import width_key
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config, options
from tests.refusals import refusing

SIZES = ("nano", "mini", "pythia_70m")
PAIRS = [*permutations(options("arch"), 2)][::11]  # each recipe is base and arm in two or three of them


@functools.cache
def config(recipe: str, size: str) -> DictConfig:
    return compose_config(f"arch={recipe}", f"size={size}")


@functools.cache
def cost(recipe: str, size: str, width: int | None = None) -> Cost:
    """Of a recipe with a feed-forward of this width, default: its textbook width."""
    cfg = config(recipe, size)
    cfg = cfg.copy()
    if width is not None:
        OmegaConf.update(cfg, width_key(cfg), width)
    with torch.device("meta"):
        return measure_cost(build_model(cfg, 4096))


@pytest.mark.parametrize(
    ("size", "match", "pairs"),
    [
        pytest.param("nano", "params", PAIRS[::8], id="nano-params"),
        pytest.param("pythia_70m", "flops", PAIRS[2::8], id="pythia_70m-flops"),
        *(
            pytest.param(size, match, PAIRS, marks=pytest.mark.matrix, id=f"{size}-{match}-all")
            for size, match in zip(SIZES, ("flops", "params", "params"), strict=True)
        ),
    ],
)
@pytest.mark.slow
def test_pairs_of_recipes_are_matched_to_their_residual(size: str, match: str, pairs: list[tuple[str, str]]) -> None:
    measure = MEASURES[match]
    for base, arm in pairs:
        reference = cost(base, size)
        textbook = OmegaConf.select(config(arm, size), width_key(config(arm, size)))
        if measure(cost(arm, size, 1)) > measure(reference):  # many experts, or a large mixer
            with pytest.raises(ConfigError, match="without any"):
                match_width(functools.partial(cost, arm, size), textbook, match, reference)
            continue
        matched = match_width(functools.partial(cost, arm, size), textbook, match, reference)
        assert matched.cost == cost(arm, size, matched.width)
        assert matched.residual == measure(matched.cost) / measure(reference) - 1
        shared = matched.cost.params_active < matched.cost.params  # many experts have a unit of width, or all heads
        if reference.params >= 10e6 and not shared and config(arm, size).model.ffn is not None:
            assert abs(matched.residual) <= MOST_RESIDUAL
            assert matched.width % 8 == 0, "only tiny models need odd widths"


@pytest.mark.parametrize(("match", "arm"), [("params", "llama2"), ("flops", "llama2"), ("active", "mixtral")])
def test_no_other_width_of_that_kind_comes_nearer(match: str, arm: str) -> None:
    reference, measure = cost("vanilla", "nano"), MEASURES[match]
    matched = match_width(functools.partial(cost, arm, "nano"), 344, match, reference)
    for width in (matched.width - 8, matched.width + 8):
        assert abs(measure(cost(arm, "nano", width)) / measure(reference) - 1) > abs(matched.residual)


def test_a_width_on_whose_square_the_cost_depends_is_found() -> None:
    """A gate of `kimi_delta` has as many rows as columns: values of a head."""
    shared = ("block=mixer_only", "position=none", "size=micro", "model.n_heads=1")

    def cost_of(mixer: str, width: int | None = None) -> Cost:
        cfg = compose_config(f"attention={mixer}", *shared)
        if width is not None:
            cfg.model.attention.value_dim = width
        with torch.device("meta"):
            return measure_cost(build_model(cfg, 256))

    textbook = compose_config("attention=kimi_delta", *shared).model.attention.value_dim
    matched = match_width(functools.partial(cost_of, "kimi_delta"), textbook, "flops", cost_of("mamba2"))
    assert abs(matched.residual) <= MOST_RESIDUAL


def test_a_recipe_matched_to_itself_keeps_its_width() -> None:
    matched = match_width(functools.partial(cost, "llama", "nano"), 344, "params", cost("llama", "nano"))
    assert (matched.width, matched.residual) == (344, 0.0)


def test_params_and_flops_ask_for_different_widths_where_the_window_saves_flops() -> None:
    widths = [
        match_width(functools.partial(cost, "mistral", "nano"), 344, match, cost("llama2", "nano")).width
        for match in ("params", "flops")
    ]
    assert widths[0] < widths[1]


def test_a_width_that_would_have_to_be_negative_is_refused() -> None:
    small = compose_config("arch=llama", "size=nano", "model.n_layers=1")
    with torch.device("meta"):
        reference = measure_cost(build_model(small, 4096))
    with refusing("match=params: without any feed-forward"):
        match_width(functools.partial(cost, "llama", "nano"), 344, "params", reference)


def test_a_feed_forward_that_ignores_its_width_is_refused() -> None:
    with refusing("match=params: the feed-forward's width"):
        match_width(lambda width: cost("llama", "nano"), 344, "params", cost("vanilla", "nano"))
