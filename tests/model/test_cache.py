"""The KV cache: decoding in any chunks and batches equals one forward pass, in the promised bytes."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama_lab.model import Decoder, measure_cost
from llama_lab.model.generate import _static_step, eager_step, prefill
from llama_lab.model.state import Lookup, new_layer_cache, quantise
from tests.composing import DECODERS, cover, kinds, lively, options
from tests.model.cases import LENGTH, ON_NONE, PATTERNS, RECURRENT, VARIANTS, WINDOW, in_pieces

WINDOWS: dict[str, tuple[str, ...]] = {
    "none": ("model.attention.window=null",),
    "1": ("model.attention.window=1",),
    "5": ("model.attention.window=5",),
    "5 on every other layer": ("model.attention.window=5", "pattern=global_every_2nd"),
}
FACTORS = [
    ["none", "learned", "sinusoidal", "rope", "rope_quarter", "rope_yarn", "alibi", "relative"],  # positions
    ["mha", "gqa", "mqa", "mha_bias", "gqa_gemma2"],  # attentions
    [*WINDOWS],
    options("block"),
    ["layernorm", "rmsnorm", "rmsnorm_offset", "none"],  # norms
]
LATENT = (
    *("attention=mla_step_temperature", "model.attention.temperature.step=4", "model.attention.value_dim=20"),
    *("model.attention.kv_rank=12", "model.attention.scale=0.5"),
)
SHAW = ("position=shaw", "model.position.clip=5", "attention=gqa")
QUICK: list[tuple[str, ...]] = [
    *((*VARIANTS[variant], f"position={one}") for one, variant in cover(kinds("position"), [*VARIANTS], meeting=1)),
    *(PATTERNS[pattern] for pattern in ("nope global", "biases by layer", "explicit")),
    *(ON_NONE[case] for case in ("linear", "gated delta", "mamba2", "conv", "hybrid")),
    LATENT,
    (*SHAW, "model.attention.window=6"),
]
EVERY: list[tuple[str, ...]] = [
    *((f"arch={arch}",) for arch in DECODERS),
    *PATTERNS.values(),
    *ON_NONE.values(),
    (*RECURRENT["retnet"], "position=rope"),
    *((*LATENT, f"position={position}") for position in kinds("position") if position != "shaw"),
    (*LATENT, "model.attention.kernel=reference"),
    *((*SHAW, f"model.attention.{switch}") for switch in ("sinks=true", "chunk=6", "softcap=2.0", "qk_norm=head")),
    *(
        (f"position={row[0]}", f"attention={row[1]}", *WINDOWS[row[2]], f"block={row[3]}", f"norm={row[4]}")
        for row in cover(*FACTORS)
    ),
]
OTHERS = [pytest.param(overrides, marks=pytest.mark.matrix) for overrides in EVERY if overrides not in QUICK]


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5, in units of the largest logit where that exceeds one: without norms they reach hundreds."""
    assert (actual - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def unequal_batch(model: Decoder, tokens: Tensor, lengths: list[int], static: bool) -> Tensor:
    """Logits `(B, n, V)` after the first tokens of each row, and after each of the tokens that follow."""
    state = model.new_state(len(tokens), LENGTH)
    logits = [prefill(model, [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)], state)]
    step, positions = eager_step(model, state), state.lengths[:, None].clone()
    for i in range(LENGTH - max(lengths)):
        column = torch.stack([row[n + i] for row, n in zip(tokens, lengths, strict=True)])[:, None]
        # what is compiled, without compiling it
        logits.append(_static_step(model, column, positions + i, state) if static else step(column))
    return torch.stack(logits, 1)


@pytest.mark.parametrize("overrides", [*QUICK, *OTHERS], ids=" ".join)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(overrides: tuple[str, ...]) -> None:
    model, draw, lengths = lively(*overrides), random.Random(str(overrides)), [3, 9, 14]
    tokens = torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)
    for sizes in ([7, 1, 6], [draw.randint(1, 6) for _ in range(4)]):
        assert_same_logits(in_pieces(model, tokens, sizes), expected)
    for static in (False, True):
        logits = unequal_batch(model, tokens, lengths, static)
        for row, n in enumerate(lengths):
            assert_same_logits(logits[row], expected[row, n - 1 : n - 1 + logits.shape[1]])


@torch.no_grad()
def test_unequal_sequences_may_be_read_in_chunks_together() -> None:
    for overrides in (VARIANTS["global every other"], (*WINDOW, "position=relative")):
        model, tokens = lively(*overrides), torch.arange(2 * LENGTH).view(2, LENGTH)
        state = model.new_state(2, LENGTH)
        prefill(model, [tokens[0, :2].tolist(), tokens[1, :8].tolist()], state)
        logits, expected = model(torch.stack((tokens[0, 2:9], tokens[1, 8:15])), state), model(tokens)
        assert_same_logits(logits[0], expected[0, 2:9])
        assert_same_logits(logits[1], expected[1, 8:15])


