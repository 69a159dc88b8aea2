"""The encoder: PyTorch's own as an oracle, which tokens see which, costs, refusals."""

import pytest
import torch
from torch import Tensor, nn

from llama_lab.model import Encoder, generate, measure_cost
from llama_lab.model.loss import IGNORE
from tests.composing import decoder, lively, refusal
from tests.model.cases import copy_attention

FAMILY = "family=encoder"
TOKENS = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(0))


def theirs(model: Encoder, norm_first: bool) -> nn.TransformerEncoder:
    """PyTorch's own with the same weights."""
    width = model.blocks[0].ffn.up.out_features
    layer = nn.TransformerEncoderLayer(model.dim, 4, width, 0.0, "gelu", 1e-5, batch_first=True, norm_first=norm_first)
    other = nn.TransformerEncoder(layer, 3, nn.LayerNorm(model.dim) if norm_first else None, False).eval()
    for block, copied in zip(model.blocks, other.layers, strict=True):
        copy_attention(block.attention, copied.self_attn)
        pairs = [(block.ffn.up, copied.linear1), (block.ffn.down, copied.linear2)]
        pairs += [(block.attention_norm, copied.norm1), (block.ffn_norm, copied.norm2)]
        for ours, its in pairs:
            its.load_state_dict(ours.state_dict())
    if norm_first:
        other.norm.load_state_dict(model.norm.state_dict())
    return other


@pytest.mark.parametrize(("block", "norm_first"), [("postnorm", False), ("prenorm", True)])
@torch.no_grad()
def test_it_equals_pytorchs_encoder(block: str, norm_first: bool) -> None:
    model = lively(FAMILY, "arch=gpt2", f"block={block}", "ffn=gelu_bias", "model.n_layers=3")
    assert isinstance(model, Encoder)
    lengths = torch.tensor([9, 5])
    padding = torch.arange(9) >= lengths[:, None]
    x = model.position.embed(model.embedding(TOKENS), torch.arange(9))
    other = theirs(model, norm_first)
    torch.testing.assert_close(model.hidden_states(TOKENS), other(x), rtol=1e-4, atol=1e-4)
    found, expected = model.hidden_states(TOKENS, None, lengths), other(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-4)


def seen(model: Encoder, *lengths: int) -> list[str]:
    """For each of 5 tokens, which of them change its hidden state: 1, or 0."""
    tokens, given = TOKENS[:1, :5], [torch.tensor(lengths)] if lengths else []
    changed = []
    for at in range(5):
        other = tokens.clone()
        other[0, at] = (other[0, at] + 1) % 97
        moved = model.hidden_states(other, None, *given) != model.hidden_states(tokens, None, *given)
        changed.append(moved[0].any(-1))
    return ["".join("01"[int(x)] for x in row) for row in torch.stack(changed, 1)]


@torch.no_grad()
def test_which_tokens_see_which() -> None:
    one = ("model.n_layers=1", "attention=gqa_window")
    assert seen(lively(FAMILY, "model.n_layers=1")) == ["11111"] * 5
    assert seen(lively(FAMILY, *one, "model.attention.window=2")) == ["11000", "11100", "01110", "00111", "00011"]
    assert seen(lively(FAMILY, "model.n_layers=1"), 3) == ["11100", "11100", "11100", "11110", "11101"]
    assert seen(lively("model.n_layers=1")) == ["10000", "11000", "11100", "11110", "11111"], "a decoder's"


@pytest.mark.parametrize("position", ["learned", "alibi", "relative", "shaw"])
@torch.no_grad()
def test_every_position_encoding_sees_both_sides(position: str) -> None:
    assert seen(lively(FAMILY, f"position={position}")) == ["11111"] * 5


def test_every_parameter_learns_from_a_few_targets() -> None:
    model = decoder(FAMILY, "attention=gqa_gpt_oss")
    targets: Tensor = torch.full_like(TOKENS, IGNORE)
    targets[:, 3] = TOKENS[:, 3]
    model.loss(*model.cut(TOKENS, targets))[1].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_every_parameter_of_bert_learns_but_the_second_segment() -> None:
    model = decoder("arch=bert")
    model.loss(*model.cut(TOKENS, TOKENS))[1].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert [bool(row.any()) for row in model.segments.weight.grad] == [True, False]
    assert seen(lively("arch=bert")) == ["11111"] * 5


def test_costs_are_of_all_keys_and_there_is_no_cache() -> None:
    model = decoder(FAMILY, "arch=vanilla")
    cost = measure_cost(model, 24)
    d, width = 32, model.blocks[0].ffn.up.out_features
    assert cost.flops_per_token == 2 * (len(model.blocks) * (4 * d * d + 2 * d * width + 2 * d * 24) + d * 97)
    assert cost.kv_bytes is cost.kv_bytes_per_token is cost.state_bytes_per_sequence is None


REFUSED = {
    "attention=linear position=none": "model.attention=llama_lab.model.recurrent.LinearAttention: ",
    "model.attention.prefix=4": "model.attention.prefix=4: ",
    "data.document_mask=true": "model.document_start_id: ",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_it_cannot_be_is_one_line(overrides: str) -> None:
    assert refusal(FAMILY, *overrides.split()).startswith(REFUSED[overrides])


def test_it_writes_no_text() -> None:
    with pytest.raises(ValueError, match=r"^encoder: predicts tokens at their own places and no next one"):
        generate(decoder(FAMILY), [[1]], 3)
