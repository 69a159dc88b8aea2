"""Short causal convolutions: a component of recurrent mixers, and a mixer of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_context import AttentionContext
from .init import ResidualOutput
from .mixer import Mixer, linear_flops, require_kv_heads
from .state import State


class ShortConv(nn.Conv1d):
    """A causal convolution of each channel by itself, over `width` tokens of a document: the newest and those before.

    Raises ValueError unless the width is a whole number of at least 2.
    """

    def __init__(self, dim: int, width: int, bias: bool = False) -> None:
        if not isinstance(width, int) or width < 2:
            raise ValueError(f"attention.conv={width}: must be a whole number of at least 2, or null for none")
        super().__init__(dim, dim, width, groups=dim, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: AttentionContext, past: Tensor | None = None
    ) -> Tensor:
        """Convolve `x (B, T, dim)` after `past (B, width - 1, dim)`, which is updated in place."""
        T, before = x.shape[1], self.kernel_size[0] - 1
        if past is None:
            seen = F.pad(x, (0, 0, before, 0))
        else:
            seen = torch.cat((past.type_as(x), x), 1)
            past.copy_(seen[:, -before:])
        if context.starts is None:
            return F.conv1d(seen.mT, self.weight, self.bias, groups=self.groups).mT
        out: Tensor | None = None
        for lag in range(before + 1):
            is_seen = context.positions[..., None] >= lag  # or else it is in another document
            part = seen[:, before - lag : before - lag + T] * self.weight[:, 0, before - lag] * is_seen
            out = part if out is None else out + part
        assert out is not None
        return (out if self.bias is None else out + self.bias).type_as(x)

    def new_past(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The inputs before the first token: zeros."""
        return torch.zeros(batch_size, self.kernel_size[0] - 1, self.in_channels, device=device, dtype=dtype)

    def flops_per_token(self, seq_len: int) -> float:
        """Twice the weights, each of which meets one number per token."""
        return linear_flops(self)

    def active_params(self) -> int:
        """Parameters that one token uses: all."""
        return sum(p.numel() for p in self.parameters())


class GatedConv(Mixer):
    """A short convolution between two gates, which are linear in the input (LFM2, section 2.2).

    conv: its width in tokens. bias: whether convolution and projections have one.
    """

    documents = True
    max_state_tokens = 0
    kernel = "conv1d"

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, conv: int = 3, bias: bool = False) -> None:
        super().__init__()
        require_kv_heads(n_kv_heads, n_heads, "attention=conv has no key and value heads to share")
        self.gate_in, self.gate_out, self.value = (nn.Linear(dim, dim, bias=bias) for _ in range(3))
        self.conv = ShortConv(dim, conv, bias)
        self.output = ResidualOutput(dim, dim, bias=bias)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Mix tokens `x (B, T, D)`; updates the state in place."""
        past = None if state is None else state.tensors[0]
        mixed = self.conv(self.gate_in(x) * self.value(x), context, past)
        return self.output(self.gate_out(x) * mixed)  # type: ignore[no-any-return]

    def flops_per_token(self, seq_len: int) -> float:
        """Of projections and convolution."""
        return linear_flops(self)

    def new_state(self, batch_size: int, length: int, device: torch.device, dtype: torch.dtype) -> State:
        """The last tokens that the convolution sees."""
        return State([self.conv.new_past(batch_size, device, dtype)])
