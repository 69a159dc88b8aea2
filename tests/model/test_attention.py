"""Attention: fused and blocked kernels equal the written-out one, and that a loop. What a query sees: test_mask.py."""

import math
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn

from llama_lab.model import blocked_attention
from llama_lab.model.attention import GroupedQueryAttention, reference_attention
from llama_lab.model.attention_context import CAUSAL, AttentionContext
from llama_lab.model.encoding import Position
from llama_lab.model.norm import RMSNorm
from llama_lab.model.tower import call
from tests.composing import cover, decoder, kinds, lively, options, softmaxes
from tests.model.cases import switched

T, N_HEADS, HEAD_DIM, DIM = 12, 6, 8, 40  # dim is not n_heads * head_dim, and n_heads is no power of two
KV_HEADS = {"mqa": [1], **{option: [6] for option in options("attention") if option.startswith("mha")}}


@cache
def component(group: str, option: str):
    """The factory that the decoder receives for `group=option`."""
    return instantiate(switched("llama", group, option).model[group])


def outputs_and_gradients(layer: GroupedQueryAttention, position: Position, x: Tensor, kernel: str) -> list[Tensor]:
    layer.kernel = kernel
    leaves = [x, *layer.parameters(), *position.parameters()]
    context = AttentionContext(position, torch.arange(5, 5 + T))  # 5 tokens into a text
    y = layer(position.embed(x, context.positions), context)
    grads = torch.autograd.grad((y * torch.linspace(-1, 1, DIM)).sum(), leaves, allow_unused=True)
    return [y, *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True))]


ATTENTIONS = [one for one in kinds("attention") if one in softmaxes() and not one.startswith("mla")]
POSITIONS = [option for option in kinds("position") if option != "shaw"]  # which no fused kernel has
CASES = [
    (position, attention, window, n_kv_heads)
    for position, attention, window in cover(POSITIONS, ATTENTIONS, [None, 1, 5], meeting=1)
    for n_kv_heads in KV_HEADS.get(attention, [2, 3])
]


@pytest.mark.parametrize(("position", "attention", "window", "n_kv_heads"), CASES)
def test_fused_and_blocked_equal_reference_attention(
    position: str, attention: str, window: int | None, n_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(n_kv_heads)
    encoding = call(component("position", position), dim=DIM, n_heads=N_HEADS, head_dim=HEAD_DIM, max_seq_len=32)
    sizes = {"dim": DIM, "n_heads": N_HEADS, "n_kv_heads": n_kv_heads, "head_dim": HEAD_DIM}
    layer = component("attention", attention)(**sizes, norm=RMSNorm, window=window, softcap=None)
    for p in (*layer.parameters(), *encoding.parameters()):
        nn.init.normal_(p, 0.0, 0.3)
    x = torch.randn(2, T, DIM, requires_grad=True)
    monkeypatch.setattr(blocked_attention, "BLOCK", 5)
    kernels = ("sdpa", "blocks", "reference")
    fused, blocked, reference = (outputs_and_gradients(layer, encoding, x, kernel) for kernel in kernels)
    torch.testing.assert_close(fused, reference, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(blocked, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n_kv_heads", "length"), [(4, 160), (2, 160), (1, 700)])
def test_blocks_in_bf16_are_attention_in_float64_to_rounding(n_kv_heads: int, length: int) -> None:
    torch.manual_seed(0)
    heads = (torch.randn(2, n, length, 16, dtype=torch.float64) for n in (4, n_kv_heads, n_kv_heads))
    exact, rounded = [], []
    for x in heads:
        rounded.append(x.bfloat16().requires_grad_())
        exact.append(rounded[-1].detach().double().requires_grad_())
    context = AttentionContext(Position(), torch.arange(length))
    mask, seen = context.mask(CAUSAL), partial(context.keys_seen, CAUSAL, length)
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    found = blocked_attention.blocked_attention(*rounded, mask, None, seen)
    towards = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, exact, towards), torch.autograd.grad(found, rounded, towards.bfloat16())
    assert found.dtype == torch.bfloat16
    for one, other in zip((expected, *gradients[0]), (found, *gradients[1]), strict=True):
        assert (one - other).norm() <= 0.01 * one.norm()


def test_the_softmax_of_blocks_sums_in_float32() -> None:
    scores = 3 * torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(scores.softmax(-1), scores.float().softmax(-1).bfloat16())


@pytest.mark.parametrize(
    ("kernel", "softcap", "shape", "kind", "taken"),
    [
        ("auto", None, (1, 2, 64, 64), torch.bfloat16, "blocks"),
        ("auto", None, (1, 2, 64, 64), torch.float32, "sdpa"),
        ("auto", None, (1, 2, 8, 64), torch.bfloat16, "sdpa"),
        ("auto", None, (2**16, 2, 64, 64), torch.bfloat16, "sdpa"),  # 1 GiB of weights
        ("auto", 1.0, (1, 2, 64, 64), torch.bfloat16, "reference"),
        ("sdpa", None, (1, 2, 64, 64), torch.bfloat16, "sdpa"),
        ("blocks", None, (1, 2, 8, 64), torch.float32, "blocks"),
    ],
)
def test_auto_takes_blocks_where_they_are_faster_and_fit(
    kernel: str, softcap: float | None, shape: tuple[int, ...], kind: torch.dtype, taken: str
) -> None:
    layer = GroupedQueryAttention(16, 2, 2, 8, RMSNorm, kernel=kernel, softcap=softcap)
    assert layer.kernel_for(shape, "cpu", kind) == taken
    assert layer.kernel_for(shape, "cuda", kind) == ("sdpa" if taken == "blocks" and kernel == "auto" else taken)


@pytest.mark.parametrize(("n_kv_heads", "softcap"), [(1, None), (2, 2.0), (3, None), (6, 2.0)])
def test_reference_attention_equals_a_naive_loop(n_kv_heads: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 4, generator=generator)
    key, value = torch.randn(2, 2, n_kv_heads, 7, 4, generator=generator)
    mask = torch.randn(6, 5, 7, generator=generator).masked_fill(torch.ones(5, 7).triu(3).bool(), -math.inf)
    expected = torch.zeros(2, 6, 5, 4, dtype=torch.float64)
    for b in range(2):
        for h in range(6):
            kv = h * n_kv_heads // 6
            for t in range(5):
                scores = [float(query[b, h, t].double() @ key[b, kv, s].double()) / 2 for s in range(7)]
                if softcap is not None:
                    scores = [softcap * math.tanh(s / softcap) for s in scores]
                weights = [math.exp(s + float(mask[h, t, i])) for i, s in enumerate(scores)]
                for s in range(7):
                    expected[b, h, t] += weights[s] / sum(weights) * value[b, kv, s].double()
    actual = reference_attention(query, key, value, mask, softcap)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_plain_causal_attention_reaches_the_kernel_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(*_: object) -> Tensor:
        raise AssertionError("built a mask")

    monkeypatch.setattr(AttentionContext, "mask", no_mask)
    decoder("arch=llama3")(torch.zeros(1, T, dtype=torch.long))
    with pytest.raises(AssertionError, match="built a mask"):
        decoder("position=alibi")(torch.zeros(1, T, dtype=torch.long))


def test_heads_that_are_repeated_give_what_shared_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [lively("arch=llama3", *more) for more in ([], ["model.attention.window=5"], ["position=alibi"])]
    tokens = torch.arange(24).view(2, 12)
    shared = [model(tokens) for model in models]
    monkeypatch.setattr("llama_lab.model.attention.must_repeat_heads", lambda query, masked: True)
    torch.testing.assert_close([model(tokens) for model in models], shared)
