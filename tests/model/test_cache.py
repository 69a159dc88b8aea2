"""The KV cache: decoding in any chunks and batches equals one forward pass, in the promised bytes."""

from itertools import combinations, pairwise, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llama_lab.model import Decoder, generate, measure_cost
from llama_lab.model.generate import _static_step, eager_step, prefill
from llama_lab.model.state import DecoderState, Lookup, new_layer_cache, quantise
from tests.composing import cover, crossed, kinds, lively, options

LENGTH = 24
VARIANTS = {
    "plain": ["attention=gqa"],
    "window": ["attention=gqa", "model.attention.window=5"],
    "window of 1": ["attention=mqa", "model.attention.window=1"],
    "global every other": ["attention=gqa", "model.attention.window=5", "pattern=global_every_2nd"],
    "chunk": ["attention=gqa", "model.attention.chunk=5"],
    "reference": ["attention=gqa", "model.attention.window=5", "model.attention.kernel=reference"],
    "gemma2": ["attention=gqa_gemma2"],
    "qk norm": ["attention=mha_qk_norm"],
    "gate and values": ["attention=gqa", "model.attention.gate=head", "model.attention.value_residual=learned"],
    "sinks": ["attention=gqa", "model.attention.sinks=true", "model.attention.window=5"],
    "temperature": ["attention=gqa_step_temperature", "model.attention.temperature.step=4"],
    "scalars": [
        "attention=mha_log_temperature",
        "model.attention.window=5",
        "model.attention.scale=0.2",
        "model.attention.clip_qkv=1",
        "model.attention.qk_norm=head",
        "model.attention.qk_gain=heads",
        "model.attention.qk_norm_rotated=true",
        "model.block.residual_scale=0.4",
        "model.embedding.logit_scale=0.5",
    ],
}


