"""The decoder-only language model: embeddings, blocks, head. It knows no component by name, only their factories."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from .attention import GroupedQueryAttention, Layout, Norm
from .block import Block
from .cache import KVCache, LayerCache
from .embedding import Embedding
from .init import WeightInit, initialise
from .position import Position


class Decoder(nn.Module):
    """A decoder built from one component per slot; each slot is a factory that gets the sizes it needs.

    vocab_size, dim, n_layers, n_heads, n_kv_heads, head_dim, hidden_dim, max_seq_len: sizes, named as in LLaMA.
    dropout: on the embeddings and on every residual branch (Vaswani et al. 2017, section 5.4).
    embedding, norm, position, attention, ffn, block, init: the components.
    seed: of the initial parameters; see `init.py`.
    Raises ValueError, its message beginning with the setting at fault.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        hidden_dim: int,
        max_seq_len: int,
        embedding: Callable[..., Embedding],
        norm: Norm,
        position: Callable[..., Position],
        attention: Callable[..., nn.Module],
        ffn: Callable[..., nn.Module],
        block: Callable[..., Block],
        init: Callable[..., WeightInit],
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(
            vocab_size=vocab_size,
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            hidden_dim=hidden_dim,
            max_seq_len=max_seq_len,
        )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout}: must be at least 0 and less than 1")
        self.vocab_size, self.dim, self.max_seq_len = vocab_size, dim, max_seq_len
        self.embedding = embedding(vocab_size=vocab_size, dim=dim, norm=norm)
        self.position = position(dim=dim, n_heads=n_heads, head_dim=head_dim, max_seq_len=max_seq_len)
        self.dropout = nn.Dropout(dropout)
        heads = {"dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "norm": norm}
        self.blocks = nn.ModuleList(
            block(
                dim=dim,
                attention=partial(attention, layer=layer, **heads),
                ffn=partial(ffn, dim=dim, hidden_dim=hidden_dim),
                norm=norm,
                dropout=dropout,
            )
            for layer in range(n_layers)
        )
        self.norm = norm(dim) if self.blocks[-1].final_norm else None
        initialise(self, init(n_layers=n_layers), seed)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits `(B, T, V)` for the token after each of `tokens (B, T)`, which follow those in `cache`.

        Raises ValueError where the position encoding, or the cache, has come to its end.
        """
        return self.embedding.logits(self.read(tokens, cache))

    def read(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the head turns into logits, `(B, T, D)`; see `forward`."""
        T = tokens.shape[1]
        if cache is None:
            self.check_positions(T)
            return self.transform(tokens, Layout(self.position, torch.arange(T, device=tokens.device)))
        shortest, longest = cache.reserve(T)
        self.check_positions(longest + T)
        positions = cache.next_positions(T, tokens.device)
        x = self.transform(tokens, Layout(self.position, positions, shortest, longest), cache.layers)
        cache.lengths += T
        return x

    def transform(self, tokens: Tensor, layout: Layout, caches: Sequence[LayerCache] | None = None) -> Tensor:
        """Embeddings, blocks and the last norm: `tokens (B, T)` to `(B, T, D)`, keeping keys and values in `caches`."""
        x = self.dropout(self.position.embed(self.embedding(tokens), layout.positions))
        for i, block in enumerate(self.blocks):
            x = block(x, layout, None if caches is None else caches[i])
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]

    def check_positions(self, length: int) -> None:
        """Raise ValueError where the position encoding ends before `length` tokens."""
        if self.position.max_positions is not None and length > self.position.max_positions:
            raise ValueError(
                f"max_seq_len={self.max_seq_len}: this position encoding ends there, not at {length} tokens"
            )

    def new_cache(self, batch_size: int, context: int | None = None, dtype: torch.dtype | None = None) -> KVCache:
        """An empty KV cache for `context` tokens (`max_seq_len` unless told), in the model's dtype unless told.

        It slides, and never ends, if every layer has a window within the context. Raises ValueError for a `dtype` that
        cannot hold keys and values: it may be a floating one of 16 bits or more, or int8.
        """
        weight = self.embedding.tokens.weight
        context = context or self.max_seq_len
        dtype = dtype or weight.dtype
        layers = [layer.new_cache(batch_size, context, dtype, weight.device) for layer in self.attention_layers]
        slides = all(layer.window is not None and layer.window <= context for layer in self.attention_layers)
        return KVCache(layers, torch.zeros(batch_size, dtype=torch.long), None if slides else context)

    @property
    def max_context(self) -> int | None:
        """The longest text; None where every layer's window slides and the positions have no end."""
        slides = all(layer.window is not None for layer in self.attention_layers)
        return None if slides and self.position.max_positions is None else self.max_seq_len

    @property
    def attention_layers(self) -> list[GroupedQueryAttention]:
        """The attention of each block, from the first."""
        return [cast(Block, block).attention for block in self.blocks]


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for a size that is not a positive whole number."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size}: must be a positive whole number")
