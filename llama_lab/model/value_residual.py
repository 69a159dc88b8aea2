"""Value residual: attention's values in later layers are mixed with those of the first layer."""

import torch
from torch import Tensor, nn

LEARNED = "learned"
VALUES = "values"  # of the first layer, in `Layout.shared`


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
