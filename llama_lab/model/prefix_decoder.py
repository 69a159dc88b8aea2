"""The prefix decoder, or prefix language model: it reads the first part of a text both ways, and predicts the rest."""

from typing import Any

import torch
from torch import Tensor

from .attention_context import LEAST_PREFIX
from .decoder import Decoder
from .loss import IGNORE
from .mixer import class_name
from .state import DecoderState


class PrefixDecoder(Decoder):
    """A decoder that reads the prefix of each sequence both ways (Raffel et al. 2020, section 3.2.1).

    What it is given beside its tokens is the length of each prefix, `(B,)`. Raises ValueError as `Decoder` does, and
    for mixers that see no later tokens.
    """

    def __init__(self, max_seq_len: int, **decoder: Any) -> None:
        super().__init__(max_seq_len=max_seq_len, **decoder)
        for mixer in self.mixers:
            if not hasattr(mixer, "mask_rule"):
                problem = "its tokens see only earlier ones, but those of a prefix see each other"
                raise ValueError(f"attention={class_name(mixer)}: {problem}; choose softmax attention")
        if self.prefix:
            raise ValueError(f"attention.prefix={self.prefix}: objective=prefix has its own prefixes; set this to null")
        if (start := self.document_start_id) is not None:
            problem = "a prefix holds several documents, which see each other; set data.document_mask=false"
            raise ValueError(f"document_start_id={start}: {problem}")
        if max_seq_len < 2 * LEAST_PREFIX:
            raise ValueError(f"max_seq_len={max_seq_len}: half of it is a prefix; make it at least {2 * LEAST_PREFIX}")

    def cut(self, inputs: Tensor, targets: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The arguments of `loss` for windows, whose prefix is what has no targets, `(B, T)`, up to the first.

        In a window that predicts its first token, as in validation, the prefix is the first half.
        """
        prefix = 1 + (targets != IGNORE).int().argmax(-1)
        prefix = torch.where(prefix < LEAST_PREFIX, max(LEAST_PREFIX, targets.shape[1] // 2), prefix)
        seen = torch.arange(targets.shape[1], device=targets.device) < prefix[:, None] - 1
        return inputs, targets.clamp(min=IGNORE).masked_fill(seen, IGNORE), prefix

    def read_prompt(self, prompt: Tensor, state: DecoderState) -> Tensor:
        """The hidden states `(1, T, D)` of a `prompt (1, T)`, a prefix, which begins the empty `state`."""
        return self.hidden_states(prompt, state, prompt.new_tensor([prompt.shape[1]]))
