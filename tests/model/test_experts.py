"""Mixture of experts gives the numbers of a loop over tokens and experts, and costs what it says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llama_lab.model.auxiliary import Auxiliary
from llama_lab.model.experts import MixtureOfExperts
from llama_lab.model.init import Scaled, initialise
from tests.composing import decoder

CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not normalised": {"normalise": False, "top_k": 1},
    "sigmoid, scaled, with biases": {"scores": "sigmoid", "scale": 2.5, "router_bias": True},
    "groups and a bias on the choice": {"n_groups": 4, "top_groups": 2, "balance_bias": 0.1, "scores": "sigmoid"},
    "shared": {"n_shared": 2},
    "shared, gated": {"n_shared": 1, "shared_gate": True, "expert": "gelu_bias"},
    "all": {"top_k": 8},
}


def mixture(*overrides: str, expert: str = "swiglu", **settings: Any) -> MixtureOfExperts:
    """The first feed-forward of a tiny decoder, with weights that choose clearly."""
    own = [f"model.ffn.{key}={'null' if value is None else value}" for key, value in settings.items()]
    ffn: MixtureOfExperts = decoder("ffn=moe", f"expert={expert}", *own, *overrides).blocks[0].ffn.double()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*ffn.parameters(), *ffn.buffers()):
        tensor.data.normal_(0, 0.5, generator=generator)
    return ffn


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def in_a_loop(ffn: MixtureOfExperts, x: Tensor, **settings: Any) -> Tensor:
    """The output for each token, by the papers' formulas."""
    return torch.stack([torch.stack([of_token(ffn, token, **settings) for token in row]) for row in x])


