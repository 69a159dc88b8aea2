"""The encoder: it reads a text both ways, and predicts tokens at their own places (BERT, Devlin et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .attention_context import AttentionContext
from .decoder import Decoder
from .init import Table
from .state import DecoderState, State


class Encoder(Decoder):
    """One tower in which all tokens see each other, with the head of a decoder; it cannot decode.

    What it is given beside its tokens is how many each sequence has, `(B,)`, if some are padded. Raises ValueError as
    `Decoder` does, and for mixers that see no later tokens.
    """

    def __init__(self, **decoder: Any) -> None:
        super().__init__(**decoder)
        if self.prefix:
            raise ValueError(f"attention.prefix={self.prefix}: an encoder's tokens all see each other; set it to null")
        if self.document_start_id is not None:
            raise ValueError("document_start_id: an encoder sees all documents; set data.document_mask=false")

    def make_blocks(self, sizes: Mapping[str, Any], **components: Any) -> None:
        """Make blocks whose tokens see both sides."""
        super().make_blocks(sizes, **components, causal=False)

    def new_state(self, batch_size: int, context: int | None = None, dtype: torch.dtype | None = None) -> DecoderState:
        """Raise ValueError, since it predicts no next token."""
        raise ValueError("encoder: predicts tokens at their own places and no next one; choose family=decoder")


class Bert(Encoder):
    """An encoder as BERT is published: with segments, a norm on its embeddings, and a transform before the head.

    segments: two vectors, of which the first is added to every token; the other is for a second text.
    head_transform: a linear map, GELU and a norm.
    """

    def make_blocks(self, sizes: Mapping[str, Any], **components: Any) -> None:
        """Make those of an encoder, and these parts."""
        super().make_blocks(sizes, **components)
        dim, norm = sizes["dim"], components["norm"]
        self.segments = Table(2, dim, self.embedding.tokens.std)
        self.input_norm = norm(dim)
        self.head_transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), norm(dim))

    def run_blocks(self, tokens: Tensor, context: AttentionContext, states: Sequence[State] | None = None) -> Tensor:
        """Embeddings, blocks and the transform: `tokens (B, T)` to `(B, T, D)`."""
        x = self.embedding(tokens) + self.segments(torch.zeros_like(tokens))
        return self.head_transform(self.transform(x, context))  # type: ignore[no-any-return]

    def with_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """The norm of the sum."""
        return self.input_norm(super().with_positions(x, positions))  # type: ignore[no-any-return]
