"""Multi-head latent attention `(B, T, dim) -> (B, T, dim)`: the KV cache is one small latent vector per token."""

import torch
from torch import Tensor, nn

from .attention import SoftmaxAttention
from .attention_context import AttentionContext, MaskRule
from .encoding import rotate
from .init import ResidualOutput
from .mixer import norm_with, require_kv_heads
from .norm import Norm
from .state import LayerCache, Lookup, State, new_layer_cache
from .temperature import Temperature, apply_temperature


class LatentAttention(SoftmaxAttention):
    """Keys and values of all heads come from one latent per token (DeepSeek-V2, DeepSeek-AI 2024, section 2.1).

    A head's query and key have two parts: `nope_dim` without rotation, of keys from the latent, and `head_dim` that
    RoPE rotates, of keys from the input and shared by all heads (section 2.1.3). The cache holds latent and shared key.

    kv_rank: width of the latent, which the model's norm normalises.
    query_rank: width of a latent of its own for queries; None: they come from the input.
    value_dim: width of a head's values.
    latent_eps: of the norms of both latents (1e-6 in DeepSeek's code and MiniCPM3's); None: as the model's norms.
    scale: multiplies the scores (DeepSeek-V3 with YaRN); None: 1 / sqrt(nope_dim + head_dim).
    temperature: factors of the queries by position (Mistral 4); see `temperature.py`.
    kernel: see `GroupedQueryAttention`.
    causal: False in an encoder, whose queries see both sides.
    """

    scores = ("query", "query_up", "latent")

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm: Norm,
        kv_rank: int,
        nope_dim: int,
        value_dim: int,
        query_rank: int | None = None,
        latent_eps: float | None = None,
        scale: float | None = None,
        temperature: Temperature | None = None,
        kernel: str = "auto",
        causal: bool = True,
    ) -> None:
        require_kv_heads(n_kv_heads, n_heads, f"attention=mla has keys and values for each head, {n_heads}")
        sizes = {"kv_rank": kv_rank, "query_rank": query_rank, "nope_dim": nope_dim, "value_dim": value_dim}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"attention.{name}={size}: must be a positive whole number")
        norm = norm_with(norm, "latent_eps", "eps", latent_eps)
        scale = (nope_dim + head_dim) ** -0.5 if scale is None else scale
        super().__init__(
            n_heads * (nope_dim + head_dim + value_dim), kernel, scale, temperature, MaskRule(causal=causal)
        )
        self.n_heads, self.head_dim, self.kv_rank = n_heads, head_dim, kv_rank
        self.nope_dim, self.value_dim = nope_dim, value_dim
        width = n_heads * (nope_dim + head_dim)
        self.query_up: nn.Linear | None = None
        if query_rank is None:
            self.query = nn.Linear(dim, width, bias=False)
        else:
            self.query = nn.Linear(dim, query_rank, bias=False)
            self.query_norm = norm(query_rank)
            self.query_up = nn.Linear(query_rank, width, bias=False)
        self.latent = nn.Linear(dim, kv_rank + head_dim, bias=False)
        self.latent_norm = norm(kv_rank)
        self.latent_up = nn.Linear(kv_rank, n_heads * (nope_dim + value_dim), bias=False)
        self.output = ResidualOutput(n_heads * value_dim, dim, bias=False)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Attend from each token of `x (B, T, D)` to those before it, in `x` and in `state`."""
        query, latent = self.query(x), self.latent(x)
        if self.query_up is not None:
            query = self.query_up(self.query_norm(query))
        query = query.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)
        query = apply_temperature(query, self.temperature, context)  # which a rotation keeps
        plain, turned = query.split_with_sizes((self.nope_dim, self.head_dim), 3)
        latent, shared = latent.unsqueeze(1).split_with_sizes((self.kv_rank, self.head_dim), 3)  # of a single head
        latent = self.latent_norm(latent)
        if context.rotation is not None:
            turned, shared = rotate(context.rotation, turned, shared)
        lookup = None
        if state is not None:
            assert isinstance(state, LayerCache)
            lookup = context.lookup(state.slots)
            (seen,) = state.write([torch.cat((latent, shared), 3).to(state.tensors[0].dtype)], lookup)
        if lookup is not None and (context.longest > 0 or x.shape[1] == 1):
            mixed = self._attend_absorbed(plain, turned, seen.type_as(x), context, lookup)
        else:  # all keys are new: with keys and values of each head, attention costs fewer FLOPs
            heads = self.latent_up(latent[:, 0]).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            key, value = heads.split_with_sizes((self.nope_dim, self.value_dim), 3)
            key = torch.cat((key, shared.expand(-1, self.n_heads, -1, -1)), 3)
            mixed = self.attend(torch.cat((plain, turned), 3), key, value, context, lookup)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _attend_absorbed(
        self, plain: Tensor, turned: Tensor, seen: Tensor, context: AttentionContext, lookup: Lookup
    ) -> Tensor:
        """Attention output `(B, H, T, Dv)` from cached latents `seen (B, 1, S, kv_rank + Dh)`.

        The up-projections are applied to queries and to the output instead (section 2.1.2).
        """
        up = self.latent_up.weight.view(self.n_heads, -1, self.kv_rank)
        to_key, to_value = up.split_with_sizes((self.nope_dim, self.value_dim), 1)
        query = torch.cat((torch.einsum("bhtn,hnr->bhtr", plain, to_key), turned), 3)
        mixed = self.attend(query, seen, seen, context, lookup)[..., : self.kv_rank]
        return torch.einsum("bhtr,hvr->bhtv", mixed, to_value)

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """An empty cache for `length` tokens."""
        return new_layer_cache(batch_size, 1, length, self.kv_rank + self.head_dim, dtype, device, parts=1)
