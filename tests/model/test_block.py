"""Blocks equal the formula on their label, and the norms sit where it says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.block import Block
from tests.composing import decoder, options


def by_formula(option: str, x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    """What a block of pico's two layers computes of `x`."""
    norm, ffn_norm = block.attention_norm, getattr(block, "ffn_norm", nn.Identity())
    match option:
        case "postnorm" | "deepnorm":
            scale = (2 * 2) ** -0.25 if option == "deepnorm" else 1.0
            x = norm(x + scale * attention(x))
            return ffn_norm(x + scale * block.ffn(x))
        case "prenorm" | "prenorm_scaled":
            scale = 0.22 if option == "prenorm_scaled" else 1.0
            x = x + scale * attention(norm(x))
            return x + scale * block.ffn(ffn_norm(x))
        case "mixer_only":
            return x + attention(norm(x))
        case "reordered":
            x = x + norm(attention(x))
            return x + ffn_norm(block.ffn(x))
        case "sandwich":
            x = x + block.attention_post_norm(attention(norm(x)))
            return x + block.ffn_post_norm(block.ffn(ffn_norm(x)))
        case "parallel":
            return x + attention(norm(x)) + block.ffn(norm(x))
        case "parallel_two_norms":
            return x + attention(norm(x)) + block.ffn(ffn_norm(x))
    raise ValueError(f"{option}: has no formula here")


NORMS = {"sandwich": 4, "parallel": 1, "mixer_only": 1}  # per block; the others have 2
TOKENS = torch.arange(20)[None]


@pytest.mark.parametrize("option", options("block"))
def test_blocks_equal_their_formulas(option: str) -> None:
    model = decoder(f"block={option}", "norm=layernorm")
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.3, generator=generator)
    x = torch.randn(2, 7, 32, generator=generator)
    block, context = model.blocks[0], AttentionContext(model.position, torch.arange(7))
    expected = by_formula(option, x, block, lambda y: block.attention(y, context))
    torch.testing.assert_close(block(x, context), expected)
    assert sum("norm" in name for name, _ in block.named_children()) == NORMS.get(option, 2)


@pytest.mark.parametrize("option", options("block"))
def test_a_scale_multiplies_what_each_branch_adds(option: str) -> None:
    """By residual streams: scaling what the maps, or the norms on their outputs, end in is the same."""
    plain, scaled = (decoder(f"block={option}", f"model.block.residual_scale={scale}") for scale in (1.0, 0.25))
    for name, p in scaled.named_parameters():
        last = {"sandwich": ["_post_norm."], "reordered": ["_norm."]}.get(option, ["output.", "down."])
        if any(part in name for part in last):
            plain.get_parameter(name).data.copy_(0.25 * p)
    torch.testing.assert_close(plain.hidden_states(TOKENS), scaled.hidden_states(TOKENS))


def test_a_learned_scale_is_a_number_per_branch_that_starts_where_it_is_set() -> None:
    constant = decoder("block=sandwich", "model.block.residual_scale=0.25")
    learned = decoder("block=sandwich", "model.block.residual_scale=0.25", "model.block.learned_scale=true")
    torch.testing.assert_close(learned(TOKENS), constant(TOKENS))
    count = sum(p.numel() for p in learned.parameters()) - sum(p.numel() for p in constant.parameters())
    assert count == 2 * len(learned.blocks)
    learned(TOKENS).square().sum().backward()
    assert all(block.attention_scale.weight.grad != 0 for block in learned.blocks)


def test_rezero_starts_as_the_identity() -> None:
    model = decoder("model.block.residual_scale=0", "model.block.learned_scale=true", "norm=none")
    assert torch.equal(model.hidden_states(TOKENS), model.embedding(TOKENS))


@torch.no_grad()
def test_deepnorm_equals_its_formula() -> None:
    """LN(alpha x + f(x)), alpha = (2 layers)^(1/4); ours divides by alpha, which only epsilon sees."""
    model = decoder("block=deepnorm", "norm=layernorm", "model.norm.eps=0", "model.n_layers=5")
    context, alpha = AttentionContext(model.position, torch.arange(7)), 10**0.25
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    for block in model.blocks:
        y = block.attention_norm(alpha * x + block.attention(x, context))
        expected = block.ffn_norm(alpha * y + block.ffn(y))
        x = block(x, context)
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", options("block"))
def test_dropout_falls_on_embeddings_and_all_branches_in_training_only(option: str) -> None:
    model = decoder(f"block={option}", "model.dropout=0.5")
    dropped: list[float] = []
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _module, _args, x: dropped.append((x == 0).float().mean().item()))
    model(TOKENS)
    assert len(dropped) == 1 + (1 if option == "mixer_only" else 2) * len(model.blocks)
    assert all(0.4 < share < 0.6 for share in dropped)
    model.eval()
    assert torch.equal(model(TOKENS), decoder(f"block={option}").eval()(TOKENS))
