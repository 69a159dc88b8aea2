"""Position encodings: what each promises, against independent implementations and closed forms."""

import math
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from llama_lab.model.encoding import Position
from llama_lab.model.position import (
    Alibi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    Relative,
    Rope,
    Sinusoidal,
    YarnScaling,
)
from llama_lab.model.tower import call
from tests.composing import compose_config, decoder, kinds
from tests.model.cases import switched

CPU = torch.device("cpu")
HEAD_DIM = 16
ROPES = [option for option in kinds("position") if option.startswith("rope")]


@cache
def rope(option: str, fraction: float, interleaved: bool) -> Rope:
    factory = instantiate(switched("llama", "position", option).model.position)
    rotary: Rope = call(partial(factory, fraction=fraction, interleaved=interleaved), head_dim=HEAD_DIM, n_heads=2)
    return rotary


def turn(encoding: Position, x: Tensor, position: int) -> Tensor:
    """`x (Dh,)` turned as at `position`."""
    return encoding.rotation(torch.tensor([position]))(x[None, None, None])[0, 0, 0]


@given(
    option=st.sampled_from(ROPES), fraction=st.sampled_from([0.25, 0.5, 1.0]), interleaved=st.booleans(), data=st.data()
)
@settings(deadline=None, max_examples=60)
def test_rope_scores_depend_only_on_distance_and_norms_are_kept(
    option: str, fraction: float, interleaved: bool, data: st.DataObject
) -> None:
    encoding = rope(option, fraction, interleaved)
    distance, here, there = (data.draw(st.integers(0, 4096)) for _ in range(3))
    query, key = torch.randn(2, HEAD_DIM, generator=torch.Generator().manual_seed(distance))
    scores = [turn(encoding, query, start + distance) @ turn(encoding, key, start) for start in (here, there)]
    torch.testing.assert_close(*scores, rtol=0, atol=0.02)  # float32 angles are good to 5e-4
    turned, rotary = turn(encoding, query, here), int(fraction * HEAD_DIM)
    gain = {"rope_yarn": 0.1 * math.log(2) + 1, "rope_long": math.sqrt(1 + math.log(2) / math.log(16))}.get(option, 1.0)
    torch.testing.assert_close(turned[:rotary].norm(), gain * query[:rotary].norm())
    assert torch.equal(turned[rotary:], query[rotary:])


def test_rope_pairs_neighbours_or_halves() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 0.0])
    pairs = {True: 1, False: 2}
    for interleaved, partner in pairs.items():
        y = turn(Rope(4, interleaved=interleaved), x, 3)
        expected = torch.zeros(4).index_put((torch.tensor([0, partner]),), torch.tensor([math.cos(3), math.sin(3)]))
        torch.testing.assert_close(y, expected)


def test_a_fraction_that_is_rounded_turns_the_dimensions_it_means() -> None:
    factory = instantiate(compose_config("position=rope").model.position)
    assert factory(head_dim=96, fraction=0.333333).rotary_dim == 32
    assert factory(head_dim=16, fraction=0.4).rotary_dim == 6


@pytest.mark.parametrize("option", ["rope", "rope_yarn"])
def test_rope_keeps_its_precision_in_a_bfloat16_model(option: str) -> None:
    for fraction, interleaved in ((0.25, False), (0.5, True), (1.0, False)):
        model = decoder(f"position={option}", f"model.head_dim={HEAD_DIM}")
        model.position = deepcopy(rope(option, fraction, interleaved))
        exact = model.position.rotation(torch.arange(5000))
        cast = model.bfloat16().position.rotation(torch.arange(5000))
        assert torch.equal(exact.cos, cast.cos)
        assert torch.equal(exact.sin, cast.sin)
        query = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
        for position in (1, 257, 2049):  # rounded once, at the end, to what attention multiplies
            once = turn(model.position, query.float(), position).bfloat16()
            assert torch.equal(turn(model.position, query, position), once)