def in_chunks(model: Decoder, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of `tokens`, read in chunks of these sizes and a last one of what they leave."""
    sizes = [*sizes, LENGTH - sum(sizes)]
    kv_cache = model.new_state(tokens.shape[0], LENGTH)
    logits = [model(chunk, kv_cache) for chunk in tokens.split(sizes, 1)]
    assert kv_cache.lengths.tolist() == [LENGTH] * tokens.shape[0]
    return torch.cat(logits, 1)


@st.composite
def chunk_sizes(draw: st.DrawFn) -> list[int]:
    ends = sorted(draw(st.sets(st.integers(1, LENGTH - 1), max_size=6)))
    return [end - start for start, end in pairwise([0, *ends])]


@pytest.mark.parametrize(("position", "variant"), crossed(kinds("position"), [*VARIANTS], meeting=1))
@given(sizes=chunk_sizes())
@settings(deadline=None, max_examples=3)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(position: str, variant: str, sizes: list[int]) -> None:
    model = lively(f"position={position}", *VARIANTS[variant])
    tokens = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(sum(sizes)))
    torch.testing.assert_close(in_chunks(model, tokens, sizes), model(tokens), rtol=1e-4, atol=1e-4)


WINDOWS = {
    "none": ["model.attention.window=null"],
    "1": ["model.attention.window=1"],
    "5": ["model.attention.window=5"],
    "5 on every other layer": ["model.attention.window=5", "pattern=global_every_2nd"],
}
FACTORS = [
    ["none", "learned", "sinusoidal", "rope", "rope_quarter", "rope_yarn", "alibi", "relative"],  # positions
    ["mha", "gqa", "mqa", "mha_bias", "gqa_gemma2"],  # attentions
    [*WINDOWS],
    options("block"),
    ["layernorm", "rmsnorm", "rmsnorm_offset", "none"],  # norms
]
COVER = cover(*FACTORS)


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5, in units of the largest logit where that exceeds one: without norms they reach hundreds."""
    assert (actual - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def unequal_batch(model: Decoder, tokens: Tensor, static: bool) -> tuple[list[int], Tensor]:
    """Lengths of three prompts, and the logits `(3, n, V)` after these and after each of the tokens that follow."""
    lengths = [3, 9, 14]
    kv_cache = model.new_state(3, LENGTH)
    logits = [prefill(model, [row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)], kv_cache)]
    step = static_step(model, kv_cache) if static else eager_step(model, kv_cache)
    for i in range(LENGTH - max(lengths)):
        logits.append(step(torch.stack([row[n + i] for row, n in zip(tokens, lengths, strict=True)])[:, None]))
    return lengths, torch.stack(logits, 1)


def static_step(model: Decoder, kv_cache: DecoderState):
    """What is compiled, without compiling it."""
    positions = kv_cache.lengths[:, None].clone()

    def step(tokens: Tensor) -> Tensor:
        logits = _static_step(model, tokens, positions, kv_cache)
        positions.add_(1)
        return logits

    return step


@pytest.mark.parametrize("choice", COVER, ids="-".join)
@torch.no_grad()
def test_every_pair_of_parts_decodes_as_the_full_forward(choice: tuple[str, ...]) -> None:
    position, attention, window, block, norm = choice
    groups = [f"position={position}", f"attention={attention}", f"block={block}", f"norm={norm}"]
    model, tokens = (
        lively(*groups, *WINDOWS[window]),
        torch.randint(97, (3, LENGTH), generator=torch.Generator().manual_seed(0)),
    )
    expected = model(tokens)
    for sizes in ([1] * (LENGTH - 1), [7, 1, 6, 1, 1]):
        assert_same_logits(in_chunks(model, tokens, sizes), expected)
    for static in (False, True):
        lengths, logits = unequal_batch(model, tokens, static)
        for row, n in enumerate(lengths):
            assert_same_logits(logits[row], expected[row, n - 1 : n - 1 + logits.shape[1]])


def test_every_two_parts_meet_in_what_covers_them() -> None:
    for one, other in combinations(range(len(FACTORS)), 2):
        assert {(row[one], row[other]) for row in COVER} == {*product(FACTORS[one], FACTORS[other])}


@torch.no_grad()
def test_unequal_sequences_may_be_read_in_chunks_together() -> None:
    for overrides in (VARIANTS["global every other"], [*VARIANTS["window"], "position=relative"]):
        model, tokens = lively(*overrides), torch.arange(2 * LENGTH).view(2, LENGTH)
        kv_cache = model.new_state(2, LENGTH)
        prefill(model, [tokens[0, :2].tolist(), tokens[1, :8].tolist()], kv_cache)
        chunk = torch.stack((tokens[0, 2:9], tokens[1, 8:15]))
        logits, expected = model(chunk, kv_cache), model(tokens)
        assert_same_logits(logits[0], expected[0, 2:9])
        assert_same_logits(logits[1], expected[1, 8:15])


@pytest.mark.parametrize("arch", options("arch"))
@torch.no_grad()
def test_every_recipe_decodes_with_a_cache(arch: str) -> None:
    model, tokens = lively(f"arch={arch}"), torch.arange(2 * LENGTH).view(2, LENGTH)
    torch.testing.assert_close(in_chunks(model, tokens, [7, 11]), model(tokens), rtol=1e-4, atol=1e-4)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", [*VARIANTS, "mha", "mqa"])
def test_a_cache_takes_the_bytes_that_its_cost_says(variant: str, dtype: torch.dtype) -> None:
    model = lively(*VARIANTS.get(variant, [f"attention={variant}"]))
    for length in (3, LENGTH):
        cost = measure_cost(model, length, dtype)
        for batch_size in (1, 4):
            kv_cache = model.new_state(batch_size, length, dtype)
            tensors = [tensor for layer in kv_cache.layers for tensor in layer.tensors]
            summed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            assert summed == kv_cache.nbytes == batch_size * cost.kv_bytes
    growth = model.new_state(1, 4, dtype).nbytes - model.new_state(1, 3, dtype).nbytes
    assert growth == measure_cost(model, 4, dtype).kv_bytes_per_token or variant == "window of 1"


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_a_cache_holds_the_kv_heads_alone(n_kv_heads: int) -> None:
    layers = lively("attention=gqa", f"model.n_kv_heads={n_kv_heads}").new_state(3, 10).layers
    assert {tensor.shape for layer in layers for tensor in layer.tensors} == {(3, n_kv_heads, 10, 8)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_a_cache_may_have_another_dtype_than_the_model(dtype: torch.dtype) -> None:
    for variant in ("plain", "window", "gemma2"):
        model, tokens = lively(*VARIANTS[variant]), torch.arange(LENGTH)[None]
        kv_cache = model.new_state(1, LENGTH, dtype)
        logits = torch.cat([model(chunk, kv_cache) for chunk in tokens.split([7, 1, 8, 1, 1, 6], 1)], 1)
        assert {layer.tensors[0].dtype for layer in kv_cache.layers} == {dtype}
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, model(tokens), rtol=0.1, atol=0.2)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn])
def test_a_dtype_that_cannot_hold_keys_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"^dtype={dtype}: cannot hold keys and values; choose a float"):
        lively(*VARIANTS["plain"]).new_state(1, dtype=dtype)


