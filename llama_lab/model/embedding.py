"""Token embeddings and the output head, which share one table if tied."""

import torch
from torch import Tensor, nn

from .init import Table, check_positive
from .norm import NoNorm, Norm


class Embedding(nn.Module):
    """Token table and output head.

    tied: the head is the token table (Press & Wolf 2017); otherwise a matrix of its own.
    std: standard deviation of the table at the start.
    scale: multiplies the embeddings, not the head (Vaswani et al. 2017, section 3.4: sqrt(dim)).
    norm_input: normalise the embeddings with the model's norm (BLOOM, section 3.2).
    head_bias: add a bias to the logits (CTRL).
    logit_scale: multiplies the logits, before a bias and the cap (Cohere; the multiplier of muP, Yang et al. 2022).
    logit_softcap: bound the logits to ±logit_softcap by a tanh (Gemma 2, section 2).
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        norm: Norm,
        tied: bool = False,
        std: float = 0.02,
        scale: float = 1.0,
        norm_input: bool = False,
        head_bias: bool = False,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        check_positive("embedding.std", std)
        check_positive("embedding.logit_scale", logit_scale)
        self.scale = scale
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap
        self.tokens = Table(vocab_size, dim, std)
        self.norm = norm(dim) if norm_input else None
        self.head = nn.Linear(dim, vocab_size, bias=head_bias)
        if tied:
            self.head.weight = self.tokens.weight
        if isinstance(self.norm, NoNorm):
            raise ValueError("embedding.norm_input=true: the model's norm does nothing; choose a norm, or false")
        if logit_softcap is not None and logit_softcap <= 0:
            raise ValueError(f"embedding.logit_softcap={logit_softcap}: must be positive, or null for none")

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed `tokens (B, T)` as `(B, T, D)`."""
        x = self.tokens(tokens) * self.scale
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """Score the vocabulary: `x (B, T, D)` to `(B, T, V)`."""
        logits: Tensor = self.head(self.scaled(x))
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap)

    def scaled(self, x: Tensor) -> Tensor:
        """`x (B, T, D)` times logit_scale: scaling the head's input is cheaper than scaling the logits."""
        return x if self.logit_scale == 1 else x * self.logit_scale


def is_plain(linear: nn.Module) -> bool:
    """Whether `linear` is exactly nn.Linear without hooks, so that its product may be computed elsewhere."""
    return type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks
