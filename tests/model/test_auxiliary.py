"""Terms that modules add to the objective: their gradients are those of a sum, however the objective is computed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_lab.model import Decoder
from llama_lab.model.auxiliary import Auxiliary, add_metric, add_term
from llama_lab.model.recompute import PARTS, recompute
from llama_lab.training.module import LanguageModel
from tests.composing import decoder

WEIGHT = 0.3
TOKENS = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(0))


class Loud(nn.Module):
    """A feed-forward that adds a term, of the sizes of its outputs, and a metric."""

    def __init__(self, ffn: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.ffn, self.use, self.sizes = ffn, use, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ffn(x)
        self.sizes = x.square().mean()
        add_metric("largest", x.abs().max())
        return self.use(x, self.sizes)


def loud(use: Callable[[Tensor, Tensor], Tensor]) -> LanguageModel:
    model = decoder()
    for block in model.blocks:
        block.ffn = Loud(block.ffn, use)
    return LanguageModel(model, lambda model: torch.optim.SGD(model.parameters()), lambda step, steps: 1.0, 1, 1.0)


def with_term(x: Tensor, sizes: Tensor) -> Tensor:
    return add_term(x, "sizes", sizes, WEIGHT)


def gradients(model: Decoder) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_term_has_the_gradient_of_a_summand_of_the_mean_objective(parts: str, count: int) -> None:
    """Also split into micro-batches, and where activations are computed again; it is counted once."""
    module = loud(with_term)
    recompute(module.model, parts)
    for batch in TOKENS.chunk(count):
        loss, objective = module.loss(batch[:, :-1], batch[:, 1:])
        assert objective.item() == pytest.approx(loss.item(), rel=1e-6), "the objective has the term's value"
        (objective / count).backward()
        module.auxiliary.check()
    means = module.auxiliary.take()

    summed = loud(lambda x, sizes: x)
    for batch in TOKENS.chunk(count):
        loss = F.cross_entropy(summed.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        terms = [block.ffn.sizes for block in summed.model.blocks]
        ((loss + WEIGHT * sum(terms)) / count).backward()
        assert means["sizes"].item() == pytest.approx(torch.stack(terms).mean().item(), rel=0.2)
    torch.testing.assert_close(gradients(module.model), gradients(summed.model), rtol=1e-4, atol=1e-7)
    assert means.keys() == {"sizes", "largest"}
    assert not module.auxiliary.take(), "they were taken"


def test_outside_of_training_nothing_is_added() -> None:
    module = loud(with_term)
    module.eval().validation_step((TOKENS[:, :-1], TOKENS[:, 1:]), 0)
    module.model(TOKENS).sum().backward()
    assert not module.auxiliary.take()


def test_a_term_that_reaches_no_objective_is_an_error() -> None:
    module = loud(lambda x, sizes: (with_term(x, sizes), x)[1])
    module.loss(TOKENS[:, :-1], TOKENS[:, 1:])[1].backward()
    with pytest.raises(RuntimeError, match="train/sizes: the term reaches no objective; use what add_term returns"):
        module.auxiliary.check()


def test_neither_has_the_name_of_the_loss() -> None:
    x = torch.ones((), requires_grad=True)
    for add in (lambda: add_term(x, "loss", x, 1.0), lambda: add_metric("loss", x)):
        with Auxiliary().collecting(), pytest.raises(ValueError, match="train/loss: is the loss of the model; give"):
            add()
