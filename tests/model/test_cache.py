"""The KV cache: decoding in chunks of any sizes equals one forward pass, in the promised bytes."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from llama_lab.model import Decoder, measure_cost
from llama_lab.model.cache import LayerCache
from tests.composing import decoder, options

LENGTH = 24
VARIANTS = {
    "plain": ["attention=gqa"],
    "window": ["attention=gqa", "model.attention.window=5"],
    "window of 1": ["attention=mqa", "model.attention.window=1"],
    "global every other": ["attention=gqa", "model.attention.window=5", "model.attention.global_every=2"],
    "reference": ["attention=gqa", "model.attention.window=5", "model.attention.kernel=reference"],
    "gemma2": ["attention=gqa_gemma2"],
    "qk norm": ["attention=mha_qk_norm"],
}


@cache
def lively(*overrides: str) -> Decoder:
    """A model whose attention is far from uniform."""
    model = decoder(*overrides).eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.3, generator=generator)
    return model


def in_chunks(model: Decoder, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of `tokens`, read in chunks of these sizes and a last one of what they leave."""
    sizes = [*sizes, LENGTH - sum(sizes)]
    kv_cache = model.new_cache(tokens.shape[0], LENGTH)
    logits = [model(chunk, kv_cache) for chunk in tokens.split(sizes, 1)]
    assert kv_cache.length == LENGTH
    return torch.cat(logits, 1)


@st.composite
def chunk_sizes(draw: st.DrawFn) -> list[int]:
    ends = sorted(draw(st.sets(st.integers(1, LENGTH - 1), max_size=6)))
    return [end - start for start, end in pairwise([0, *ends])]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", options("position"))
@given(sizes=chunk_sizes())
@settings(deadline=None, max_examples=3)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(position: str, variant: str, sizes: list[int]) -> None:
    model = lively(f"position={position}", *VARIANTS[variant])
    tokens = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(sum(sizes)))
    torch.testing.assert_close(in_chunks(model, tokens, sizes), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", options("arch"))
@torch.no_grad()
def test_every_recipe_decodes_with_a_cache(arch: str) -> None:
    model, tokens = lively(f"arch={arch}"), torch.arange(2 * LENGTH).view(2, LENGTH)
    torch.testing.assert_close(in_chunks(model, tokens, [7, 11]), model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_takes_the_bytes_that_its_cost_says(variant: str, dtype: torch.dtype) -> None:
    model = lively(*VARIANTS[variant])
    for length in (3, LENGTH):
        cost = measure_cost(model, length, kv_bytes_per_element=dtype.itemsize)
        assert model.new_cache(1, length, dtype).nbytes == cost.kv_bytes
        assert model.new_cache(4, length, dtype).nbytes == 4 * cost.kv_bytes


@torch.no_grad()
def test_a_cache_may_have_another_dtype_than_the_model() -> None:
    model, tokens = lively("attention=gqa"), torch.arange(LENGTH)[None]
    kv_cache = model.new_cache(1, LENGTH, torch.bfloat16)
    logits = torch.cat([model(token, kv_cache) for token in tokens.split(1, 1)], 1)
    assert {layer.keys.dtype for layer in kv_cache.layers} == {torch.bfloat16}
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, model(tokens), rtol=0.1, atol=0.2)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), slots=st.integers(1, 6))
def test_a_ring_keeps_exactly_the_last_positions(sizes: list[int], slots: int) -> None:
    ring, start = LayerCache(1, 1, slots, 1), 0
    for size in sizes:
        positions = torch.arange(start, start + size)
        values = positions.float().view(1, 1, size, 1)
        keys, returned, where = ring.update(-values, values, positions)
        seen = where >= 0  # what a query may look at: the last positions before, and the new ones
        assert sorted(where[seen].tolist()) == list(range(max(0, start - slots), start + size))
        assert returned.flatten()[seen].tolist() == where[seen].tolist() == (-keys.flatten()[seen]).tolist()
        start += size
        assert sorted(p for p in ring.positions.tolist() if p >= 0) == list(range(max(0, start - slots), start))
    assert ring.keys.shape == ring.values.shape == (1, 1, slots, 1)


def test_only_windowed_layers_have_rings() -> None:
    layers = lively(*VARIANTS["global every other"]).new_cache(2).layers
    assert [layer.keys.shape for layer in layers] == [(2, 2, 5, 8), (2, 2, 32, 8)]


@torch.no_grad()
def test_a_full_cache_refuses_more_tokens_rather_than_forget_the_first() -> None:
    model = lively(*VARIANTS["plain"])
    kv_cache = model.new_cache(1, 8)
    model(torch.zeros(1, 8, dtype=torch.long), kv_cache)
    with pytest.raises(ValueError, match="8"):
        model(torch.zeros(1, 1, dtype=torch.long), kv_cache)
