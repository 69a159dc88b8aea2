"""Recurrent mixers: a matrix per head in a KV cache's place, of one size at any context."""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_context import AttentionContext
from .convolution import ShortConv
from .encoding import rotate
from .init import ResidualOutput
from .mixer import Mixer, linear_flops, norm_with, require_kv_heads
from .norm import Norm
from .recurrence import chunked_flops, recur, recurrence_flops
from .state import State

# elu(x) + 1 is written so that it is never 0, since outputs are divided by its products.
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu": lambda x: x.clamp(max=0).exp() + x.relu(),
}
DECAYS = ("head", "channel")
GATES = ("silu", "sigmoid")
NO_KV_HEADS = "this attention has no key and value heads to share"
STEPS = (1e-3, 1e-1)  # of time, with which a state decays at first, log-uniform (Mamba 2, as published)
RATES = (1.0, 16.0)  # of the decay, times the step


class Recurrent(Mixer):
    """Base class: `n_heads` states `(key_dim, value_dim)`; subclasses make queries, keys, values and decays.

    chunk_size: tokens that are computed at once, which changes nothing but speed. delta: whether it has the delta rule.
    """

    documents = True
    max_state_tokens = 0
    kernel = "chunks"

    def __init__(self, n_heads: int, key_dim: int, value_dim: int, chunk_size: int, delta: bool = False) -> None:
        super().__init__()
        sizes = {"value_heads": n_heads, "key_dim": key_dim, "value_dim": value_dim, "chunk_size": chunk_size}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"attention.{name}={size}: must be a positive whole number")
        self.n_heads, self.key_dim, self.value_dim = n_heads, key_dim, value_dim
        self.chunk_size, self.delta = chunk_size, delta

    def make_heads(self, dim: int, key_heads: int, value_dim: int, conv: int | None, bias: bool = False) -> None:
        """Make the projections to heads; each of `key_heads` queries and keys serves as many values."""
        repeats = self.n_heads // key_heads
        self.query, self.key = (Heads(dim, key_heads, self.key_dim, conv, bias, repeats) for _ in range(2))
        self.value = Heads(dim, self.n_heads, value_dim, conv, bias)

    def heads(self, x: Tensor, context: AttentionContext, state: State | None) -> Iterator[Tensor]:
        """Queries, keys and values of `x (B, T, D)`: `(B, H, T, width)`; updates the convolutions' states in place."""
        pasts = state.tensors[1:] if state is not None and self.convs else (None, None, None)
        parts = zip((self.query, self.key, self.value), pasts, strict=True)
        return (part(x, context, past) for part, past in parts)

    def recur(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        context: AttentionContext,
        state: State | None,
        beta: Tensor | None = None,
    ) -> Tensor:
        """The heads' outputs `(B, T, H, Dv)`, from arguments `(B, H, T, ...)`; see `recurrence.recur`."""
        sizes = (len(value), self.n_heads, self.key_dim, self.value_dim)
        first = value.new_zeros(sizes) if state is None else state.tensors[0]
        starts = None if context.starts is None else (context.positions == 0).reshape(-1, value.shape[2])
        out, last = recur(query, key, value, decay, beta, first, starts, self.chunk_size)
        if state is not None:
            state.tensors[0].copy_(last)
        return out.transpose(1, 2).type_as(value)

    @property
    def convs(self) -> list[ShortConv]:
        """The short convolutions, in the order of their states."""
        return [module for module in self.modules() if isinstance(module, ShortConv)]

    def flops_per_token(self, seq_len: int) -> float:
        """Of projections, convolutions and the recurrence."""
        return linear_flops(self) + self.n_heads * recurrence_flops(self.key_dim, self.value_dim, self.delta)

    def flops_per_token_dense(self, seq_len: int) -> float:
        """The same, with the recurrence in chunks."""
        of_head = chunked_flops(self.key_dim, self.value_dim, self.delta, seq_len, self.chunk_size)
        return linear_flops(self) + self.n_heads * of_head

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> State:
        """The matrices in float32, whatever the `dtype`, and the last tokens that convolutions see."""
        kind = torch.promote_types(dtype, torch.float32)
        matrices = torch.zeros(batch_size, self.n_heads, self.key_dim, self.value_dim, device=device, dtype=kind)
        return State([matrices, *(conv.new_past(batch_size, device, dtype) for conv in self.convs)])


