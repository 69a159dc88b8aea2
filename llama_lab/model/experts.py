"""Mixture of experts: a router sends each token to a few of many feed-forwards; none is dropped."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from .auxiliary import add_metric, add_term, is_collecting, sum_over_ranks
from .blocked_attention import compute_type
from .init import StackedLinear, check_positive
from .tower import call

SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}
SCOPES = ("sequence", "batch")


class Rows:
    """The rows of the experts' input, sorted by expert. experts: of each row `(N,)`. counts: of each expert `(E,)`."""

    def __init__(self) -> None:
        self.experts = self.counts = torch.empty(0)

    def set(self, experts: Tensor, n_experts: int) -> None:
        """Take sorted `experts (N,)`."""
        numbers = torch.arange(n_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True)
        self.experts, self.counts = experts, ends.diff(prepend=ends.new_zeros(1))

    @property
    def sizes(self) -> list[int]:
        """The counts. Without data, as in estimates, each expert is taken to have as many rows."""
        if not without_data(self.counts):
            return self.counts.tolist()
        n, more = divmod(len(self.experts), len(self.counts))
        return [n + (i < more) for i in range(len(self.counts))]


class ExpertLinear(StackedLinear):
    """A linear map per expert, over `rows` of the input: PyTorch's grouped product, or one product for each expert."""

    def __init__(self, n: int, one: nn.Linear, rows: Rows) -> None:
        super().__init__(n, one)
        self.rows = rows

    @property
    def grouped(self) -> bool:
        """Whether PyTorch has a grouped product here: not in 64 bits, and only for rows of whole 16 bytes."""
        small = self.weight.dtype != torch.float64 and self.weight.device.type in ("cpu", "cuda")
        return small and not any(n % 8 for n in self.weight.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Map `x (N, in)` to `(N, out)`."""
        if self.grouped and not without_data(x):
            kind = compute_type(x)
            ends = self.rows.counts.cumsum(0, dtype=torch.int32)
            y = F.grouped_mm(x.to(kind), self.weight.to(kind).transpose(1, 2), offs=ends)
        else:
            parts = zip(torch.split(x, self.rows.sizes), self.weight, strict=True)
            y = torch.cat([F.linear(part, weight) for part, weight in parts if len(part)])
        return y if self.bias is None else y + self.bias[self.rows.experts].type_as(y)


def without_data(x: Tensor) -> bool:
    """Whether a tensor has a shape alone, as in estimates."""
    return x.is_meta or is_fake(x)


class Weighted(torch.autograd.Function):
    """The sum of `x` times constants, which are kept as they were, also where activations are computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        """A scalar."""
        ctx.weights = weights
        return (x * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of `x`."""
        return grad * ctx.weights, None


class MixtureOfExperts(nn.Module):
    """Each token goes to the `top_k` of `n_experts` feed-forwards with the highest scores (Shazeer et al. 2017).

    expert: the feed-forward; its nn.Linear are stacked, and it may have no other parameters. hidden_dim: its width.
    scores: of an expert: the softmax over all, or a sigmoid of its own (DeepSeek-V3, eq. 15).
    normalise: whether the weights of the chosen experts are divided by their sum. scale: multiplies the weights.
    router_bias: whether the router has a bias (gpt-oss).
    n_groups, top_groups: only experts in the top groups can be chosen, by the sum of their two highest scores
        (DeepSeek-V3, section 2.1.2); None: all.
    n_shared: experts that every token goes to, one feed-forward of so many times the width (DeepSeekMoE, eq. 9).
    shared_gate: whether a sigmoid of the token weights these (Qwen2-MoE).
    balance_loss: weight of the term E * sum f P (Switch, Fedus et al. 2021, eq. 4), where f is an expert's share of
        the choices and P the mean of its scores; None: no term. scope: over which tokens both are taken: each sequence
        by itself, or, of the choices, all of the step so far on all ranks, so that micro-batches change the term.
    balance_bias: by how much a bias, which only chooses, moves after every step towards experts with fewer tokens than
        the mean, and away from those with more (Wang et al. 2024, algorithm 1); None: no bias.
    z_loss: weight of the mean squared log-partition of the router (ST-MoE, Zoph et al. 2022, eq. 5); None: no term.

    The router computes in float32, or better. Raises ValueError with a message that begins with the setting.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        expert: Callable[..., nn.Module],
        n_experts: int,
        top_k: int,
        scores: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        router_bias: bool = False,
        n_groups: int | None = None,
        top_groups: int | None = None,
        n_shared: int = 0,
        shared_gate: bool = False,
        balance_loss: float | None = None,
        scope: str = "sequence",
        balance_bias: float | None = None,
        z_loss: float | None = None,
    ) -> None:
        super().__init__()
        check_routing(n_experts, top_k, normalise, n_groups, top_groups)
        for name, value, known in (("scores", scores, [*SCORES]), ("scope", scope, [*SCOPES])):
            if value not in known:
                raise ValueError(f"ffn.{name}={value}: unknown; choose {' or '.join(known)}")
        check_positive("ffn.scale", scale)
        check_positive("ffn.balance_bias", balance_bias)
        for name, weight in (("balance_loss", balance_loss), ("z_loss", z_loss)):
            if weight is not None and weight < 0:
                raise ValueError(f"ffn.{name}={weight}: must be at least 0, or null for none")
        if not isinstance(n_shared, int) or n_shared < 0:
            raise ValueError(f"ffn.n_shared={n_shared}: must be a whole number of at least 0")
        if scope != "sequence" and balance_loss is None:
            raise ValueError(f"ffn.scope={scope}: is of the balancing loss; set ffn.balance_loss, or leave it out")
        if shared_gate and not n_shared:
            raise ValueError("ffn.shared_gate=true: there is no shared expert; set ffn.n_shared=1, or leave it out")
        self.n_experts, self.top_k, self.score = n_experts, top_k, SCORES[scores]
        self.normalise, self.scale, self.n_groups, self.top_groups = normalise, scale, n_groups, top_groups
        self.balance_loss, self.scope, self.balance_bias, self.z_loss = balance_loss, scope, balance_bias, z_loss
        self.router = nn.Linear(dim, n_experts, bias=router_bias)
        self.rows = Rows()
        self.experts = stack(call(expert, dim=dim, hidden_dim=hidden_dim), n_experts, self.rows)
        self.shared = call(expert, dim=dim, hidden_dim=n_shared * hidden_dim) if n_shared else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared_gate else None
        self.choice_bias = None if balance_bias is None else nn.Buffer(torch.zeros(n_experts))
        self._load: Tensor | None = None  # choices of each expert in the step so far, on this rank

    @property
    def kernel(self) -> str:
        """How the experts' products are computed, for a run's summary: at once, or in a loop."""
        maps = (part for part in self.experts.modules() if isinstance(part, ExpertLinear))
        return "grouped_mm" if all(part.grouped for part in maps) else "loop"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the experts' numbers of rows are data
    def forward(self, x: Tensor) -> Tensor:
        """Map `x (B, T, dim)` to the same shape."""
        logits = self._logits(x)
        scores = self.score(logits)
        chosen = self._choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = self._mix(x.flatten(0, 1), chosen.flatten(0, 1), (weights * self.scale).flatten(0, 1)).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return self._with_terms(out, logits, scores, chosen) if torch.is_grad_enabled() else out

    def _logits(self, x: Tensor) -> Tensor:
        """The router's `(B, T, E)`."""
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            kind = torch.promote_types(x.dtype, torch.float32)
            bias = None if self.router.bias is None else self.router.bias.to(kind)
            return F.linear(x.to(kind), self.router.weight.to(kind), bias)

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts `(B, T, k)` of each token."""
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if self.n_groups is not None:
            assert self.top_groups is not None
            grouped = scores.view(*scores.shape[:-1], self.n_groups, -1)
            best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(self.top_groups).indices
            within = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = grouped.masked_fill(~within[..., None], -math.inf).flatten(-2)
        return scores.topk(self.top_k).indices

    def _mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the experts of tokens `x (N, D)`; chosen, weights: `(N, k)`."""
        experts, order = chosen.flatten().sort(stable=True)
        self.rows.set(experts, self.n_experts)
        repeated = x[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        y: Tensor = self.experts(repeated[order])[order.argsort()]
        return (y.view(*weights.shape, -1) * weights[..., None].type_as(y)).sum(1)

    def _with_terms(self, x: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """The output `x`, with the terms of the objective and the router's metrics."""
        if is_collecting():
            counts = self.rows.counts
            self._load = counts.clone() if self._load is None else self._load + counts
        squared = squared_partition(logits)
        if self.z_loss is None:
            add_metric("router_z", squared)
        else:
            x = add_term(x, "router_z", squared, self.z_loss)
        if self.balance_loss is not None:
            x = add_term(x, "imbalance", self._imbalance(scores, chosen), self.balance_loss)
        return x

    def _imbalance(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """E * sum f P: 1 if all experts are chosen as often, up to E / k if always the same are."""
        shares = scores / scores.sum(-1, keepdim=True)
        if self.scope == "sequence":
            load = F.one_hot(chosen, self.n_experts).sum((1, 2))  # (B, E)
        else:
            load = self.rows.counts if self._load is None else self._load
            load = (sum_over_ranks(load.clone()) if is_collecting() else load).expand(len(scores), -1)
        frequencies = load / load.sum(-1, keepdim=True)
        total: Tensor = Weighted.apply(shares.mean(1), frequencies)  # type: ignore[no-untyped-call]
        return self.n_experts * total / len(scores)

    @torch.no_grad()
    def after_step(self) -> None:
        """Log how the step's tokens were spread over the experts, on all ranks, and move the bias."""
        assert self._load is not None
        load = sum_over_ranks(self._load)
        self._load = None
        for name, value in spread(load).items():
            add_metric(name, value)
        if self.choice_bias is not None:
            self.choice_bias.add_((load.float().mean() - load).sign(), alpha=self.balance_bias)

    def readings(self, x: Tensor) -> dict[str, Tensor]:
        """Metrics of the last forward pass, of `x (B, T, dim)`, over the tokens of all ranks."""
        z = squared_partition(self._logits(x))
        return spread(sum_over_ranks(self.rows.counts.clone())) | {"z": z}

    def flops_per_token(self, seq_len: int) -> float:
        """Twice the weights that a token meets: router, chosen and shared experts."""
        return 2.0 * sum(share * p.numel() for name, share, p in self._shares() if name.endswith("weight"))

    def active_params(self) -> int:
        """Parameters that one token uses."""
        return round(sum(share * p.numel() for _, share, p in self._shares()))

    def _shares(self) -> Iterable[tuple[str, float, nn.Parameter]]:
        """Every parameter and its name, with the share of it that one token uses."""
        of_experts = self.top_k / self.n_experts
        return ((n, of_experts if n.startswith("experts.") else 1.0, p) for n, p in self.named_parameters())


def spread(load: Tensor) -> dict[str, Tensor]:
    """How evenly tokens are spread over experts that so many `(E,)` chose: metrics by name."""
    shares = load / load.sum()
    return {
        "load_entropy": torch.special.entr(shares).sum(),
        "load_max": shares.max(),
        "dead_experts": (load == 0).sum().float(),
    }


def squared_partition(logits: Tensor) -> Tensor:
    """The mean squared log-partition of the router's `logits (B, T, E)`."""
    return logits.logsumexp(-1).square().mean()


def check_routing(n_experts: int, top_k: int, normalise: bool, n_groups: int | None, top_groups: int | None) -> None:
    """Raise ValueError for experts that cannot be chosen."""
    if not isinstance(n_experts, int) or n_experts < 2:
        raise ValueError(f"ffn.n_experts={n_experts}: must be a whole number of at least 2, to have a choice")
    if not isinstance(top_k, int) or not 1 <= top_k <= n_experts:
        raise ValueError(f"ffn.top_k={top_k}: must be a whole number from 1 to ffn.n_experts={n_experts}")
    if top_k == 1 and normalise:
        problem = "the only weight would be 1, which gives the router no gradient"
        raise ValueError(f"ffn.top_k=1: {problem}; set ffn.normalise=false, or choose more experts")
    if (n_groups is None) != (top_groups is None):
        raise ValueError(f"ffn.n_groups={n_groups}: needs ffn.top_groups, and that needs this; set both, or neither")
    if n_groups is None or top_groups is None:
        return
    if not (isinstance(n_groups, int) and isinstance(top_groups, int)):
        raise ValueError(f"ffn.n_groups={n_groups}: must be a whole number, as ffn.top_groups={top_groups}, or null")
    if n_groups < 1 or n_experts % n_groups:
        raise ValueError(f"ffn.n_groups={n_groups}: does not divide ffn.n_experts={n_experts}; choose a divisor")
    if not 1 <= top_groups <= n_groups or top_groups * n_experts // n_groups < top_k:
        problem = f"must be from 1 to ffn.n_groups={n_groups}, and have at least ffn.top_k={top_k} experts"
        raise ValueError(f"ffn.top_groups={top_groups}: {problem}")


def stack(one: nn.Module, n: int, rows: Rows) -> nn.Module:
    """The feed-forward `one` with an ExpertLinear of `n` in place of each nn.Linear. Raises ValueError if it cannot."""
    if own := [name for name, _ in one.named_parameters(recurse=False)]:
        raise ValueError(f"ffn.expert: {type(one).__name__}.{own[0]} is in no nn.Linear; choose another expert")
    for name, child in one.named_children():
        setattr(one, name, ExpertLinear(n, child, rows) if isinstance(child, nn.Linear) else stack(child, n, rows))
    return one
