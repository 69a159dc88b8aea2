"""Self-attention `(B, T, dim) -> (B, T, dim)`: multi-head, grouped-query and multi-query."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_context import CAUSAL, AttentionContext, MaskRule
from .attention_options import VALUES, Sinks, ValueResidual, check_qk_norm, norm_of_heads
from .blocked_attention import blocked_attention, blocks_pay, compute_type
from .convolution import ShortConv
from .encoding import HOOKS, Position, Relation, has_hook, rotate
from .init import ResidualOutput, check_positive
from .mixer import Mixer, linear_flops, require_kv_heads
from .norm import Norm
from .state import LayerCache, Lookup, State, new_layer_cache
from .temperature import Temperature, apply_temperature

KERNELS = ("auto", "sdpa", "blocks", "reference")


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    scale: float | None = None,
    relation: Relation | None = None,
) -> Tensor:
    """Scaled dot-product attention in plain PyTorch (Vaswani et al. 2017, eq. 1), with optional soft-capping.

    `query (B, H, Tq, Dh)`, `key` and `value (B, Hkv, Tk, Dh)`, additive `mask` that broadcasts to `(B, H, Tq, Tk)`.
    `scale` multiplies the scores (None: 1 / sqrt(Dh)), and `softcap` bounds them to ±softcap by a tanh before the mask
    (Gemma 2, section 2). `relation` has vectors that are added to keys and values. Softmax runs in float32.
    """
    weights: Tensor = attention_scores(query, key, mask, softcap, scale, relation).softmax(-1).type_as(value)
    mixed = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return mixed if relation is None else relation.mix(mixed, weights)


def attention_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    scale: float | None = None,
    relation: Relation | None = None,
) -> Tensor:
    """The scores before the softmax, float32 `(B, H, Tq, Tk)`; arguments as in `reference_attention`."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores: Tensor = (query @ key.transpose(-1, -2)).float()
    if relation is not None:
        scores = scores + relation.scores(query, key.shape[2])
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores + mask


