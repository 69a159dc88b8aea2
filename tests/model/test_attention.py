"""Attention: the fused kernel equals the written-out one, and a query sees exactly what it should."""

import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

from llama_lab.model.attention import GroupedQueryAttention, must_repeat_heads, reference_attention
from llama_lab.model.attention_context import AttentionContext, Mask
from llama_lab.model.encoding import Position
from llama_lab.model.mixer import call
from llama_lab.model.norm import RMSNorm
from llama_lab.model.position import Alibi
from tests.composing import compose_config, decoder, kinds, lively, options

T, N_HEADS, HEAD_DIM, DIM = 12, 6, 8, 40  # dim is not n_heads * head_dim, and n_heads is no power of two
KV_HEADS = {"mqa": [1], **{option: [6] for option in options("attention") if option.startswith("mha")}}


@cache
def component(group: str, option: str):
    """The factory that the decoder receives for `group=option`."""
    return instantiate(compose_config("size=pico", f"{group}={option}").model[group])


def randomise(*modules: nn.Module) -> None:
    for p in (p for module in modules for p in module.parameters()):
        nn.init.normal_(p, 0.0, 0.3)


def outputs_and_gradients(layer: GroupedQueryAttention, position: Position, x: Tensor, kernel: str) -> list[Tensor]:
    layer.kernel = kernel
    leaves = [x, *layer.parameters(), *position.parameters()]
    context = AttentionContext(position, torch.arange(5, 5 + T))  # 5 tokens into a text
    y = layer(position.embed(x, context.positions), context)
    grads = torch.autograd.grad((y * torch.linspace(-1, 1, DIM)).sum(), leaves, allow_unused=True)
    return [y, *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True))]


ATTENTIONS = [option for option in kinds("attention") if not option.startswith("mla")]
POSITIONS = [option for option in kinds("position") if option != "shaw"]  # which no fused kernel has
WINDOWS = [None, 1, 5]
EVERY_TWO = [  # of a position, an attention and a window meet
    (position, attention, WINDOWS[(i + j) % 3])
    for i, position in enumerate(POSITIONS)
    for j, attention in enumerate(ATTENTIONS)
]


@pytest.mark.parametrize(("position", "attention", "window"), EVERY_TWO)
def test_fused_attention_equals_the_reference(position: str, attention: str, window: int | None) -> None:
    for n_kv_heads in KV_HEADS.get(attention, [1, 2, 3, 6]):
        torch.manual_seed(n_kv_heads)
        encoding = call(component("position", position), dim=DIM, n_heads=N_HEADS, head_dim=HEAD_DIM, max_seq_len=32)
        sizes = {"dim": DIM, "n_heads": N_HEADS, "n_kv_heads": n_kv_heads, "head_dim": HEAD_DIM}
        layer = component("attention", attention)(**sizes, norm=RMSNorm, window=window, softcap=None)
        randomise(layer, encoding)
        x = torch.randn(2, T, DIM, requires_grad=True)
        fused, reference = (outputs_and_gradients(layer, encoding, x, kernel) for kernel in ("sdpa", "reference"))
        torch.testing.assert_close(fused, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
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


@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_a_query_sees_itself_and_the_window_before_it(window: int | None) -> None:
    visible = AttentionContext(Position(), torch.arange(3, 9)).mask(Mask(window)) == 0
    for query in range(6):
        assert visible[query].nonzero().flatten().tolist() == [
            key for key in range(6) if key <= query and (window is None or query - key < window)
        ]


def test_every_nth_layer_ignores_the_window() -> None:
    model = decoder(
        "model.n_layers=6", "model.attention.window=4", "pattern=global_every_2nd", "pattern.global.at=2::3"
    )
    assert [block.attention.mask.window for block in model.blocks] == [4, 4, None, 4, 4, None]


@pytest.mark.parametrize(("qk_norm", "width"), [("head", 8), ("projection", 32)])
def test_qk_norm_normalises_queries_and_keys(qk_norm: str, width: int) -> None:
    layer = decoder("attention=mha", f"model.attention.qk_norm={qk_norm}").blocks[0].attention
    query, key, _ = layer._heads(100 * torch.randn(2, T, 32))
    for heads, norm in ((query, layer.query_norm), (key, layer.key_norm)):
        assert norm.weight.shape == (width,)
        flat = heads if qk_norm == "head" else heads.transpose(1, 2).flatten(2)
        torch.testing.assert_close(flat.square().mean(-1), torch.ones(flat.shape[:-1]), rtol=1e-3, atol=0)


def test_plain_causal_attention_reaches_the_kernel_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(*_: object) -> Tensor:
        raise AssertionError("built a mask")

    monkeypatch.setattr(AttentionContext, "mask", no_mask)
    decoder("arch=llama3")(torch.zeros(1, T, dtype=torch.long))
    with pytest.raises(AssertionError, match="built a mask"):
        decoder("position=alibi")(torch.zeros(1, T, dtype=torch.long))


def test_softcap_bounds_the_scores() -> None:
    query = key = torch.full((1, 1, 2, 4), 100.0)
    key = key * torch.tensor([1.0, -1.0])[:, None]
    value = torch.tensor([[[[1.0], [0.0]]]])
    weight = reference_attention(query, key, value, torch.zeros(2, 2), softcap=1.0)
    torch.testing.assert_close(weight, torch.full((1, 1, 2, 1), 1 / (1 + math.exp(-2))))


def test_alibi_attends_alike_wherever_the_text_starts() -> None:
    torch.manual_seed(0)
    layer = component("attention", "mha")(DIM, N_HEADS, N_HEADS, HEAD_DIM, norm=RMSNorm)
    x, encoding = torch.randn(1, T, DIM), Alibi(N_HEADS)
    near, far = (layer(x, AttentionContext(encoding, torch.arange(start, start + T))) for start in (0, 4000))
    torch.testing.assert_close(near, far)


@pytest.mark.parametrize("overrides", [[], ["model.attention.window=5"], ["position=alibi"]], ids=str)
def test_heads_that_are_repeated_give_what_shared_ones_give(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lively("arch=llama3", *overrides)
    tokens = torch.arange(24).view(2, 12)
    shared = model(tokens)
    monkeypatch.setattr("llama_lab.model.attention.must_repeat_heads", lambda query, masked: True)
    torch.testing.assert_close(model(tokens), shared)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "repeats"),
    [
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float32, False, True),
        ("cpu", torch.float32, True, False),
    ],
)
def test_heads_are_repeated_where_no_fused_kernel_shares_them(
    device: str, dtype: torch.dtype, masked: bool, repeats: bool
) -> None:
    query = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    assert must_repeat_heads(query, masked) == repeats  # type: ignore[arg-type]
