"""Blocks equal the formula on their label, and the norms sit where it says."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llama_lab.model.attention_context import AttentionContext
from llama_lab.model.block import Block
from tests.composing import decoder, options


def postnorm(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = block.attention_norm(x + attention(x))
    return block.ffn_norm(x + block.ffn(x))


def prenorm(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + attention(block.attention_norm(x))
    return x + block.ffn(block.ffn_norm(x))


def prenorm_scaled(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + 0.22 * attention(block.attention_norm(x))
    return x + 0.22 * block.ffn(block.ffn_norm(x))


def reordered(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + block.attention_norm(attention(x))
    return x + block.ffn_norm(block.ffn(x))


def sandwich(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + block.attention_post_norm(attention(block.attention_norm(x)))
    return x + block.ffn_post_norm(block.ffn(block.ffn_norm(x)))


def parallel(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    normed = block.attention_norm(x)
    return x + attention(normed) + block.ffn(normed)


def parallel_two_norms(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    return x + attention(block.attention_norm(x)) + block.ffn(block.ffn_norm(x))


def deepnorm(x: Tensor, block: Block, attention: Callable[[Tensor], Tensor]) -> Tensor:
    scale = (2 * 2) ** -0.25  # of pico's two layers
    x = block.attention_norm(x + scale * attention(x))
    return block.ffn_norm(x + scale * block.ffn(x))


FORMULAS = {
    formula.__name__: formula
    for formula in (postnorm, deepnorm, prenorm, prenorm_scaled, reordered, sandwich, parallel, parallel_two_norms)
}
NORMS = {"sandwich": 4, "parallel": 1}  # per block; the others have 2


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("option", options("block"))
def test_blocks_equal_their_formulas(option: str, norm: str) -> None:
    model = decoder(f"block={option}", f"norm={norm}")
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.3, generator=generator)
    x = torch.randn(2, 7, 32, generator=generator)
    block, context = model.blocks[0], AttentionContext(model.position, torch.arange(7))
    expected = FORMULAS[option](x, block, lambda y: block.attention(y, context))
    torch.testing.assert_close(block(x, context), expected)
    assert sum("norm" in name for name, _ in block.named_children()) == NORMS.get(option, 2)


@pytest.mark.parametrize("option", options("block"))
def test_a_scale_multiplies_what_each_branch_adds(option: str) -> None:
    """By residual streams: scaling what the maps, or the norms on their outputs, end in is the same."""
    plain, scaled = (decoder(f"block={option}", f"model.block.residual_scale={scale}") for scale in (1.0, 0.25))
    for name, p in scaled.named_parameters():
        last = "_post_norm." if option == "sandwich" else "_norm." if option == "reordered" else ("output.", "down.")
        if any(part in name for part in ([last] if isinstance(last, str) else last)):
            plain.get_parameter(name).data.copy_(0.25 * p)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(plain.read(tokens), scaled.read(tokens))


def test_a_learned_scale_is_a_number_per_branch_that_starts_where_it_is_set() -> None:
    constant = decoder("block=sandwich", "model.block.residual_scale=0.25")
    learned = decoder("block=sandwich", "model.block.residual_scale=0.25", "model.block.learned_scale=true")
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(learned(tokens), constant(tokens))
    count = sum(p.numel() for p in learned.parameters()) - sum(p.numel() for p in constant.parameters())
    assert count == 2 * len(learned.blocks)
    learned(tokens).square().sum().backward()
    assert all(block.attention_scale.weight.grad != 0 for block in learned.blocks)


def test_rezero_starts_as_the_identity() -> None:
    model = decoder("model.block.residual_scale=0", "model.block.learned_scale=true", "norm=none")
    tokens = torch.arange(20)[None]
    assert torch.equal(model.hidden_states(tokens), model.embedding(tokens))


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
def test_only_postnorm_leaves_out_the_final_norm(option: str) -> None:
    model = decoder(f"block={option}")
    assert (model.norm is None) == (option in ("postnorm", "deepnorm"))
    tokens, streams = torch.arange(20)[None], []
    model.blocks[-1].register_forward_hook(lambda _module, _args, x: streams.append(x))
    logits = model(tokens)
    normed = streams[0] if model.norm is None else model.norm(streams[0])
    torch.testing.assert_close(logits, normed @ model.embedding.head.weight.T)


def test_the_last_postnorm_block_ends_normalised() -> None:
    model, streams = decoder("arch=vanilla"), []
    model.blocks[-1].register_forward_hook(lambda _module, _args, x: streams.append(x))
    model(torch.arange(20)[None])
    torch.testing.assert_close(streams[0].mean(-1), torch.zeros(1, 20), rtol=0, atol=1e-5)
    torch.testing.assert_close(streams[0].var(-1, correction=0), torch.ones(1, 20), rtol=1e-3, atol=0)


@pytest.mark.parametrize("option", options("block"))
def test_dropout_falls_on_embeddings_and_both_branches_in_training_only(option: str) -> None:
    model, tokens = decoder(f"block={option}", "model.dropout=0.5"), torch.arange(20)[None]
    dropped: list[float] = []
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _module, _args, x: dropped.append((x == 0).float().mean().item()))
    model(tokens)
    assert len(dropped) == 1 + 2 * len(model.blocks)
    assert all(0.4 < share < 0.6 for share in dropped)
    model.eval()
    assert torch.equal(model(tokens), decoder(f"block={option}").eval()(tokens))