def of_token(
    ffn: MixtureOfExperts,
    x: Tensor,
    top_k: int = 2,
    scores: str = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    n_groups: int = 1,
    top_groups: int = 1,
    n_shared: int = 0,
    shared_gate: bool = False,
    **_: Any,
) -> Tensor:
    weights = dict(ffn.named_parameters())
    logits = weights["router.weight"] @ x + weights.get("router.bias", 0)
    score = torch.sigmoid(logits) if scores == "sigmoid" else logits.exp() / logits.exp().sum()
    wanted = (score if ffn.choice_bias is None else score + ffn.choice_bias).tolist()
    size = len(wanted) // n_groups
    groups = {g: sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(n_groups)}
    allowed = sorted(groups, key=groups.__getitem__)[-top_groups:]
    chosen = sorted((i for i in range(len(wanted)) if i // size in allowed), key=wanted.__getitem__)[-top_k:]
    total = sum(score[i] for i in chosen) if normalise else 1.0

    def feed(prefix: str, i: int | None = None) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            weight, bias = (weights.get(f"{prefix}.{name}.{kind}") for kind in ("weight", "bias"))
            assert weight is not None
            y = (weight if i is None else weight[i]) @ x
            return y if bias is None else y + (bias if i is None else bias[i])

        if f"{prefix}.gate.weight" in weights:
            return linear("down", F.silu(linear("gate", x)) * linear("up", x))
        return linear("down", F.gelu(linear("up", x)))

    out = sum((scale * score[i] / total * feed("experts", i) for i in chosen), torch.zeros_like(x))
    if n_shared:
        gate = torch.sigmoid(weights["shared_gate.weight"] @ x) if shared_gate else 1.0
        out = out + gate * feed("shared")
    return out


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens_and_their_experts(case: str) -> None:
    settings, x = CASES[case], inputs(2, 9)
    found = []
    for function in (MixtureOfExperts.__call__, in_a_loop):
        ffn, own = mixture(**settings), x.clone().requires_grad_()
        out = function(ffn, own, **({} if function is not in_a_loop else settings))
        (out * inputs(2, 9).roll(1)).sum().backward()
        found.append({"out": out, "x": own.grad, **{name: p.grad for name, p in ffn.named_parameters()}})
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [24, 25])
def test_experts_are_computed_at_once_in_32_bits_where_rows_have_whole_16_bytes_and_equal_those_in_a_loop(
    width: int,
) -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        ffn, own = mixture(f"model.hidden_dim={width}", expert="gelu_bias").to(dtype), inputs(1, 3).to(dtype)
        own.requires_grad_()
        assert ffn.kernel == ("grouped_mm" if (width, dtype) == (24, torch.float32) else "loop")
        out = ffn(own)
        out.square().mean().backward()
        found.append({"out": out, "x": own.grad, **{name: p.grad for name, p in ffn.named_parameters()}})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_an_expert_that_no_token_chose_has_a_gradient_of_zero() -> None:
    ffn = mixture()
    ffn(inputs(1, 1)).sum().backward()
    idle = [i for i in range(8) if not ffn.experts.up.weight.grad[i].any()]
    assert len(idle) == 6
    assert all(p.grad is not None for p in ffn.parameters())


def test_each_matrix_of_a_stack_is_drawn_by_its_own_name_as_others_of_its_kind() -> None:
    """Down-projections as residual outputs, in a block as all of a block, whatever the number of experts."""
    weights = []
    for n_experts in (4, 8):
        ffn = mixture(n_experts=n_experts)
        initialise(ffn.float(), Scaled(n_layers=50, std=0.02), seed=1)
        up, down = ffn.experts.up.weight, ffn.experts.down.weight
        assert up.std().item() == pytest.approx(0.02, rel=0.1)
        assert down.std().item() == pytest.approx(0.002, rel=0.1)
        assert len({matrix.sum().item() for matrix in up}) == n_experts
        weights.append((up[:4], down[:4]))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    one, scaled = (decoder("ffn=moe", f"init={init}") for init in ("xavier", "deepnorm"))
    for name in ("up", "down"):
        plain, smaller = (model.blocks[0].ffn.experts.get_parameter(f"{name}.weight") for model in (one, scaled))
        torch.testing.assert_close(smaller, plain * (8 * len(one.blocks)) ** -0.25)


@pytest.mark.parametrize("case", ["softmax", "shared, gated"])
def test_costs_are_those_that_pytorch_counts_for_a_token(case: str) -> None:
    ffn, x = mixture(**CASES[case]), inputs(1, 6)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ffn(x)
    assert ffn.flops_per_token(6) == counter.get_total_flops() / 6
    per_expert = sum(p[0].numel() for p in ffn.experts.parameters())
    others = sum(p.numel() for p in ffn.parameters()) - 8 * per_expert
    assert ffn.active_params() == others + 2 * per_expert


def trained_once(ffn: MixtureOfExperts, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the router and what is logged, of one training step without a loss."""
    auxiliary = Auxiliary()
    for part in x:
        with auxiliary.collecting():
            out = ffn(part)
        (auxiliary.join(0 * out.sum()) / len(x)).backward()
        auxiliary.check()
    with auxiliary.collecting():
        ffn.after_step()
    return ffn.router.weight.grad, {name: value.item() for name, value in auxiliary.take().items()}


def test_the_terms_are_the_papers_and_metrics_are_of_the_whole_step() -> None:
    ffn, x = mixture(balance_loss=0.2, z_loss=0.1), inputs(3, 2, 5)
    gradient, logged = trained_once(ffn, x)
    logits = (x.flatten(0, 1) @ ffn.router.weight.detach().T).requires_grad_()  # (6 sequences, 5 tokens, 8 experts)
    counts = F.one_hot(logits.topk(2).indices, 8).sum((1, 2)).double()
    imbalance = 8 * (counts / 10 * logits.softmax(-1).mean(1)).sum(-1).mean()
    z = logits.logsumexp(-1).square().mean()
    (0.2 * imbalance + 0.1 * z).backward()
    torch.testing.assert_close(gradient, logits.grad.flatten(0, 1).T @ x.flatten(0, 2))
    load = counts.sum(0) / counts.sum()
    entropy = torch.special.entr(load).sum().item()
    expected = {"imbalance": imbalance.item(), "router_z": z.item(), "load_entropy": entropy}
    assert logged == pytest.approx(expected | {"load_max": load.max().item(), "dead_experts": (load == 0).sum().item()})


def test_a_sequence_s_term_splits_over_micro_batches_and_a_batch_s_does_not() -> None:
    x = inputs(1, 4, 5)
    for scope, splits in (("sequence", True), ("batch", False)):
        whole, halves = (trained_once(mixture(scope=scope), x.view(n, -1, 5, 32))[0] for n in (1, 2))
        assert torch.allclose(whole, halves, rtol=1e-9) == splits


def test_the_bias_on_the_choice_moves_towards_experts_with_few_tokens() -> None:
    ffn, x = mixture(balance_bias=0.25, balance_loss=None), inputs(1, 4, 9)
    before = ffn.choice_bias.clone()
    counts = torch.zeros(8)
    for token in x.flatten(0, 2):
        score = (ffn.router.weight @ token).softmax(-1) + before
        counts[score.topk(2).indices] += 1
    trained_once(ffn, x)
    torch.testing.assert_close(ffn.choice_bias, before + 0.25 * (counts.mean() - counts).sign().double())