class SoftmaxAttention(Mixer):
    """Base class of softmax attention: selects the kernel, applies the mask and counts FLOPs.

    widths: key width plus value width, summed over heads; sets the FLOPs per visible key. Other arguments: see
    `GroupedQueryAttention`.
    """

    documents = True
    reads: tuple[str, ...] = ("rotation", "bias")
    n_heads: int

    def __init__(
        self,
        widths: int,
        kernel: str,
        scale: float | None,
        temperature: Temperature | None,
        mask_rule: MaskRule = CAUSAL,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"attention.kernel={kernel}: unknown; choose {', '.join(KERNELS)}")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"attention.softcap={softcap}: must be positive, or null for none")
        if kernel in ("sdpa", "blocks") and softcap is not None:
            raise ValueError(f"attention.kernel={kernel}: it cannot cap scores; choose auto, or attention.softcap=null")
        check_positive("attention.scale", scale)
        self.mask_rule, self.scale, self.temperature, self.softcap = mask_rule, scale, temperature, softcap
        self.wanted = kernel
        self.kernel = ("sdpa" if softcap is None else "reference") if kernel == "auto" else kernel
        self.sinks: Sinks | None = None
        self._widths = widths

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token, averaged over a sequence of `seq_len` tokens, counting visible keys only."""
        return self._flops(self.mask_rule.mean_keys(seq_len))

    def flops_per_token_dense(self, seq_len: int) -> float:
        """The same with all `seq_len` keys counted for every query."""
        return self._flops(seq_len)

    def _flops(self, keys: float) -> float:
        """FLOPs of the projections, and of both products with `keys` keys: scores, and weighted values."""
        keys += self.sinks is not None
        return linear_flops(self) + 2 * self._widths * keys

    def kernel_in_training(self, batch_size: int, length: int, device: str, kind: torch.dtype) -> str:
        """The kernel for windows of `length` tokens."""
        return self.kernel_for((batch_size, self.n_heads, length, length), device, kind)

    def kernel_for(self, shape: Sequence[int], device: str, kind: torch.dtype) -> str:
        """The kernel for scores of `shape (B, H, Tq, Tk)` from products in this type on this kind of device."""
        is_free = self.wanted == "auto" and self.kernel == "sdpa"
        return "blocks" if is_free and blocks_pay(shape, device, kind) else self.kernel

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext, lookup: Lookup | None
    ) -> Tensor:
        """Attention output `(B, H, Tq, Dv)`; builds a mask where one is needed: the fused kernel is faster without."""
        kernel = self.kernel_for((*query.shape[:3], key.shape[2]), query.device.type, compute_type(query))
        is_fused = kernel == "sdpa"
        needs_mask = not is_fused or self.sinks is not None or context.needs_mask(self.mask_rule, lookup)
        mask_type = torch.float32 if kernel == "reference" else query.dtype
        mask = context.mask(self.mask_rule, lookup, mask_type) if needs_mask else None
        if self.sinks is not None:
            key, value, mask = self.sinks(key, value, mask)
        if kernel == "blocks":
            assert mask is not None
            rule = self.mask_rule if self.sinks is None else MaskRule(causal=False)  # the sink is the last key
            seen = partial(context.keys_seen, rule, key.shape[2])
            return blocked_attention(query, key, value, mask, self.scale, seen)
        if not is_fused:
            assert mask is not None
            relation = context.relation(context.key_positions(lookup))
            return reference_attention(query, key, value, mask, self.softcap, self.scale, relation)
        n_kv_heads, width = key.shape[1], value.shape[3]
        if lookup is not None and query.shape[2] == 1:
            # A single token leaves the time dimension free for the heads that share a key head, so that the kernel
            # reads each key once and copies none.
            if mask is not None and (context.biased or self.sinks is not None):
                mask = mask.reshape(mask.shape[0], n_kv_heads, -1, mask.shape[-1])
            groups = query.reshape(query.shape[0], n_kv_heads, -1, query.shape[3])  # (B, Hkv, H / Hkv, Dh)
            mixed = F.scaled_dot_product_attention(groups, key, value, attn_mask=mask, scale=self.scale)
            return mixed.flatten(1, 2).unsqueeze(2)
        shared = n_kv_heads != query.shape[1]
        if shared and must_repeat_heads(query, needs_mask):
            key, value = (x[:, :, None].expand(-1, -1, query.shape[1] // n_kv_heads, -1, -1) for x in (key, value))
            key, value, shared = key.flatten(1, 2), value.flatten(1, 2), False
        padding = key.shape[3] - width  # fused kernels want values as wide as keys
        if padding > 0:
            value = F.pad(value, (0, padding))
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=self.mask_rule.causal and not needs_mask,
            scale=self.scale,
            enable_gqa=shared,
        )
        return mixed[..., :width] if padding > 0 else mixed


def must_repeat_heads(query: Tensor, masked: bool, on_cuda: bool = False) -> bool:
    """Whether keys and values must be repeated, because no fused kernel for these queries supports grouped heads.

    On CUDA, only flash attention does (torch 2.13), which has neither masks nor float32.
    """
    return (on_cuda or query.is_cuda) and (masked or query.dtype == torch.float32)


class GroupedQueryAttention(SoftmaxAttention):
    """Attention in which n_heads / n_kv_heads query heads share a key and value head (Ainslie et al. 2023, sec. 2.2).

    window, chunk, prefix: which keys a query sees beside the rule that they precede it, see `MaskRule`; None: any.
    scale: multiplies the scores (muP, Yang et al. 2022, definition 4.1: 1 / head_dim); None: 1 / sqrt(head_dim).
    temperature: factors of the queries by position; see `temperature.py`.
    clip_qkv: bound the projected queries, keys and values to ±clip_qkv (MPT, DBRX, OLMo).
    qk_norm: normalise queries and keys with the model's norm (Henry et al. 2020): "head" over each head (Qwen 3),
        "projection" over all heads at once (OLMo 2); None does not.
    qk_gain: of that norm: "shared" by all heads, "heads" for one per head (Cohere, StableLM 2), "none" (Llama 4).
    qk_bias: whether that norm has a bias; None: as the model's.
    qk_norm_rotated: normalise each head after the rotation instead of before (nanochat).
    softcap: bound the scores to ±softcap (Gemma 2); needs the reference, since fused kernels cannot.
    gate: multiply what each head mixed, before the output projection, by a sigmoid of the layer's input (Qiu et al.
        2025, section 2.2, G1): "head" with one number per head, "element" with one per dimension (Qwen3-Next).
    sinks: one more key of zeros with a trained score per head; see `Sinks`.
    value_residual: weight of the first layer's values in those of later layers; see `ValueResidual`.
    conv: width of short convolutions of queries, keys and values, which are added to them (Allen-Zhu 2025, canon B).
    kernel: "sdpa" is PyTorch's fused attention, "blocks" that of `blocked_attention.py`, "reference" the written-out
        one. "auto" is the fused one, or blocks where they are faster, if possible.
    causal: False in an encoder, whose queries see both sides.
    """

    int8_state = True
    reads: tuple[str, ...] = HOOKS
    scores = ("query", "key", "output_gate")  # the maps that do not scale what attention adds

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        norm: Norm,
        query_bias: bool = False,
        key_bias: bool = False,
        value_bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        chunk: int | None = None,
        prefix: int | None = None,
        scale: float | None = None,
        temperature: Temperature | None = None,
        clip_qkv: float | None = None,
        qk_norm: str | None = None,
        qk_gain: str = "shared",
        qk_bias: bool | None = None,
        qk_norm_rotated: bool = False,
        softcap: float | None = None,
        gate: str | None = None,
        sinks: bool = False,
        value_residual: float | str | None = None,
        conv: int | None = None,
        kernel: str = "auto",
        layer: int = 0,
        n_layers: int = 1,
        causal: bool = True,
    ) -> None:
        rule = MaskRule(window, chunk, prefix, causal)
        super().__init__(2 * n_heads * head_dim, kernel, scale, temperature, rule, softcap)
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.check_heads()
        for name, value, least in (("window", window, 1), ("chunk", chunk, 1), ("prefix", prefix, 2)):
            if value is not None and value < least:
                raise ValueError(f"attention.{name}={value}: must be at least {least}, or null for none")
        if window is not None and chunk is not None:
            raise ValueError(
                f"attention.chunk={chunk}: there is attention.window={window} too; set one of them to null"
            )
        check_positive("attention.clip_qkv", clip_qkv)
        if gate not in (None, "head", "element"):
            raise ValueError(f"attention.gate={gate}: unknown; choose head, element or null")
        if value_residual is not None and n_layers == 1:
            raise ValueError(
                f"attention.value_residual={value_residual}: the only layer is the first; set it to null, or add layers"
            )
        self.max_state_tokens, self.prefix, self.clip_qkv = rule.reach, prefix or 0, clip_qkv
        self.query = nn.Linear(dim, n_heads * head_dim, bias=query_bias)
        self.key = nn.Linear(dim, n_kv_heads * head_dim, bias=key_bias)
        self.value = nn.Linear(dim, n_kv_heads * head_dim, bias=value_bias)
        self.convs = nn.ModuleDict()
        if conv is not None:
            for part in ("query", "key", "value"):
                self.convs[part] = ShortConv(getattr(self, part).out_features, conv)
        self.output = ResidualOutput(n_heads * head_dim, dim, bias=output_bias)
        self.output_gate: nn.Linear | None = None
        if gate is not None:
            self.output_gate = nn.Linear(dim, n_heads * (1 if gate == "head" else head_dim), bias=False)
        if sinks:
            self.sinks = Sinks(n_heads)
        mixing = None if value_residual is None else ValueResidual(value_residual)
        self.value_residual = mixing if layer else None
        self.keeps_values = False
        check_qk_norm(qk_norm, qk_gain, qk_bias, qk_norm_rotated)
        self.qk_norm, self.qk_norm_rotated = qk_norm, qk_norm_rotated
        if qk_norm is not None:
            self.query_norm = norm_of_heads(norm, n_heads, head_dim, qk_norm, qk_gain, qk_bias)
            self.key_norm = norm_of_heads(norm, n_kv_heads, head_dim, qk_norm, qk_gain, qk_bias)

    def check_heads(self) -> None:
        """Raise ValueError unless the kv heads divide the heads."""
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            divisors = ", ".join(str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0)
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads}: does not divide n_heads={self.n_heads}; choose one of {divisors}"
            )

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Attend from each token of `x (B, T, D)` to the keys it may see, in `x` and in `state`."""
        cache, pasts = self._parts(state)
        query, key, value = self._heads(x, context, pasts)
        if self.keeps_values:
            context.shared[VALUES] = value
        if self.value_residual is not None:
            value = self.value_residual(value, context.shared[VALUES])
        if context.rotation is not None:
            query, key = rotate(context.rotation, query, key)
        if self.qk_norm_rotated:
            query, key = self.query_norm(query), self.key_norm(key)
        query = apply_temperature(query, self.temperature, context)
        lookup = None
        if cache is not None:
            lookup = context.lookup(cache.slots)
            key, value = (seen.type_as(query) for seen in cache.update(key, value, lookup))
        mixed = self.attend(query, key, value, context, lookup).transpose(1, 2)
        if self.output_gate is not None:
            mixed = mixed * self.output_gate(x).sigmoid().unflatten(2, (self.n_heads, -1))
        return self.output(mixed.flatten(2))  # type: ignore[no-any-return]

    def bind_position(self, position: Position) -> None:
        """Select the reference kernel for encodings that add vectors to keys and values: no fused kernel does."""
        if has_hook(position, "relation"):
            if self.wanted in ("sdpa", "blocks"):
                raise ValueError(
                    f"attention.kernel={self.wanted}: it cannot add to keys and values, as position=shaw does; "
                    f"choose auto"
                )
            self.kernel = "reference"

    def bind_first_layer(self, first: Mixer) -> None:
        """Make the first layer share its values, if this layer has a value residual."""
        if self.value_residual is None:
            return
        sizes = (self.n_kv_heads, self.head_dim)
        if not isinstance(first, GroupedQueryAttention) or (first.n_kv_heads, first.head_dim) != sizes:
            raise ValueError(
                f"attention.value_residual: the first layer has not {self.n_kv_heads} heads of {self.head_dim} values, "
                f"as a later one has; give them the same attention and n_kv_heads, or set it to null"
            )
        first.keeps_values = True

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
        """An empty cache for `length` tokens; with a window or chunks, for at most as many tokens as these span."""
        slots = min(length, self.mask_rule.reach or length)
        cache = new_layer_cache(batch_size, self.n_kv_heads, slots, self.head_dim, dtype, device)
        kind = torch.float32 if dtype == torch.int8 else dtype
        convs: Any = self.convs.values()
        return LayerCache([*cache.tensors, *(conv.new_past(batch_size, device, kind) for conv in convs)])

    def state_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return new_layer_cache(1, self.n_kv_heads, 1, self.head_dim, dtype, "meta").nbytes

    def _parts(self, state: State | None) -> tuple[LayerCache | None, list[Tensor | None]]:
        """The cache in a state, and what the convolutions have seen."""
        if state is None:
            return None, [None] * len(self.convs)
        end = len(state.tensors) - len(self.convs)
        return LayerCache(state.tensors[:end]), [*state.tensors[end:]]

    def _heads(self, x: Tensor, context: AttentionContext, pasts: list[Tensor | None]) -> tuple[Tensor, ...]:
        """Project `x (B, T, D)` to query `(B, H, T, Dh)`, key and value `(B, Hkv, T, Dh)`."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.convs:
            parts = zip((query, key, value), self.convs.values(), pasts, strict=True)
            query, key, value = (part + conv(part, context, past) for part, conv, past in parts)
        if self.clip_qkv is not None:
            query, key, value = (p.clamp(-self.clip_qkv, self.clip_qkv) for p in (query, key, value))
        if self.qk_norm == "projection":
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (p.view(*p.shape[:-1], -1, self.head_dim).transpose(1, 2) for p in (query, key, value))
        if self.qk_norm == "head" and not self.qk_norm_rotated:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value


class MultiHeadAttention(GroupedQueryAttention):
    """A key and value head for every query head (Vaswani et al. 2017, section 3.2.2)."""

    def check_heads(self) -> None:
        """Raise ValueError unless there are as many kv heads as heads."""
        require_kv_heads(self.n_kv_heads, self.n_heads, f"attention=mha has one kv head per head, {self.n_heads}")


class MultiQueryAttention(GroupedQueryAttention):
    """One key and value head for all query heads (Shazeer 2019, section 3)."""

    def check_heads(self) -> None:
        """Raise ValueError unless there is one kv head."""
        require_kv_heads(self.n_kv_heads, 1, "attention=mqa has one kv head")