@pytest.mark.parametrize(
    "overrides", [VARIANTS["window"], VARIANTS["convolutions"], PATTERNS["explicit"], ("attention=mha",)], ids=" ".join
)
@torch.no_grad()
def test_a_cache_takes_the_bytes_that_its_cost_says_in_any_dtype(overrides: tuple[str, ...]) -> None:
    model, tokens = lively(*overrides), torch.arange(LENGTH)[None]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for length, batch_size in product((3, LENGTH), (1, 4)):
            state = model.new_state(batch_size, length, dtype)
            tensors = [tensor for layer in state.layers for tensor in layer.tensors]
            assert {layer.tensors[0].dtype for layer in state.layers} == {dtype}
            summed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            assert summed == state.nbytes == batch_size * measure_cost(model, length, dtype).kv_bytes
        growth = model.new_state(1, 4, dtype).nbytes - model.new_state(1, 3, dtype).nbytes
        assert growth == measure_cost(model, 4, dtype).kv_bytes_per_token
        logits = in_pieces(model, tokens, [7, 1, 8], dtype)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, model(tokens), rtol=0.1, atol=0.2)


def test_a_dtype_that_cannot_hold_keys_is_refused() -> None:
    for dtype in (torch.int16, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"^dtype={dtype}: "):
            lively(*VARIANTS["plain"]).new_state(1, dtype=dtype)


@given(scale=st.floats(1e-30, 1e30), seed=st.integers(0, 9))
def test_int8_is_good_to_half_a_step_of_each_heads_largest_number(scale: float, seed: int) -> None:
    x = scale * torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 0] = 0
    rounded, scales = quantise(x)
    assert (rounded.dtype, scales.shape) == (torch.int8, (2, 3, 4, 1))
    assert ((rounded * scales - x).abs() <= 0.5001 * scales).all()
    torch.testing.assert_close(scales, x.abs().amax(-1, keepdim=True) / 127)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), slots=st.integers(1, 6))
def test_a_ring_shows_the_last_positions_and_the_new_ones(sizes: list[int], slots: int) -> None:
    ring, start = new_layer_cache(1, 1, slots, 1, torch.float32), 0
    for size in sizes:
        positions = torch.arange(start, start + size)[None]
        values = positions.float().view(1, 1, size, 1)
        lookup = Lookup(positions, slots, start)
        keys, returned = ring.update(-values, values, lookup)
        where = lookup.key_positions[0]
        seen = where >= 0
        assert sorted(where[seen].tolist()) == sorted(set(where[seen].tolist()))
        assert set(where[seen].tolist()) >= set(range(max(0, start + 1 - slots), start + size))
        assert returned.flatten()[seen].tolist() == where[seen].tolist() == (-keys.flatten()[seen]).tolist()
        start += size
        kept = sorted(ring.tensors[1].flatten()[: min(start, slots)].tolist())
        assert kept == list(range(max(0, start - slots), start))
    assert [tensor.shape for tensor in ring.tensors] == [(1, 1, slots, 1)] * 2


def test_only_windowed_layers_have_rings() -> None:
    """And all hold the heads of keys and values alone."""
    layers = lively(*VARIANTS["global every other"], "model.n_kv_heads=1").new_state(2).layers
    assert [layer.tensors[0].shape for layer in layers] == [(2, 1, 5, 8), (2, 1, 32, 8)]


@torch.no_grad()
def test_a_full_cache_refuses_more_tokens_rather_than_forget_the_first() -> None:
    for overrides in (VARIANTS["plain"], VARIANTS["global every other"], ("attention=gqa", "model.attention.window=9")):
        model = lively(*overrides)
        state = model.new_state(2, 8)
        prefill(model, [[0] * 8, [0]], state)
        with pytest.raises(ValueError, match=r"^context=8: the cache is for so many tokens, not for 9$"):
            model(torch.zeros(2, 1, dtype=torch.long), state)
        assert state.lengths.tolist() == [8, 1]


@torch.no_grad()
def test_a_cache_of_windows_alone_slides_without_end() -> None:
    model, tokens = lively(*WINDOW), torch.arange(70)[None]
    state = model.new_state(1, 8)
    assert {layer.slots for layer in state.layers} == {5}
    logits = torch.cat([model(chunk, state) for chunk in tokens.split([8, 1, 20, *[1] * 41], 1)], 1)
    assert_same_logits(logits, model(tokens))
