"""The decoder-only language model: embeddings, blocks, head. It knows no component by name, only their factories."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from .attention import GroupedQueryAttention, Layout, Norm
from .block import Block
from .cache import KVCache
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
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if cache is not None and end > cache.context:
            raise ValueError(f"context={cache.context}: the cache is for so many tokens, not for {end}")
        if self.position.max_positions is not None and end > self.position.max_positions:
            raise ValueError(f"max_seq_len={self.max_seq_len}: this position encoding ends there, not at {end} tokens")
        layout = Layout(self.position, start, tokens.shape[1], tokens.device)
        x = self.dropout(self.position.embed(self.embedding(tokens), layout.positions))
        for i, block in enumerate(self.blocks):
            x = block(x, layout, None if cache is None else cache.layers[i])
        if cache is not None:
            cache.length = end
        return self.embedding.logits(x if self.norm is None else self.norm(x))

    def new_cache(self, batch_size: int, context: int | None = None, dtype: torch.dtype | None = None) -> KVCache:
        """An empty KV cache for `context` tokens (`max_seq_len` unless told), in the model's dtype unless told."""
        weight = self.embedding.tokens.weight
        context = context or self.max_seq_len
        dtype = dtype or weight.dtype
        layers = [layer.new_cache(batch_size, context, dtype, weight.device) for layer in self.attention_layers]
        return KVCache(layers, context)

    @property
    def attention_layers(self) -> list[GroupedQueryAttention]:
        """The attention of each block, from the first."""
        return [cast(Block, block).attention for block in self.blocks]

    @torch.no_grad()
    def generate(
        self, prompt: list[int], length: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Iterator[int]:
        """Yield `length` sampled tokens after a non-empty `prompt`, one at a time, with a KV cache.

        Temperature 0 takes the likeliest. Raises ValueError if prompt and sample exceed `max_seq_len`.
        """
        if len(prompt) + length > self.max_seq_len:
            raise ValueError(f"max_seq_len={self.max_seq_len}: cannot hold {len(prompt)} + {length} tokens")
        device = self.embedding.tokens.weight.device
        cache = self.new_cache(1, len(prompt) + length)
        tokens = torch.tensor([prompt], device=device)
        for _ in range(length):
            logits = self(tokens, cache)[0, -1].float().cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
            yield token
            tokens = torch.tensor([[token]], device=device)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError for a size that is not a positive whole number."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size}: must be a positive whole number")