@pytest.mark.parametrize("option", ["sinusoidal", "sinusoidal_concatenated", "learned", "alibi"])
def test_positions_past_256_stay_distinct_after_bfloat16(option: str) -> None:
    encoding = decoder(f"position={option}", "model.max_seq_len=2100").bfloat16().position
    positions = torch.tensor([256, 257, 2048, 2049])
    if option == "alibi":
        bias = encoding.bias(torch.tensor([2049]), positions)
        assert bias.dtype == torch.float32
        assert all(len(set(head)) == 4 for head in bias[:, 0].tolist())
        return
    rows = encoding.embed(torch.zeros(1, 4, 32, dtype=torch.bfloat16), positions)[0].float()
    rows = rows / rows.abs().max()
    assert (torch.cdist(rows, rows) + torch.eye(4)).min() > 0.2


LONG = LongRopeScaling(4.0, 4096, 4096, short_factors=3.0, long_factors=7.0)
HF_ROPE = [  # ours, and the settings of theirs
    (LinearScaling(4.0), "linear", {}),
    (YarnScaling(4.0, 512), "yarn", {}),
    (YarnScaling(32.0, 4096, truncate=False), "yarn", {"truncate": False}),
    (YarnScaling(8.0, 4096, mscale=0.7, mscale_all_dim=1.3), "yarn", {"mscale": 0.7, "mscale_all_dim": 1.3}),
    (LONG, "longrope", {"short_factor": [3.0], "long_factor": [7.0]}),
    (Llama3Scaling(32.0, 256, 1.5, 3.0), "llama3", {"low_freq_factor": 1.5, "high_freq_factor": 3.0}),
]


@pytest.mark.parametrize(("scaling", "kind", "numbers"), HF_ROPE, ids=str)
def test_rope_scaling_equals_transformers(scaling: Any, kind: str, numbers: dict[str, float]) -> None:
    for head_dim, theta in ((16, 500000.0), (64, 10000.0), (128, 500000.0)):
        parameters = {"rope_type": kind, "rope_theta": theta, "factor": scaling.factor, **numbers}
        if kind != "linear":
            parameters["original_max_position_embeddings"] = scaling.original_max_seq_len
        sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
        config = LlamaConfig(**sizes, max_position_embeddings=131072, rope_parameters=parameters)
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
        torch.testing.assert_close(scaling(head_dim, theta, CPU), frequencies)
        assert scaling.attention_factor == pytest.approx(attention_factor)


def test_ntk_scaling_equals_transformers_dynamic_scaling_at_that_length() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "max_position_embeddings": 1000}
    config = LlamaConfig(**sizes, rope_parameters=dynamic)
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=8000)
    torch.testing.assert_close(NTKScaling(8.0)(64, 10000.0, CPU), frequencies)


def test_alibi_slopes_equal_blooms() -> None:
    for n_heads in (*range(1, 18), 71):
        bias = Alibi(n_heads).bias(torch.tensor([1]), torch.arange(2))[:, 0]
        expected = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), n_heads, torch.float32)[:, 0]
        torch.testing.assert_close(bias - bias[:, :1], expected)
    far = Alibi(8).bias(torch.tensor([2049]), torch.arange(2050))[:, 0]  # they fall linearly with distance
    assert far[:, -1].tolist() == [0.0] * 8
    assert far[:, 0].tolist() == [-2049 * 2.0 ** -(head + 1) for head in range(8)]
    assert torch.equal(Alibi(8).bias(torch.tensor([3]), torch.arange(7)), far[:, [-4, -3, -2, -1, -2, -3, -4]][:, None])


def test_alibi_slopes_equal_mpts_at_its_exponent() -> None:
    for n_heads, max_exponent in ((1, 8), (6, 3), (8, 16), (71, 8)):
        bias = Alibi(n_heads, max_exponent, slope_scale=0.5).bias(torch.tensor([4]), torch.arange(5))
        torch.testing.assert_close(bias, 0.5 * build_mpt_alibi_tensor(n_heads, 5, max_exponent))


