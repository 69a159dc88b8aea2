"""The parts that are compared compute what they are said to, and what is counted is what happens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import recurrence
from benchmarks.decoders import STATES, TINY, generate_cached, generate_uncached, kv_computations, measure_decoding
from benchmarks.layers import (
    cases,
    feedforward,
    kernels,
    layer_norm,
    measure_peaks,
    options,
    rms_norm,
)
from benchmarks.rows import measurement, rows_of
from llama_lab.devices.performance import CLEAR
from llama_lab.model.norm import LayerNorm, RMSNorm
from tests.composing import lively
from tests.composing import options as all_options

CPU = torch.device("cpu")


def test_norms_written_out_are_pytorch_s() -> None:
    x = 3 + 5 * torch.randn(7, 48)
    norms = LayerNorm(48, bias=True), LayerNorm(48, bias=False), RMSNorm(48)
    for parameter in (p for norm in norms for p in norm.parameters()):
        nn.init.normal_(parameter)
    for norm in norms[:2]:
        torch.testing.assert_close(layer_norm(norm, x), F.layer_norm(x, (48,), norm.weight, norm.bias, norm.eps))
    rms = norms[2]
    torch.testing.assert_close(rms_norm(rms, x), F.rms_norm(x, (48,), rms.weight, rms.eps))


def test_fused_and_written_out_attention_compute_the_same_forward_and_backward() -> None:
    heads = [torch.randn(2, 3, 17, 8, requires_grad=True) for _ in range(3)]
    mask = torch.full((17, 17), float("-inf")).triu(1)
    fused, written = (kernels(heads, mask)[name]() for name in ("fused", "written out"))
    torch.testing.assert_close(fused, written)
    gradient = torch.randn_like(fused)
    for ours, theirs in zip(*(torch.autograd.grad(y, heads, gradient) for y in (fused, written)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("decay", recurrence.CHUNKS)
def test_the_recurrences_that_are_timed_are_the_same(decay: str) -> None:
    shape = (2, 3, 37, 4)
    torch.testing.assert_close(
        *(work(decay, shape, CPU)() for work in (recurrence.ours, recurrence.theirs)), rtol=1e-4, atol=1e-5
    )


SMALL_SHAPES = [(1, 4, 256, 16), (1, 4, 512, 16)]


@pytest.mark.process
@pytest.mark.skipif(not CLEAR.exists(), reason="the peak of a process can be reset on Linux alone")
def test_written_out_attention_takes_at_least_the_bytes_of_its_scores_and_fused_less() -> None:
    peaks = measure_peaks(SMALL_SHAPES, CPU)
    assert set(peaks) == {
        (size, direction, what) for size, direction, found in cases(SMALL_SHAPES, CPU) for what in found
    }
    for _, n_heads, length, _ in SMALL_SHAPES:
        for direction in ("forward", "both"):
            scores = n_heads * length * length * 4
            assert scores <= peaks[str(length), direction, "written out"] < 8 * scores
            assert peaks[str(length), direction, "fused"] < peaks[str(length), direction, "written out"] / 2


@pytest.mark.slow
def test_all_feedforwards_are_compared_and_have_equal_matrices() -> None:
    assert options()[0] == "relu"
    assert sorted(options()) == all_options("ffn")
    for option in (option for option in options() if not option.startswith("moe")):
        layer = feedforward(option, 24)
        assert sum(p.numel() for p in layer.parameters() if p.ndim == 2) == 2 * 24 * 96, option


def test_a_cache_saves_all_but_one_key_per_token_and_changes_no_token() -> None:
    model, n = lively("arch=llama3"), 20
    assert kv_computations(model, lambda: model(torch.zeros(2, 7, dtype=torch.long))) == 14
    assert kv_computations(model, lambda: None) == 0
    texts: list[list[int]] = []
    cached = kv_computations(model, lambda: texts.append(generate_cached(model, [5], n)))
    uncached = kv_computations(model, lambda: texts.append(generate_uncached(model, [5], n)))
    assert (cached, uncached) == (n, n * (n + 1) // 2)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_decoding_tells_the_speed_over_all_sequences_and_the_cache_of_each_variant() -> None:
    (rows,) = measure_decoding(1, CPU, TINY, batch_sizes=[3], contexts=[16])
    mha, gqa, mqa = rows.itertuples()
    for m in (mha, gqa, mqa):
        assert m.tokens_per_s == pytest.approx(3000 / m.median_ms)
        assert m.ratio == pytest.approx(mha.median_ms / m.median_ms)
    per_head = 2 * 2 * 3 * 16 * 8 * 4  # keys and values, layers, sequences, tokens, head_dim, bytes
    assert [m.kv_cache_bytes for m in (mha, gqa, mqa)] == [4 * per_head, 2 * per_head, per_head]


@pytest.mark.slow
def test_recurrent_arms_and_a_hybrid_are_decoded_beside_attention_and_only_its_state_grows() -> None:
    tables = measure_decoding(1, CPU, TINY, batch_sizes=[2], contexts=[16, 64], models=STATES)
    short, long = (rows.set_index("what").kv_cache_bytes for rows in tables)
    assert list(long.index) == list(STATES)
    growth = dict(long - short)
    assert growth["MHA"] == 2 * growth["GQA"] == 2 * 48 * 2 * 2 * 32 * 4
    assert 2 * growth["gated delta, GQA every 4th"] == growth["GQA"], "of two layers, the last has attention"
    assert {growth[name] for name in ("linear", "mamba2", "gated delta", "kimi delta")} == {0}


@pytest.mark.parametrize("parts", [1, 4])
def test_a_row_has_median_range_and_ratio_to_the_first_of_a_part_of_a_call(parts: int) -> None:
    seconds = {"slow": [8.0 * parts], "fast": [6.0 * parts, 2.0 * parts, 4.0 * parts, 18.0 * parts]}
    rows = rows_of("1", "decode", {what: measurement(found) for what, found in seconds.items()}, parts=parts)
    first, second = rows.itertuples()
    assert (first.what, first.median_ms, first.ratio) == ("slow", 8000.0, 1.0)
    assert (second.median_ms, second.low_ms, second.high_ms) == (5000.0, 2000.0, 18000.0)
    assert second.ratio == 1.6
