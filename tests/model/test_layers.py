"""Layers that differ. Those of transformers, test_cache.py and test_cost.py have them, too."""

import pytest
import torch

from llama_lab.model.encoding import Position
from llama_lab.util.errors import ConfigError
from tests.composing import decoder
from tests.model.cases import FOUR, PATTERNS

TOKENS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layer_starts_with_the_values_that_it_has_in_a_model_of_its_kind(pattern: str) -> None:
    """A switch in one layer leaves the initial values of all others as they were."""
    plain = dict(decoder(*FOUR).named_parameters())
    for name, value in decoder(*PATTERNS[pattern]).named_parameters():
        if name in plain and plain[name].shape == value.shape and not name.startswith("norm"):
            assert torch.equal(plain[name], value), name


class Ending(Position):
    """No encoding, with a limit."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.max_positions = end


@torch.no_grad()
def test_a_layer_s_encoding_that_ends_somewhere_ends_the_model() -> None:
    ending = f"position: {{_target_: {__name__}.Ending, _partial_: true, end: 24}}"
    rule, windows = f"+pattern.a={{at: 1, {ending}}}", "model.attention.window=5"
    model = decoder("size=pico", "model.max_seq_len=16", windows, rule)
    model(TOKENS)
    with pytest.raises(ValueError, match=r"^max_seq_len=16: ending positions end at 24, not at 25 tokens$"):
        model(torch.zeros(1, 25, dtype=torch.long))
    assert model.max_context == 16, "and it does not slide on"
    with pytest.raises(ConfigError, match=r"^model.max_seq_len=32: ending positions end at 24; make it smaller, or"):
        decoder("size=pico", "model.max_seq_len=32", windows, rule)
