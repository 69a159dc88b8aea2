"""Layers that differ: each behaves as a model of its kind does, decodes with a cache and costs what it says."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llama_lab.model import Decoder, measure_cost
from llama_lab.model.encoding import Position
from llama_lab.model.generate import _static_step, prefill
from llama_lab.util.errors import ConfigError
from tests.composing import decoder, lively

TOKENS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
FOUR = ("size=pico", "model.n_layers=4", "attention=gqa")
PATTERNS = {
    "global": ("model.attention.window=5", "pattern=global_every_2nd"),
    "theta by kind": ("model.attention.window=5", "pattern=global_every_6th"),
    "nope": ("pattern=nope_every_4th",),
    "nope global": ("model.attention.window=5", "pattern=nope_global_every_4th"),
    "biases by layer": ("position=alibi", "+pattern.a={at: '::3', position: relative}"),
    "explicit": ("+pattern.a={at: [0,2], n_kv_heads: 1, ffn: gelu, norm: layernorm}",),
    "blocks": ("+pattern.a={at: 1, block: parallel}", "+pattern.b={at: [0, -1], hidden_dim: 24}"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_cached_decoding_equals_the_full_pass(pattern: str) -> None:
    model = lively(*FOUR, *PATTERNS[pattern])
    state = model.new_state(2, 24)
    read = [model(chunk, state) for chunk in TOKENS.split([7, 1, 1, 8, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(read, 1), model(TOKENS), rtol=1e-4, atol=1e-4)
    assert state.nbytes == 2 * sum(mixer.state_bytes(24, torch.float32) for mixer in model.mixers)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_flops_are_those_of_pytorchs_counter(pattern: str) -> None:
    """Of a sequence no longer than the window, where both count all keys."""
    model = decoder(*FOUR, *PATTERNS[pattern], "model.attention.kernel=reference")
    with FlopCounterMode(display=False) as counter:
        model(TOKENS[:1, :5])
    assert counter.get_total_flops() == 5 * measure_cost(model, 5).flops_per_token_dense


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layer_starts_with_the_values_that_it_has_in_a_model_of_its_kind(pattern: str) -> None:
    """A switch in one layer leaves the initial values of all others as they were."""
    plain = dict(decoder(*FOUR).named_parameters())
    for name, value in decoder(*FOUR, *PATTERNS[pattern]).named_parameters():
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


@torch.no_grad()
def test_prompts_of_different_lengths_and_the_static_step_know_the_layers() -> None:
    model: Decoder = lively(*FOUR, *PATTERNS["nope global"])
    prompts = [TOKENS[0, :9].tolist(), TOKENS[1, :4].tolist()]
    state = model.new_state(2, 24)
    prefill(model, prompts, state)
    positions = state.lengths[:, None].clone()
    static = _static_step(model, torch.tensor([[1], [2]]), positions, state)
    for row, (prompt, token) in enumerate(zip(prompts, (1, 2), strict=True)):
        torch.testing.assert_close(static[row], model(torch.tensor([[*prompt, token]]))[0, -1], rtol=1e-4, atol=1e-4)


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
