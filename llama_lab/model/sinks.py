"""Attention sinks: a trained logit per head in the softmax, so that a query may attend to nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Sinks(nn.Module):
    """One more key for every query, of zeros, whose score is a trained logit per head (gpt-oss, OpenAI 2025).

    Its value is zero too, so that it only takes weight from the others. Any kernel with a mask can attend to it. The
    logits start at 0, where the softmax has one more in its denominator.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(n_heads))

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.logits)

    def forward(self, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the key to `key, value (B, Hkv, Tk, Dh)` and to the additive `mask`, then `(..., H, Tq, Tk + 1)`."""
        mask = mask.expand(*mask.shape[:-3], len(self.logits), *mask.shape[-2:])
        logits = self.logits.type_as(mask)[:, None, None].expand(*mask.shape[:-1], 1)
        return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), torch.cat((mask, logits), -1)
