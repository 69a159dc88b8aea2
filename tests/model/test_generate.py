"""Generation: the text that the logits ask for, whatever the batch, and draws from the distribution that was set."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llama_lab.model import Decoder, Sampling, generate
from tests.composing import lively
from tests.conftest import needs_compiler

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 4, 7, 0, 11], [30, 31]]


def texts(model: Decoder, prompts: Sequence[Sequence[int]], n: int, **settings: Any) -> list[list[int]]:
    """What follows each prompt."""
    steps = list(generate(model, prompts, n, **settings))
    return [[token for token in column if token is not None] for column in zip(*steps, strict=True)]


@torch.no_grad()
def is_likeliest(model: Decoder, prompts: Sequence[Sequence[int]], n: int) -> bool:
    """Whether each token of each greedy text is the likeliest after all before it, by a forward pass of the whole."""
    found = texts(model, prompts, n, sampling=GREEDY)
    wholes = [[*prompt, *text] for prompt, text in zip(prompts, found, strict=True)]
    logits = [model(torch.tensor([whole[:-1]]))[0] for whole in wholes]
    return found == [after[-n:].argmax(-1).tolist() for after in logits]


@pytest.mark.parametrize("arch", ["gemma2", "qwen3_next"])  # cached logits of all others: test_cache.py
def test_greedy_text_is_that_of_a_full_forward_pass(arch: str) -> None:
    assert is_likeliest(lively(f"arch={arch}"), PROMPTS, 20)


def test_text_repeats_itself_with_the_same_seed_in_any_dtype_of_the_cache() -> None:
    model = lively("arch=llama")
    one, again, other = (texts(model, PROMPTS, 20, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True))
    for dtype in (torch.bfloat16, torch.int8):
        rounded = texts(model, PROMPTS, 20, seed=0, cache_dtype=dtype)
        assert [text[0] for text in rounded] == [text[0] for text in one]


def test_a_sequence_ends_with_its_end_of_text_and_the_others_go_on() -> None:
    model = lively("arch=llama")
    free = texts(model, PROMPTS, 20, sampling=GREEDY)
    eot = free[0][5]
    steps = list(generate(model, PROMPTS, 20, GREEDY, eot_id=eot))
    for whole, column in zip(free, zip(*steps, strict=True), strict=True):
        end = whole.index(eot) + 1 if eot in whole else 20
        assert list(column) == [*whole[:end], *[None] * (len(steps) - end)]
    assert len(list(generate(model, PROMPTS[:1], 20, GREEDY, eot_id=eot))) == free[0].index(eot) + 1


def test_as_many_tokens_come_as_are_asked_for_one_step_at_a_time() -> None:
    for length in (0, 25):
        steps = generate(lively("arch=llama"), PROMPTS, length)
        assert iter(steps) is steps
        assert [len(step) for step in steps] == [len(PROMPTS)] * length


def test_windows_let_text_slide_past_the_context() -> None:
    model = lively("attention=gqa", "model.attention.window=5")
    assert is_likeliest(model, PROMPTS, 40)
    assert is_likeliest(model, [[*range(40)]], 3)
    learned = lively("attention=gqa", "model.attention.window=5", "position=learned")
    with pytest.raises(ValueError, match=r"^max_new_tokens=30: "):
        generate(learned, [[1, 2, 3]], 30)


REFUSED = {
    "prompts=[]: must hold at least one prompt": ([], 1),
    "prompts[1]: is empty; begin with the end-of-text token": ([[1], []], 1),
    "prompts[0]: token 97 is not among the model's 97": ([[97]], 1),
    "prompts[0]: has 33 tokens, more than max_seq_len=32": ([[1] * 33], 0),
    "max_new_tokens=30: prompts[1] of 3 tokens leaves room for 29 in max_seq_len=32": ([[1], [1, 2, 3]], 30),
    "max_new_tokens=-1: must not be negative": ([[1]], -1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_generated_is_refused_before_anything_is_computed(message: str) -> None:
    prompts, n = REFUSED[message]
    with pytest.raises(ValueError, match=r".") as error:
        generate(lively("arch=llama"), prompts, n)
    assert str(error.value) == message


IMPOSSIBLE = {"temperature": [-0.1, math.nan, math.inf], "top_k": [0, 1.5], "top_p": [0.0, 1.1], "min_p": [-0.1, 1.5]}


@pytest.mark.parametrize("setting", IMPOSSIBLE)
def test_sampling_that_cannot_work_is_refused(setting: str) -> None:
    for value in IMPOSSIBLE[setting]:
        with pytest.raises(ValueError, match=rf"^{setting}={value}: must be "):
            Sampling(**{setting: value})


def kept_by_transformers(logits: Tensor, sampling: Sampling) -> Tensor:
    """The intended probabilities `(V,)`."""
    values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    kinds = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    warpers = [kind(value) for kind, value in zip(kinds, values, strict=True) if value is not None]
    return LogitsProcessorList(warpers)(None, logits[None])[0].softmax(-1)


@given(
    logits=st.lists(st.floats(-8, 8), min_size=2, max_size=12, unique_by=lambda x: round(x, 3)),
    temperature=st.floats(0.1, 3),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.floats(0.01, 0.99),
    min_p=st.none() | st.floats(0, 1),
)
@settings(deadline=None, max_examples=100)
def test_each_setting_keeps_what_transformers_keeps(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    sampling, exact = Sampling(temperature, top_k, top_p, min_p), torch.tensor(logits, dtype=torch.float64)
    torch.testing.assert_close(sampling.distribution(exact), kept_by_transformers(exact, sampling))


@pytest.mark.slow
def test_100_000_draws_have_the_intended_frequencies_and_none_is_outside() -> None:
    sampling = Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05)
    logits = 1.5 * torch.randn(30, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(0)
    counts = sampling.draw(logits.expand(100_000, -1), [generator] * 100_000).bincount(minlength=30)
    expected = 100_000 * kept_by_transformers(logits.double(), sampling)
    assert counts[expected == 0].sum() == 0
    assert chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_temperature_0_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert GREEDY.draw(logits, []).tolist() == [1, 0]
    assert GREEDY.distribution(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


FOUR_IN_WINDOWS = (["attention=gqa", "position=relative", "model.attention.window=5"], 4, torch.int8)
OTHERS = [  # overrides, and how many texts at once: what is compiled for one text is no other code for each model
    (["arch=llama3"], 1, None),
    (["arch=gemma2"], 4, None),
    (["arch=bloom"], 1, None),
]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "batch_size", "dtype"),
    [FOUR_IN_WINDOWS, *(pytest.param(*one, marks=pytest.mark.matrix) for one in OTHERS)],
)
def test_compiled_text_is_the_same_and_is_traced_once(
    overrides: list[str], batch_size: int, dtype: torch.dtype | None
) -> None:
    torch._dynamo.reset()
    model, prompts = lively(*overrides), PROMPTS[:batch_size]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n, seed in ((20, 0), (12, 0), (12, 1)):
            compiled, eager = (
                texts(model, prompts, n, compiled=compiled, seed=seed, cache_dtype=dtype) for compiled in (True, False)
            )
            assert compiled == eager
