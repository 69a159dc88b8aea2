"""Options of attention: query and key norms, sinks, value residuals."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mixer import takes
from .norm import NoNorm, Norm

LEARNED = "learned"
VALUES = "values"  # of the first layer, in `AttentionContext.shared`


def check_qk_norm(qk_norm: str | None, qk_gain: str, qk_bias: bool | None, rotated: bool) -> None:
    """Raise ValueError for an unknown kind of norm, or a setting that has no effect on it."""
    if qk_norm not in (None, "head", "projection"):
        raise ValueError(f"attention.qk_norm={qk_norm}: unknown; choose head, projection or null")
    if qk_gain not in ("shared", "heads", "none"):
        raise ValueError(f"attention.qk_gain={qk_gain}: unknown; choose shared, heads or none")
    if qk_norm is None and (qk_gain != "shared" or qk_bias is not None or rotated):
        raise ValueError(
            "attention.qk_norm=null: qk_gain, qk_bias and qk_norm_rotated need a norm; choose qk_norm=head, or leave "
            "them out"
        )
    if qk_norm == "projection" and (qk_gain == "heads" or rotated):
        raise ValueError(
            "attention.qk_norm=projection: has a gain per element, and is before the rotation; choose qk_norm=head, or "
            "leave out qk_gain=heads and qk_norm_rotated"
        )
    if qk_gain == "none" and qk_bias is not None:
        raise ValueError("attention.qk_gain=none: such a norm has no bias either; leave out qk_bias")


def norm_of_heads(
    norm: Norm, n_heads: int, head_dim: int, qk_norm: str, qk_gain: str, qk_bias: bool | None
) -> nn.Module:
    """The norm of the queries, or of the keys, of `n_heads` heads. Raises ValueError if the norm lacks an option."""
    factory = norm.func if isinstance(norm, partial) else norm
    if factory is NoNorm:
        raise ValueError(f"attention.qk_norm={qk_norm}: the model's norm does nothing; choose a norm, or null")
    kinds: dict[str, bool | int] = {}
    if qk_gain != "shared":
        kinds |= {"heads": n_heads} if qk_gain == "heads" else {"gain": False}
    if qk_bias is not None:
        kinds["bias"] = qk_bias
    for kind in kinds:
        if not takes(factory, kind):
            key = "qk_bias" if kind == "bias" else "qk_gain"
            raise ValueError(f"attention.{key}: the model's norm has no argument {kind}; choose another norm")
    if qk_gain == "none":  # nor what a gain comes with
        kinds |= dict.fromkeys((kind for kind in ("bias", "unit_offset") if takes(factory, kind)), False)
    return norm(head_dim if qk_norm == "head" else n_heads * head_dim, **kinds)


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


class ValueResidual(nn.Module):
    """Mixes the first layer's values into a layer's own (Zhou et al. 2024, ResFormer).

    weight: of the first layer's values, between 0 and 1, and one minus that of its own; or "learned": both are trained,
        one number each, and start at 0.5. Raises ValueError for any other.
    """

    def __init__(self, weight: float | str) -> None:
        super().__init__()
        self.weights: Tensor | tuple[float, float]
        if weight == LEARNED:
            self.weights = nn.Parameter(torch.empty(2))
        elif isinstance(weight, str) or not 0 < weight < 1:
            raise ValueError(
                f"attention.value_residual={weight}: must be above 0 and below 1, or learned, or null for none"
            )
        else:
            self.weights = (1 - weight, weight)

    def reset_parameters(self) -> None:
        """Both halves."""
        assert isinstance(self.weights, nn.Parameter)
        nn.init.constant_(self.weights, 0.5)

    def forward(self, own: Tensor, first: Tensor) -> Tensor:
        """Mix values `(B, Hkv, T, Dh)`."""
        return self.weights[0] * own + self.weights[1] * first
