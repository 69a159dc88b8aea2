"""The lab's sizes start by their width; published ones as published."""

import math

import pytest

from tests.composing import compose_config, options
from tests.selection import first

LAB = ("pico", "nano", "micro", "mini", "small")


@pytest.mark.parametrize("size", first(2, LAB))
def test_the_labs_sizes_have_initial_values_batch_and_rate_by_width(size: str) -> None:
    cfg = compose_config(f"size={size}")
    assert cfg.model.init.std == pytest.approx(math.sqrt(2 / (5 * cfg.model.dim)))
    assert (cfg.model.embedding.std, cfg.train.batch_size) == (1.0, 8)
    assert cfg.optim.lr == pytest.approx(min(0.012, 0.77 / cfg.model.dim), rel=0.05)
    assert compose_config(f"size={size}", "embedding=tied").model.embedding.std == cfg.model.init.std


def test_a_width_of_ones_own_has_its_own_initial_values() -> None:
    assert compose_config("model.dim=256", "init=scaled").model.init.std == pytest.approx(math.sqrt(2 / 1280))


@pytest.mark.parametrize("size", first(2, [size for size in options("size") if size not in LAB]))
def test_published_sizes_start_as_published(size: str) -> None:
    cfg = compose_config(f"size={size}", "init=trunc", "embedding=untied")
    assert (cfg.model.init.std, cfg.model.embedding.std) == (0.02, 0.02)
    assert (cfg.train.batch_size, cfg.optim.lr) == (16, 2e-3)
