"""The KV cache's bytes by formula are those of its tensors, and the loss through it is that of decoding with it."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from llama_lab.data.windows import ValWindows
from llama_lab.evaluation.cache_memory import cache_dtypes, cache_losses, cache_sizes
from tests.composing import decoder, lively, options, softmaxes
from tests.evaluation.test_lengths import NEXT_TOKENS, paid_by_hand, stream
from tests.selection import first

MODELS = {
    "global every other": ["attention=gqa", "model.attention.window=5", "pattern=global_every_2nd"],
    "learned positions": ["position=learned"],
    "plain": ["attention=gqa"],
    "window": ["attention=gqa", "model.attention.window=5"],
    "window of 1": ["attention=mqa", "model.attention.window=1"],
}


@pytest.mark.parametrize("name", first(2, MODELS))
@torch.no_grad()
def test_the_loss_through_a_cache_is_that_of_decoding_token_by_token(name: str) -> None:
    model, tokens = lively(*MODELS[name]), stream(113)  # three windows of 32, and half of one
    found = {
        cost.dtype: cost.loss for cost in cache_losses(model, [ValWindows(tokens, model.max_seq_len)], 64, NEXT_TOKENS)
    }
    assert list(found) == ["bfloat16", "float32", "int8"]
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        paid = sum(map(sum, paid_by_hand(model, tokens, model.max_seq_len, dtype, chunk=1))) / 112
        assert found[str(dtype).removeprefix("torch.")] == pytest.approx(paid, abs=1e-6)
    assert len({round(loss or 0, 5) for loss in found.values()}) == 3, "rounding costs too little for this to be a test"


CHOICES = [
    "attention=mla",
    "attention=mamba2 position=none",
    *(" ".join(overrides) for overrides in MODELS.values()),
    *(f"attention={option}" for option in softmaxes() if option != "gqa_window"),
    *(f"attention={option} position=none" for option in sorted({*options("attention")} - {*softmaxes()})),
]


@pytest.mark.parametrize("choice", first(4, dict.fromkeys(CHOICES)))
def test_the_measured_bytes_are_those_of_the_formula(choice: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = decoder(*choice.split()).to(dtype)
        sizes = cache_sizes(model, [1, 3], [1, 8, 32])
        names = [str(d).removeprefix("torch.") for d in cache_dtypes(model)]
        assert [(s.dtype, s.batch_size, s.context) for s in sizes] == list(itertools.product(names, [1, 3], [1, 8, 32]))
        for size in sizes:
            assert size.measured_bytes == size.formula_bytes > 0
            assert size.allocated_bytes is None


def test_bytes_by_hand() -> None:
    model = decoder("attention=gqa", "model.n_kv_heads=2")
    first, *_ = cache_sizes(model, [3], [10])
    assert first.measured_bytes == 3 * 10 * 2 * 2 * 2 * 8 * 2  # keys and values, 2 layers, 2 heads of 8, bfloat16
    assert first.state_bytes == 0
    last = cache_sizes(model, [3], [10])[-1]
    assert last.measured_bytes == 3 * 10 * 2 * 2 * 2 * (8 + 4)  # and a float32 scale for each head's bytes


@torch.no_grad()
def test_the_cache_of_a_source_is_counted_apart_and_stays_as_it_is_while_decoding() -> None:
    model = lively("family=encoder_decoder", "attention=gqa", "model.n_kv_heads=2")
    sizes = cache_sizes(model, [3], [10])
    assert [size.dtype for size in sizes] == ["bfloat16", "float32"]
    for size, width in zip(sizes, (2, 4), strict=True):
        keys_and_values = 3 * 10 * 2 * 2 * 2 * 8 * width  # of 2 layers, 2 heads of 8
        assert size.source_bytes == keys_and_values + 3 * 2 * 8  # and the number of the source's tokens
        assert size.measured_bytes == size.formula_bytes == keys_and_values + size.source_bytes
    state, tokens = model.new_state(1, 10), torch.arange(1, 7)[None]
    model(tokens[:, :1], state, tokens)
    before = [layer.source.tensors for layer in state.layers]
    kept = [[tensor.clone() for tensor in tensors] for tensors in before]
    model(tokens[:, 1:], state)
    assert all((now == then).all() for pair in zip(before, kept, strict=True) for now, then in zip(*pair, strict=True))


@torch.no_grad()
def test_the_loss_of_an_encoder_decoder_through_a_cache_is_that_of_decoding_with_it() -> None:
    model, tokens = lively("family=encoder_decoder"), stream(97)  # three windows of 32
    found = {cost.dtype: cost.loss for cost in cache_losses(model, [ValWindows(tokens, 32)], 64, NEXT_TOKENS)}
    for dtype in (torch.float32, torch.bfloat16):
        paid = []
        for start in (0, 32, 64):
            window = torch.from_numpy(tokens[start : start + 32].astype(int))
            cache = model.new_state(1, 32, dtype)
            logits = [model(window[None, 15:16], cache, window[None, :16])[0]]
            logits += [model(token.view(1, 1), cache)[0] for token in window[16:-1]]
            paid.append(F.cross_entropy(torch.cat(logits).double(), window[16:]))
        assert found[str(dtype).removeprefix("torch.")] == pytest.approx(float(torch.stack(paid).mean()), abs=1e-6)
    assert abs(found["bfloat16"] - found["float32"]) > 1e-5


def test_the_state_of_a_hybrid_is_a_part_of_its_bytes_at_any_context() -> None:
    model = decoder(
        *("model.n_layers=2", "attention=linear", "position=none"),
        *("+pattern.a={at: 1, attention: mha, position: rope}",),
    )
    for size in cache_sizes(model, [3], [10, 20]):
        assert size.dtype != "int8"
        assert size.state_bytes == 3 * 4 * 4 * 8 * (8 + 1)  # 4 heads' matrices in float32, with a normaliser
        width = 2 if size.dtype == "bfloat16" else 4
        assert size.measured_bytes == size.state_bytes + 3 * size.context * 2 * 32 * width
