"""The encoder: it reads a text both ways, and predicts tokens at their own places (BERT, Devlin et al. 2019)."""

from collections.abc import Mapping
from typing import Any

import torch

from .decoder import Decoder
from .state import DecoderState


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

    @property
    def decodes(self) -> bool:
        """False: it predicts no next token."""
        return False

    def new_state(self, batch_size: int, context: int | None = None, dtype: torch.dtype | None = None) -> DecoderState:
        """Raise ValueError, since it predicts no next token."""
        raise ValueError("encoder: predicts tokens at their own places and no next one; choose family=decoder")