class Decay(nn.Module):
    """A state's decay, which the input sets: g = -exp(rate) softplus(step + bias) (Mamba 2; gated DeltaNet).

    width: decays per head. rank: of the map to the steps; None: full.
    """

    def __init__(self, dim: int, n_heads: int, width: int = 1, rank: int | None = None) -> None:
        super().__init__()
        self.n_heads, self.width = n_heads, width
        self.step = linear(dim, n_heads * width, rank)
        self.rate = nn.Parameter(torch.empty(n_heads))
        self.bias = nn.Parameter(torch.empty(n_heads * width))

    def reset_parameters(self) -> None:
        """Draw rates from RATES and steps from STEPS."""
        with torch.no_grad():
            self.rate.uniform_(*RATES).log_()
            steps = self.bias.uniform_(*map(math.log, STEPS)).exp_()
            steps += torch.log(-torch.expm1(-steps))  # softplus, inverted

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The decays g and the steps of `x (B, T, D)`: `(B, H, T, width)`, float32 or better."""
        kind = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(self.step(x).to(kind) + self.bias.to(kind))
        steps = steps.view(*x.shape[:-1], self.n_heads, self.width).transpose(1, 2)
        return -self.rate.to(kind).exp()[:, None, None] * steps, steps


class Heads(nn.Module):
    """Projects tokens to heads, each `repeats` times, through a short convolution and SiLU unless `conv` is None.

    width: of a head. conv: width of the convolution. bias: whether that has one.
    """

    def __init__(
        self, dim: int, n_heads: int, width: int, conv: int | None, bias: bool = False, repeats: int = 1
    ) -> None:
        super().__init__()
        self.width, self.repeats = width, repeats
        self.project = nn.Linear(dim, n_heads * width, bias=False)
        self.conv = None if conv is None else ShortConv(n_heads * width, conv, bias)

    def forward(self, x: Tensor, context: AttentionContext, past: Tensor | None) -> Tensor:
        """Map `x (B, T, D)` to `(B, H, T, width)`."""
        heads = self.project(x)
        if self.conv is not None:
            heads = F.silu(self.conv(heads, context, past))
        heads = heads.view(*heads.shape[:-1], -1, self.width).transpose(1, 2)
        return heads.repeat_interleave(self.repeats, 1) if self.repeats > 1 else heads  # type: ignore[no-any-return]


class Gate(nn.Module):
    """Multiplies the normalised outputs of heads by an activation of the input: SiLU, or a low-rank sigmoid."""

    def __init__(self, dim: int, width: int, kind: str, rank: int) -> None:
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"attention.gate={kind}: unknown; choose {' or '.join(GATES)}, or null for none")
        self.activation = F.silu if kind == "silu" else torch.sigmoid
        self.project = linear(dim, width, None if kind == "silu" else rank)

    def forward(self, out: Tensor, x: Tensor) -> Tensor:
        """Gate `out (B, T, width)` by `x (B, T, D)`."""
        return out * self.activation(self.project(x))


class LinearAttention(Recurrent):
    """Attention without a softmax: features of queries and keys in its place (Katharopoulos et al. 2020, eq. 9).

    features: identity | elu, which is elu(x) + 1. normalise: whether outputs are divided by the sum of their weights;
    else each head's are normalised as `norm` does (RetNet, Sun et al. 2023, eq. 8). decay: retnet, a constant
    1 - 2^(-5 - h) of head h, or null for none. conv: width of short convolutions of queries, keys and values. gate: of
    outputs. Queries are divided by sqrt(key_dim). Queries and keys as wide as head_dim may be rotated by the position
    encoding (RetNet, eq. 5), but not with `normalise`: the sum of their weights might then be 0.
    """

    scores = ("query", "key")  # what follows is normalised

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm: Norm,
        key_dim: int,
        value_dim: int,
        features: str = "elu",
        normalise: bool = True,
        decay: str | None = None,
        conv: int | None = None,
        gate: str | None = None,
        chunk_size: int = 64,
    ) -> None:
        super().__init__(n_heads, key_dim, value_dim + normalise, chunk_size)
        require_kv_heads(n_kv_heads, n_heads, NO_KV_HEADS)
        if features not in FEATURES:
            raise ValueError(f"attention.features={features}: unknown; choose {' or '.join(FEATURES)}")
        if decay not in (None, "retnet"):
            raise ValueError(f"attention.decay={decay}: unknown; choose retnet, or null for none")
        if normalise and features == "identity":
            raise ValueError(
                "attention.normalise=true: identity features may have negative weights, whose sum may be 0; choose "
                "features=elu, or normalise=false"
            )
        self.features, self.normalise, self.decay = FEATURES[features], normalise, decay
        self.reads = ("rotation",) if key_dim == head_dim and not normalise else ()
        self.make_heads(dim, n_heads, value_dim, conv)
        self.norm = None if normalise else norm(value_dim)
        self.gate = None if gate is None else Gate(dim, n_heads * value_dim, gate, value_dim)
        self.output = ResidualOutput(n_heads * value_dim, dim, bias=False)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Mix tokens `x (B, T, D)`; updates the state in place."""
        query, key, value = self.heads(x, context, state)
        kind = torch.promote_types(x.dtype, torch.float32)
        query, key = self.features(query.to(kind)) * self.key_dim**-0.5, self.features(key.to(kind))
        if context.rotation is not None:
            query, key = rotate(context.rotation, query, key)
        if self.normalise:
            value = F.pad(value.to(kind), (0, 1), value=1.0)
        out = self.recur(query, key, value, self._decay(query), context, state)
        if self.norm is not None:
            out = self.norm(out)
        else:  # by a positive number, also where all weights are too small for float32
            out = (out[..., :-1] / out[..., -1:].clamp(min=torch.finfo(kind).tiny)).type_as(x)
        out = out.flatten(2)
        return self.output(out if self.gate is None else self.gate(out, x))  # type: ignore[no-any-return]

    def _decay(self, query: Tensor) -> Tensor:
        """The decays `(B, H, T, 1)`."""
        decays = query.new_zeros(self.n_heads, dtype=torch.float32)
        if self.decay is not None:
            decays = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.n_heads, device=query.device)))
        return decays[:, None, None].expand(*query.shape[:3], 1)


