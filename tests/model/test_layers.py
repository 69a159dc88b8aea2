"""Layers that differ: each behaves as a model of its kind does. test_cache.py and test_cost.py have them, too."""

import pytest
import torch

from llama_lab.model.encoding import Position
from llama_lab.util.errors import ConfigError
from tests.composing import decoder, lively
from tests.model.cases import FOUR, PATTERNS

TOKENS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layer_starts_with_the_values_that_it_has_in_a_model_of_its_kind(pattern: str) -> None:
    """A switch in one layer leaves the initial values of all others as they were."""
    plain = dict(decoder(*FOUR).named_parameters())
    for name, value in decoder(*PATTERNS[pattern]).named_parameters():
        if name in plain and plain[name].shape == value.shape and not name.startswith("norm"):
            assert torch.equal(plain[name], value), name


@torch.no_grad()
def test_a_layer_without_positions_does_not_know_the_order_of_tokens_before_the_last() -> None:
    """With one layer of the two left, the last token sees a set."""
    model = lively("size=pico", "+pattern.a={at: 0, position: none}")
    del model.blocks[1:]
    swapped = TOKENS.clone()
    swapped[:, [2, 5]] = TOKENS[:, [5, 2]]
    torch.testing.assert_close(model(TOKENS)[:, -1], model(swapped)[:, -1], rtol=1e-4, atol=1e-4)
    ordered = lively("size=pico", "+pattern.a={at: 1, position: none}")
    del ordered.blocks[1:]
    assert (ordered(TOKENS)[:, -1] - ordered(swapped)[:, -1]).abs().max() > 0.01


@torch.no_grad()
def test_each_layer_turns_at_its_own_theta() -> None:
    """The first layer of a pattern, against a model that has its theta everywhere."""
    own, everywhere = (
        lively("size=pico", *settings)
        for settings in (["+pattern.a={at: 0, position: {theta: 100.0}}"], ["model.position.theta=100.0"])
    )
    everywhere.load_state_dict(own.state_dict())
    outputs = []
    for model in (own, everywhere):
        model.blocks[0].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        model(TOKENS)
    assert torch.equal(*outputs)
    assert not torch.equal(own(TOKENS), everywhere(TOKENS))


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
