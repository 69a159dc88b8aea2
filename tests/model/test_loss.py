"""The chunked loss equals the plain one: cross-entropy of all logits at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_lab.model import loss
from llama_lab.model.embedding import Embedding
from llama_lab.model.loss import head_loss, plain_loss
from llama_lab.model.norm import NoNorm

DIM, VOCAB = 12, 50


def embedding(vocab_size: int = VOCAB, dtype: torch.dtype = torch.float64, **options: Any) -> Embedding:
    """Its head has logits of a few units, so that caps and partitions matter."""
    torch.manual_seed(0)
    module = Embedding(vocab_size, DIM, NoNorm, **options)
    for p in module.parameters():
        nn.init.normal_(p)
    return module.to(dtype)


def results(
    module: Embedding, chunked: bool, tokens: tuple[int, int], *weights: float, rounded: torch.dtype = torch.float32
) -> list[Tensor]:
    """Both sums, the losses of tokens, and the gradients of the objective by x and the parameters.

    weights: of z-loss and label smoothing. rounded: the dtype to which x is rounded.
    """
    torch.manual_seed(1)
    x = torch.randn(*tokens, DIM, dtype=torch.float64).to(rounded).to(module.head.weight.dtype).requires_grad_()
    targets = torch.randint(module.head.out_features, tokens)
    targets[0, 0] = -100
    run = head_loss(module, x, targets, *weights) if chunked else plain_loss(module.logits(x), targets, *weights)
    parameters = list(module.head.parameters())
    return [*run, *torch.autograd.grad(0.3 * run[1], [x, *parameters])]


OPTIONS: list[dict[str, Any]] = [{}, {"tied": True}, {"head_bias": True}, {"logit_softcap": 2.0}, {"logit_scale": 0.3}]


CASES = [
    ((3, 7), (), torch.float64),
    ((3, 7), (0.1, 0.2), torch.float64),
    ((1, 2), (0.0, 0.2), torch.float64),
    ((3, 7), (0.1, 0.2), torch.float32),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_equal_the_plain_ones(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 4 * VOCAB)  # 21 tokens are five chunks and a rest
    for tokens, weights, dtype in CASES:
        rtol = 1e-12 if dtype == torch.float64 else 1e-6
        exact = results(embedding(dtype=dtype, **options).double(), False, tokens, *weights, rounded=dtype)
        ours = results(embedding(dtype=dtype, **options), True, tokens, *weights, rounded=dtype)
        plain = results(embedding(dtype=dtype, **options), False, tokens, *weights, rounded=dtype)
        for got, by_plain, wanted in zip(ours, plain, exact, strict=True):
            assert got.dtype == dtype
            bound = max(rtol * wanted.abs().max(), 2 * (by_plain - wanted).abs().max())  # plain ones are rounded, too
            assert (got - wanted).abs().max() <= bound


def test_the_smoothed_objective_is_torch_s_and_the_loss_beside_it_the_plain_one() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(9, VOCAB, dtype=torch.float64), torch.randint(VOCAB, (9,))
    targets[3] = loss.IGNORE
    nll, objective, _ = plain_loss(logits, targets, label_smoothing=0.1)
    plain, smooth = (F.cross_entropy(logits, targets, reduction="sum", label_smoothing=share) for share in (0.0, 0.1))
    assert (nll.item(), objective.item()) == pytest.approx((plain.item(), smooth.item()), rel=1e-12)


@pytest.mark.parametrize(("vocab_size", "chunk"), [(VOCAB, VOCAB - 1), (3, 10**6)])
def test_a_chunk_holds_from_one_token_to_all(vocab_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", chunk)
    pair = [results(embedding(vocab_size), chunked, (2, 3), 0.1) for chunked in (True, False)]
    torch.testing.assert_close(*pair)


def test_under_autocast_products_are_bf16_and_sums_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 4 * VOCAB)
    exact = results(embedding(), chunked=False, tokens=(3, 7))
    with torch.autocast("cpu", torch.bfloat16):
        ours = results(embedding(dtype=torch.float32), chunked=True, tokens=(3, 7))
        plain = results(embedding(dtype=torch.float32), chunked=False, tokens=(3, 7))
    assert [x.dtype for x in ours] == [x.dtype for x in plain] == [torch.float32] * 5
    for got, by_autocast, wanted in zip(ours, plain, exact, strict=True):
        scale = wanted.abs().max()
        assert (got - wanted).abs().max() < 1.5 * (by_autocast - wanted).abs().max() + 1e-3 * scale
        assert (got - wanted).abs().max() > 1e-6 * scale, "nothing was computed in bf16"


class Doubled(Embedding):
    """A user's embedding with a head of its own."""

    def logits(self, x: Tensor) -> Tensor:
        return 2 * super().logits(x)


def test_a_head_of_a_users_own_makes_its_own_logits() -> None:
    torch.manual_seed(0)
    module = Doubled(VOCAB, DIM, NoNorm).double()
    nn.init.normal_(module.head.weight)
    ours = results(module, True, (2, 3), 0.1)
    torch.testing.assert_close(ours, results(module, False, (2, 3), 0.1))


def test_logits_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 2 * VOCAB)
    largest = 0
    real = loss.chunk_losses

    def watched(logits: Tensor, *args: Any) -> Any:
        nonlocal largest
        largest = max(largest, logits.numel())
        return real(logits, *args)

    monkeypatch.setattr(loss, "chunk_losses", watched)
    results(embedding(), chunked=True, tokens=(4, 8))
    assert largest == 2 * VOCAB
