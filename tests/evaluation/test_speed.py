"""What is timed is what is told: as many tokens, at their place in the context, and the same logits both ways."""

from itertools import groupby
from typing import Any

import pytest
import torch
from torch.utils.benchmark import Measurement, TaskSpec

from llama_lab.evaluation import speed as speed_module
from llama_lab.evaluation.speed import (
    NEW_TOKENS,
    decoding,
    generation_speed,
    random_tokens,
    reading,
    reading_again,
    time_in_turn,
)
from llama_lab.model import Decoder, EncoderDecoder
from tests.composing import decoder, lively

RECIPES = {
    "llama": [],
    "learned": ["position=learned"],
    "window": ["attention=gqa", "model.attention.window=5"],
}


def watched(model: Decoder) -> list[tuple[int, list[int]]]:
    """The passes through a model from now on: how many sequences, and at which positions."""
    passes: list[tuple[int, list[int]]] = []

    def note(_: Any, arguments: tuple[Any, ...]) -> None:
        x, context, *_ = arguments
        passes.append((x.shape[0], context.positions.flatten().tolist()))

    model.blocks[0].register_forward_pre_hook(note)
    return passes


def test_decoding_reads_the_last_tokens_one_by_one_every_time_and_reading_the_whole_context() -> None:
    model = decoder()
    passes = watched(model)
    work = decoding(model, 3, 32, NEW_TOKENS)
    for _ in range(3):
        work()
        assert passes == [(3, [position]) for position in range(16, 32)]
        passes.clear()
    reading(model, 2, 20)()
    assert passes == [(1, [*range(20)])] * 2
    passes.clear()
    reading_again(model, 2, 20)()
    assert passes == [(2, [*range(20)])]


def test_an_encoder_decoder_reads_a_source_and_decodes_with_what_is_kept_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("family=encoder_decoder")
    assert isinstance(model, EncoderDecoder)
    passes, sources = watched(model), []
    model.encoder.blocks[0].register_forward_pre_hook(lambda _, arguments: sources.append(arguments[0].shape[:2]))
    work = decoding(model, 3, 32, NEW_TOKENS)
    passes.clear()
    assert sources == [(1, 32)] * 3
    work()
    assert passes == [(3, [position]) for position in range(16, 32)]
    assert len(sources) == 3, "none is read again"


@pytest.mark.parametrize("overrides", RECIPES.values(), ids=RECIPES)
@torch.no_grad()
def test_decoding_and_reading_give_the_same_logits(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, before, logits = lively(*overrides), torch.arange(32).view(2, 16), []
    torch.testing.assert_close(reading(model, 2, 24)(), reading_again(model, 2, 24)(), rtol=1e-4, atol=1e-4)
    cache = model.new_state(2, 32)
    model(before, cache)
    monkeypatch.setattr(model, "new_state", lambda *_: cache)
    head = model.embedding.logits
    monkeypatch.setattr(model.embedding, "logits", lambda x: logits.append(head(x)) or logits[-1])
    decoding(model, 2, 32, 16)()
    monkeypatch.undo()
    expected = model(torch.cat((before, random_tokens(model, 2, 16)), 1))[:, 16:]
    torch.testing.assert_close(torch.stack(logits, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("context", "new_tokens"), [(32, 16), (5, 5)])
def test_times_are_per_step_of_all_sequences(context: int, new_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(contenders: dict[str, Any], rounds: int) -> dict[str, Measurement]:
        return {name: Measurement(1, [8.0] * rounds, TaskSpec("work()", "")) for name in contenders}

    monkeypatch.setattr(speed_module, "time_in_turn", timed)
    found = generation_speed(decoder(), 2, context, 3)
    assert (found.batch_size, found.context) == (2, context)
    assert list(found.prefill) == list(found.uncached) == [8.0] * 3
    assert list(found.decode) == [8.0 / new_tokens] * 3


@pytest.mark.slow
def test_real_times_come_one_for_each_round_in_every_cache_dtype() -> None:
    for dtype in (None, torch.bfloat16, torch.int8):
        found = generation_speed(decoder(), 1, 8, 2, cache_dtype=dtype)
        for seconds in (found.prefill, found.decode, found.uncached):
            assert len(seconds) == 2
            assert min(seconds) > 0


# Timing in turn


def test_each_has_a_time_for_every_round_and_they_take_turns() -> None:
    called: list[str] = []
    contenders = {name: (lambda name=name: called.append(name)) for name in "ab"}
    found = time_in_turn(contenders, rounds=3, min_seconds=0)
    assert {name: len(timing.times) for name, timing in found.items()} == {"a": 3, "b": 3}
    order = [name for name, _ in groupby(called)]
    assert order == list("ababab")  # ab before, then ab, ba, ab: who ended a round begins the next
