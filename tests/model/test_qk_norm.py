"""Norms of queries and keys: each kind against a loop over heads, its parameters, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_lab.model import measure_cost
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.encoding import Position
from tests.composing import decoder

HEADS, KV_HEADS, WIDTH, T = 4, 2, 8, 6
CONTEXT = AttentionContext(Position(), torch.arange(1))  # which nothing reads without convolutions
LAYER = ("attention=gqa", f"model.n_kv_heads={KV_HEADS}", "norm=layernorm")
# Parameters of the two norms in a layer with the model's LayerNorm, which has a bias.
KINDS = {
    ("head", "shared", None): 2 * 2 * WIDTH,
    ("head", "shared", False): 2 * WIDTH,
    ("head", "heads", None): 2 * (HEADS + KV_HEADS) * WIDTH,
    ("head", "heads", False): (HEADS + KV_HEADS) * WIDTH,
    ("head", "none", None): 0,
    ("projection", "shared", None): 2 * (HEADS + KV_HEADS) * WIDTH,
    ("projection", "shared", False): (HEADS + KV_HEADS) * WIDTH,
    ("projection", "none", None): 0,
}


def layer_of(*overrides: str) -> GroupedQueryAttention:
    """A layer with random gains and biases."""
    layer = decoder(*LAYER, *overrides).blocks[0].attention
    generator = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        nn.init.normal_(p, 0.0, 0.5, generator=generator)
    return layer


def by_hand(x: Tensor, norm: nn.Module | None, qk_norm: str, gain: str) -> Tensor:
    """`x (B, T, H * Dh)` normalised head by head, or as a whole: `(B, H, T, Dh)`."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if qk_norm == "projection":
        return F.layer_norm(x, x.shape[-1:], weight, bias).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
    heads = []
    for head, part in enumerate(x.split(WIDTH, -1)):
        own = slice(head * WIDTH, (head + 1) * WIDTH) if gain == "heads" else slice(None)
        heads.append(F.layer_norm(part, (WIDTH,), *(p if p is None else p[own] for p in (weight, bias))))
    return torch.stack(heads, 1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_equals_a_loop_over_heads_and_has_its_parameters(kind: tuple[str, str, bool | None]) -> None:
    qk_norm, gain, bias = kind
    settings: dict[str, Any] = {"qk_norm": qk_norm, "qk_gain": gain, "qk_bias": "null" if bias is None else bias}
    overrides = [f"model.attention.{key}={value}" for key, value in settings.items()]
    layer, x = layer_of(*overrides), torch.randn(2, T, 32, generator=torch.Generator().manual_seed(1))
    query, key, _ = layer._heads(x, CONTEXT, [])
    torch.testing.assert_close(query, by_hand(layer.query(x), layer.query_norm, qk_norm, gain))
    torch.testing.assert_close(key, by_hand(layer.key(x), layer.key_norm, qk_norm, gain))
    plain, normed = (measure_cost(decoder(*LAYER, *more)) for more in ([], overrides))
    assert normed.params - plain.params == 2 * KINDS[kind]  # in two layers
    assert normed.flops_per_token == plain.flops_per_token  # which count matrix products
    assert normed.kv_bytes == plain.kv_bytes


def test_clipping_bounds_queries_keys_and_values_before_their_norm() -> None:
    layer, x = layer_of("model.attention.clip_qkv=0.3"), 10 * torch.randn(2, T, 32)
    for clipped, linear in zip(
        layer._heads(x, CONTEXT, []),
        (layer.query, layer.key, layer.value),
        strict=True,
    ):
        expected = linear(x).clamp(-0.3, 0.3).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        assert torch.equal(clipped, expected)
    normed = layer_of("model.attention.clip_qkv=0.3", "model.attention.qk_norm=head")
    query, _, _ = normed._heads(x, CONTEXT, [])
    expected = by_hand(normed.query(x).clamp(-0.3, 0.3), normed.query_norm, "head", "shared")
    torch.testing.assert_close(query, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_a_scale_of_the_scores_is_one_of_the_queries(kernel: str) -> None:
    own = f"model.attention.kernel={kernel}"
    plain, scaled = layer_of(own), layer_of(own, "model.attention.scale=0.7")
    x, context = torch.randn(2, T, 32), AttentionContext(Position(), torch.arange(T))
    with torch.no_grad():
        plain.query.weight *= 0.7 * WIDTH**0.5
    torch.testing.assert_close(scaled(x, context), plain(x, context), rtol=1e-4, atol=1e-4)
