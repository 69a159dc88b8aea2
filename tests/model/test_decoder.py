"""The decoder as a whole: causal, and able to learn."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_lab.model import Decoder
from tests.composing import DECODERS, decoder, lively


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


QUICK = ["vanilla", "mixtral", "mamba2"]
OTHERS = [pytest.param(arch, marks=pytest.mark.matrix) for arch in DECODERS if arch not in QUICK]
TOKENS = torch.randint(97, (2, 24), generator=seeded(0))


@pytest.mark.parametrize("arch", [*QUICK, *OTHERS])
@torch.no_grad()
def test_later_tokens_never_change_earlier_logits(arch: str) -> None:
    model, before = lively(f"arch={arch}"), lively(f"arch={arch}")(TOKENS)
    for position in (1, 11, 23):
        changed = TOKENS.clone()
        changed[0, position] = (changed[0, position] + 1) % 97
        after = model(changed)
        torch.testing.assert_close(after[0, :position], before[0, :position], rtol=0, atol=1e-5)
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-5)  # nor those of another text
        read = slice(position, position + 5 if arch == "mamba2" else None)  # whose states forget
        assert (after[0, read] - before[0, read]).abs().amax(-1).min() > 1e-3 * model.embedding.logit_scale


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("arch", [*QUICK, *OTHERS])
def test_every_recipe_learns_a_tiny_batch_by_heart(arch: str) -> None:
    model = decoder(f"arch={arch}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss = loss_of(model, TOKENS)
        if loss < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    pytest.fail(f"the loss is still {loss:.3f}")