def test_rope_alibi_is_both_at_once() -> None:
    """The scores of a layer are RoPE's plus ALiBi's, and both numbers of heads and their dimensions reach it."""
    both = decoder("position=rope_alibi", "model.position.fraction=0.5", "model.position.slope_scale=3").position
    rope = decoder("position=rope", "model.position.fraction=0.5").position
    alibi = decoder("position=alibi", "model.position.slope_scale=3").position
    positions = torch.arange(9)
    assert all(map(torch.equal, both.rotation(positions)[:2], rope.rotation(positions)[:2]))
    assert torch.equal(both.bias(positions, positions), alibi.bias(positions, positions))


def test_longrope_chooses_its_factors_by_the_models_context() -> None:
    plain = Rope(8).rotation(torch.arange(5))
    for context, factor in ((16, 2.0), (17, 5.0)):
        scaling = LongRopeScaling(1.0, 16, context, [2.0] * 4, [5.0] * 4)
        chosen = Rope(8, scaling=scaling).rotation(torch.arange(5))
        torch.testing.assert_close(chosen.cos, Rope(8, scaling=LinearScaling(factor)).rotation(torch.arange(5)).cos)
        assert not torch.equal(chosen.cos, plain.cos)


def test_relative_buckets_equal_t5s() -> None:
    distance = torch.arange(4001)
    for n_buckets, max_distance in ((32, 128), (32, 1000), (8, 20), (64, 2048)):
        expected = T5Attention._relative_position_bucket(-distance, False, n_buckets, max_distance)
        assert torch.equal(Relative(2, n_buckets, max_distance).buckets(distance), expected)
        both = torch.arange(-4000, 4001)
        expected = T5Attention._relative_position_bucket(-both, True, n_buckets, max_distance)
        assert torch.equal(Relative(2, n_buckets, max_distance, causal=False).buckets(both), expected)
    with pytest.raises(ValueError, match=r"^position.n_buckets=3: must be at least 4"):
        Relative(2, 3, causal=False)


def test_relative_biases_come_from_the_heads_own_column() -> None:
    encoding = Relative(2)
    encoding.table.weight.data.copy_(torch.arange(64.0).view(32, 2))
    bias = encoding.bias(torch.tensor([5, 6]), torch.tensor([4, 5]))
    assert bias.tolist() == [[[2.0, 0.0], [4.0, 2.0]], [[3.0, 1.0], [5.0, 3.0]]]


@pytest.mark.parametrize(("interleaved", "offset"), [(True, 0), (False, 0), (True, 2)])
def test_sinusoidal_positions_equal_the_closed_form(interleaved: bool, offset: int) -> None:
    dim, theta, amplitude, positions = 12, 5000.0, 0.7, torch.tensor([0, 1, 257, 2049])
    encoding = Sinusoidal(dim, theta, interleaved, amplitude, offset=offset)
    embedded = encoding.embed(torch.ones(3, 4, dim), positions)
    for row, position in enumerate((positions + offset).tolist()):
        angles = [position / theta ** (2 * k / dim) for k in range(dim // 2)]
        sines, cosines = [math.sin(a) for a in angles], [math.cos(a) for a in angles]
        waves = [w for pair in zip(sines, cosines, strict=True) for w in pair] if interleaved else sines + cosines
        expected = 1 + amplitude * torch.tensor(waves, dtype=torch.float64)
        for batch in range(3):
            torch.testing.assert_close(embedded[batch, row].double(), expected, rtol=0, atol=5e-4)


def test_learned_positions_add_their_own_row_and_end() -> None:
    model = decoder("position=learned")
    assert isinstance(model.position, Learned)
    x = torch.randn(2, 3, 32)
    rows = model.position.table.weight[[4, 5, 6]]
    assert torch.equal(model.position.embed(x, torch.arange(4, 7)), x + rows)
    with pytest.raises(ValueError, match=r"^max_seq_len=32: learned positions end at 32, not at 33 tokens$"):
        model(torch.zeros(1, 33, dtype=torch.long))