class GatedDelta(Recurrent):
    """The gated delta rule: writes replace what the state holds of a key (gated DeltaNet, Yang et al. 2024, eq. 10).

    value_heads: number of heads, and so of states. key_heads: of queries and keys, each of which serves as many heads.
    decay: head, or channel of the key, through a map of rank value_dim (Kimi Linear, section 3). conv: width of short
    convolutions of queries, keys and values; null: none. gate: silu, or sigmoid through a map of rank value_dim, or
    null. negative: whether beta is up to 2, so that the state has negative eigenvalues (Grazzi et al. 2024). norm_eps:
    of the norm of heads (OLMo Hybrid), and norm_offset: its unit_offset (Qwen3-Next); None: as the model's norms.
    Queries and keys have length 1.
    """

    scores = ("query", "key")

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        norm: Norm,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        decay: str = "head",
        conv: int | None = 4,
        gate: str | None = "silu",
        negative: bool = False,
        norm_eps: float | None = None,
        norm_offset: bool | None = None,
        chunk_size: int = 64,
    ) -> None:
        super().__init__(value_heads, key_dim, value_dim, chunk_size, delta=True)
        require_kv_heads(n_kv_heads, n_heads, NO_KV_HEADS)
        if not isinstance(key_heads, int) or key_heads < 1 or value_heads % key_heads:
            raise ValueError(f"attention.key_heads={key_heads}: must divide attention.value_heads={value_heads}")
        if decay not in DECAYS:
            raise ValueError(f"attention.decay={decay}: unknown; choose {' or '.join(DECAYS)}")
        self.largest = 2.0 if negative else 1.0
        self.make_heads(dim, key_heads, value_dim, conv)
        of_channels = (key_dim, value_dim) if decay == "channel" else (1, None)
        self.decay = Decay(dim, value_heads, *of_channels)
        self.beta = nn.Linear(dim, value_heads, bias=False)
        norm = norm_with(norm, "norm_eps", "eps", norm_eps)
        self.norm = norm_with(norm, "norm_offset", "unit_offset", norm_offset)(value_dim)
        self.gate = None if gate is None else Gate(dim, value_heads * value_dim, gate, value_dim)
        self.output = ResidualOutput(value_heads * value_dim, dim, bias=False)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Mix tokens `x (B, T, D)`; updates the state in place."""
        query, key, value = self.heads(x, context, state)
        query, key = unit(query) * self.key_dim**-0.5, unit(key)
        beta = self.largest * self.beta(x).sigmoid().mT[..., None]
        out = self.recur(query, key, value, self.decay(x)[0], context, state, beta)
        out = self.norm(out).flatten(2)
        return self.output(out if self.gate is None else self.gate(out, x))  # type: ignore[no-any-return]


class Mamba2(Recurrent):
    """A state space whose states decay by one number per head (Dao & Gu 2024, section 7).

    value_heads: their number, each with values of width value_dim and a state (key_dim, value_dim). n_groups: of heads
    that share queries and keys (C and B), and are normalised together. conv: width of short convolutions.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        norm: Norm,
        value_heads: int,
        key_dim: int = 128,
        value_dim: int = 64,
        n_groups: int = 1,
        conv: int = 4,
        chunk_size: int = 64,
    ) -> None:
        require_kv_heads(n_kv_heads, n_heads, NO_KV_HEADS)
        super().__init__(value_heads, key_dim, value_dim, chunk_size)
        if not isinstance(n_groups, int) or n_groups < 1 or value_heads % n_groups:
            raise ValueError(f"attention.n_groups={n_groups}: must divide the {value_heads} heads")
        self.make_heads(dim, n_groups, value_dim, conv, bias=True)
        self.decay = Decay(dim, value_heads)
        self.skip = Skip(value_heads)
        self.gate = nn.Linear(dim, value_heads * value_dim, bias=False)
        self.n_groups = n_groups
        self.norm = norm(value_heads * value_dim // n_groups, **{"heads": n_groups} if n_groups > 1 else {})
        self.output = ResidualOutput(value_heads * value_dim, dim, bias=False)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Mix tokens `x (B, T, D)`; updates the state in place."""
        query, key, value = self.heads(x, context, state)
        decay, steps = self.decay(x)
        out = self.recur(query, key, value * steps, decay, context, state).type_as(value) + self.skip(value)
        gated = (out.flatten(2) * F.silu(self.gate(x))).unflatten(-1, (self.n_groups, -1)).transpose(1, 2)
        return self.output(self.norm(gated).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Skip(nn.Module):
    """A learned number per head, times its values."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def reset_parameters(self) -> None:
        """Begin with 1."""
        nn.init.ones_(self.weight)

    def forward(self, value: Tensor) -> Tensor:
        """Map `value (B, H, T, Dv)` to `(B, T, H, Dv)`."""
        return (value * self.weight[:, None, None]).transpose(1, 2)


def linear(dim: int, width: int, rank: int | None) -> nn.Module:
    """A linear map, of this rank if it is not None."""
    if rank is None:
        return nn.Linear(dim, width, bias=False)
    return nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, width, bias=False))


def unit(x: Tensor) -> Tensor:
    """Vectors `(..., D)` of length 1, as `transformers` and the published kernels make them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