@torch.no_grad()
def test_rounding_the_cache_to_int8_costs_little_loss() -> None:
    model = lively("attention=gqa", "model.attention.window=null")
    tokens = torch.tensor(list(generate(model, [[i] for i in range(16)], LENGTH))).T.contiguous()  # its own text
    exact = F.log_softmax(model(tokens), -1)
    worse: dict[torch.dtype, float] = {}  # nats per token by which the loss rises, in expectation over the next token
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        kv_cache = model.new_state(len(tokens), LENGTH, dtype)
        logits = torch.cat([model(token, kv_cache) for token in tokens.split(1, 1)], 1)
        divergences = F.kl_div(F.log_softmax(logits, -1), exact, reduction="none", log_target=True).sum(-1)
        worse[dtype] = divergences.double().mean().item()
        losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item() for x in (logits, exact)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert abs(worse[torch.float32]) < 1e-7 < worse[torch.bfloat16] < worse[torch.int8] < 5e-6


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
    layers = lively(*VARIANTS["global every other"]).new_state(2).layers
    assert [layer.tensors[0].shape for layer in layers] == [(2, 2, 5, 8), (2, 2, 32, 8)]


@torch.no_grad()
def test_keys_are_kept_as_they_were_turned() -> None:
    model, tokens = lively("attention=gqa", "position=rope"), torch.arange(8)[None]
    kv_cache = model.new_state(1, 8)
    model(tokens, kv_cache)
    block = model.blocks[0]
    _, key, value = block.attention._heads(block.attention_norm(model.embedding(tokens)))
    keys, values = kv_cache.layers[0].tensors
    torch.testing.assert_close(keys, model.position.rotation(torch.arange(8))(key))
    torch.testing.assert_close(values, value)


@pytest.mark.parametrize("variant", ["plain", "window", "global every other", "gemma2"])
@torch.no_grad()
def test_decoding_leaves_the_cache_where_it_is_and_reads_no_copy_of_it(variant: str) -> None:
    model = lively(*VARIANTS[variant])
    kv_cache = model.new_state(2, LENGTH)
    cache_positions = [tensor.data_ptr() for layer in kv_cache.layers for tensor in layer.tensors]
    for token in torch.arange(2 * LENGTH).view(2, LENGTH).split(1, 1):
        model(token, kv_cache)
    assert [tensor.data_ptr() for layer in kv_cache.layers for tensor in layer.tensors] == cache_positions
    layer = kv_cache.layers[0]
    lookup = Lookup(torch.tensor([[LENGTH]]), layer.slots, LENGTH)
    new = torch.zeros(2, 2, 1, 8)
    assert [seen.data_ptr() for seen in layer.update(new, new, lookup)] == cache_positions[:2]


@torch.no_grad()
def test_a_full_cache_refuses_more_tokens_rather_than_forget_the_first() -> None:
    for overrides in (VARIANTS["plain"], VARIANTS["global every other"], ["attention=gqa", "model.attention.window=9"]):
        model = lively(*overrides)
        kv_cache = model.new_state(2, 8)
        prefill(model, [[0] * 8, [0]], kv_cache)
        with pytest.raises(ValueError, match=r"^context=8: the cache is for so many tokens, not for 9$"):
            model(torch.zeros(2, 1, dtype=torch.long), kv_cache)
        assert kv_cache.lengths.tolist() == [8, 1]


@torch.no_grad()
def test_a_cache_of_windows_alone_slides_without_end() -> None:
    model, tokens = lively("attention=gqa", "model.attention.window=5"), torch.arange(70)[None]
    kv_cache = model.new_state(1, 8)
    assert {layer.slots for layer in kv_cache.layers} == {5}
    logits = torch.cat([model(chunk, kv_cache) for chunk in tokens.split([8, 1, 20, *[1] * 41], 1)], 1)
    assert_same_logits(logits, model(tokens))


@torch.no_grad()
def test_learned_positions_end_though_windows_slide() -> None:
    model = lively("attention=gqa", "model.attention.window=5", "position=learned")
    kv_cache = model.new_state(1)
    model(torch.zeros(1, 32, dtype=torch.long), kv_cache)
    with pytest.raises(ValueError, match=r"^max_seq_len=32: learned positions end at 32, not at 33 tokens$"):
        model(torch.zeros(1, 1, dtype=torch.long), kv_cache)
