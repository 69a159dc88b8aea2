"""Vectors of distances that are added to keys and values, beside the formula."""

from itertools import product

import pytest
import torch
from torch import Tensor

from llama_lab.model import Decoder
from llama_lab.model.attention import GroupedQueryAttention
from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.encoding import Position
from llama_lab.model.shaw import Shaw
from tests.composing import decoder, lively

CLIP = 5
SHAW = ("position=shaw", f"model.position.clip={CLIP}")
TOKENS = torch.arange(36).view(2, 18) * 7 % 97


def attention_of(model: Decoder, x: Tensor) -> Tensor:
    """The first layer's for the input `x (B, T, D)`."""
    context = model.attention_context(TOKENS, torch.arange(x.shape[1]), 0, 0, None).of(model.position_at(0))
    return model.mixers[0](x, context)


@pytest.mark.parametrize(("per_head", "values", "n_kv_heads"), [(True, True, 2), (False, True, 4), (False, False, 1)])
@torch.no_grad()
def test_attention_equals_the_papers_sums(per_head: bool, values: bool, n_kv_heads: int) -> None:
    """Equations 3 and 4, one query and head at a time."""
    model = lively(
        *SHAW,
        "attention=gqa",
        f"model.n_kv_heads={n_kv_heads}",
        f"model.position.per_head={per_head}",
        f"model.position.values={values}",
    )
    mixer, tables = model.mixers[0], model.position_at(0)
    assert isinstance(mixer, GroupedQueryAttention)
    x = torch.randn(2, 18, 32, generator=torch.Generator().manual_seed(0))
    context = AttentionContext(Position(), torch.arange(18))
    query, key, value = (part.double() for part in mixer._heads(x, context, []))
    a_key, a_value = (
        torch.zeros(1) if table is None else table.weight.double().view(CLIP + 1, -1, 8).expand(-1, 4, -1)
        for table in (tables.keys, tables.values)
    )
    mixed = torch.zeros(2, 18, 4, 8, dtype=torch.float64)
    for b, head, i in product(range(2), range(4), range(18)):
        kv, rows = head * n_kv_heads // 4, [min(i - j, CLIP) for j in range(i + 1)]
        keys = torch.stack([key[b, kv, j] + a_key[row, head] for j, row in enumerate(rows)])
        seen = torch.stack([value[b, kv, j] + (a_value[row, head] if values else 0) for j, row in enumerate(rows)])
        mixed[b, i, head] = (keys @ query[b, head, i] / 8**0.5).softmax(0) @ seen
    expected = mixed.flatten(2) @ mixer.output.weight.double().T
    torch.testing.assert_close(attention_of(model, x).double(), expected, rtol=0, atol=1e-5)


def test_an_encoder_has_vectors_for_both_directions() -> None:
    one_way, both = (Shaw(4, 8, [0], CLIP, causal=causal).at_layer(0) for causal in (True, False))
    ahead = torch.arange(20)
    rows = both.relation(torch.tensor([10]), ahead).rows[0].tolist()
    assert rows == [5] * 5 + [5, 4, 3, 2, 1, 0, 10, 9, 8, 7, 6] + [6] * 4
    assert both.relation(ahead, ahead).keys.shape == (4, 2 * CLIP + 1, 8)
    assert one_way.relation(torch.tensor([10]), ahead).rows[0].tolist() == [5] * 5 + [5, 4, 3, 2, 1] + [0] * 10


def test_every_layer_in_which_it_acts_has_vectors_of_its_own() -> None:
    names = [name for name, _ in decoder(*SHAW).named_parameters() if name.startswith("position")]
    assert names == [f"position.layers.{layer}.{table}.weight" for layer in (0, 1) for table in ("keys", "values")]
    few = decoder("model.n_layers=4", "+pattern.near={at: [1, 3], position: shaw}")
    few(TOKENS).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in few.other_positions.parameters())
