"""Decoder blocks `(B, T, dim) -> (B, T, dim)`: where the norms and the residual connections sit."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .attention_context import AttentionContext
from .mixer import Mixer
from .norm import Norm
from .state import State


class Scale(nn.Module):
    """Multiplies the output of a residual branch by a constant, or by a `learned` scalar that starts there."""

    def __init__(self, value: float, learned: bool) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.empty(1)) if learned else None

    def reset_parameters(self) -> None:
        """Initialise a learned number."""
        assert self.weight is not None
        nn.init.constant_(self.weight, self.value)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x (B, T, D)`."""
        return x * (self.value if self.weight is None else self.weight.type_as(x))


def scale(value: float, learned: bool) -> nn.Module:
    """A `Scale`, or nothing for a constant 1."""
    return Scale(value, learned) if learned or value != 1 else nn.Identity()


class Block(nn.Module):
    """Base class of blocks: a mixer, a feed-forward unless it is None, a norm for each, and dropout on their outputs.

    The mixer is called `attention` in configs and in the names of parameters.
    residual_scale: multiplies what each branch adds to the residual stream: a constant (Granite; DeepNorm, Wang et al.
        2022, figure 2, divided by its alpha), or where a learned number starts (0: ReZero, Bachlechner et al. 2020).
    learned_scale: whether each branch learns its own.
    final_norm: whether the decoder normalises the output of the last block, which is not normalised otherwise.
    """

    final_norm: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        attention: Mixer,
        ffn: nn.Module | None,
        norm: Norm,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        learned_scale: bool = False,
    ) -> None:
        super().__init__()
        if residual_scale < 0 or (residual_scale == 0 and not learned_scale):
            raise ValueError(f"block.residual_scale={residual_scale}: must be positive, or 0 with learned_scale=true")
        self.attention = attention
        self.attention_norm = norm(dim)
        self.attention_scale = scale(residual_scale, learned_scale)
        self.ffn = ffn
        if ffn is not None:
            self.ffn_norm = norm(dim)
            self.ffn_scale = scale(residual_scale, learned_scale)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, context: AttentionContext, state: State | None) -> Tensor:
        """The mixer and its dropout."""
        return self.dropout(self.attention(x, context, state))  # type: ignore[no-any-return]

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward and its dropout."""
        assert self.ffn is not None
        return self.dropout(self.ffn(x))  # type: ignore[no-any-return]


Branch = Callable[[Tensor], Tensor]


class Serial(Block):
    """Base class of blocks whose feed-forward reads what the mixer has added; subclasses say where the norms sit.

    norms: those of each branch, by the end of their names.
    """

    norms: ClassVar[tuple[str, ...]] = ("norm",)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Transform `x (B, T, D)`."""
        return self.add("ffn", self.feed, self.mix(x, context, state))

    def mix(self, x: Tensor, context: AttentionContext, state: State | None) -> Tensor:
        """What the feed-forward reads: `x (B, T, D)` with the mixer's branch."""
        return self.add("attention", lambda x: self.attend(x, context, state), x)

    @abstractmethod
    def add(self, name: str, branch: Branch, x: Tensor) -> Tensor:
        """Add a branch to `x (B, T, D)`; the names of its norms and of its scale begin with its own."""


class PostNorm(Serial):
    """norm(x + f(x)): the 2017 Transformer (section 3.1), GPT-1. The last block's output is already normalised."""

    final_norm = False

    def add(self, name: str, branch: Branch, x: Tensor) -> Tensor:
        """Add a branch to `x (B, T, D)`."""
        norm, scale = getattr(self, f"{name}_norm"), getattr(self, f"{name}_scale")
        return norm(x + scale(branch(x)))  # type: ignore[no-any-return]


class PreNorm(Serial):
    """x + f(norm(x)): GPT-2 (section 2.3), LLaMA; analysed by Xiong et al. 2020."""

    def add(self, name: str, branch: Branch, x: Tensor) -> Tensor:
        """Add a branch to `x (B, T, D)`."""
        norm, scale = getattr(self, f"{name}_norm"), getattr(self, f"{name}_scale")
        return x + scale(branch(norm(x)))  # type: ignore[no-any-return]


class MixerOnly(PreNorm):
    """x + mixer(norm(x)), without a feed-forward: Mamba (Gu & Dao 2023, section 3.4)."""

    def __init__(
        self,
        dim: int,
        attention: Mixer,
        norm: Norm,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        learned_scale: bool = False,
    ) -> None:
        super().__init__(dim, attention, None, norm, dropout, residual_scale, learned_scale)

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Transform `x (B, T, D)`."""
        return self.mix(x, context, state)


class Reordered(Serial):
    """x + norm(f(x)): the norm on the output, inside the residual branch (OLMo 2, section 2.1)."""

    def add(self, name: str, branch: Branch, x: Tensor) -> Tensor:
        """Add a branch to `x (B, T, D)`."""
        norm, scale = getattr(self, f"{name}_norm"), getattr(self, f"{name}_scale")
        return x + scale(norm(branch(x)))  # type: ignore[no-any-return]


class Sandwich(Serial):
    """x + norm(f(norm(x))): a norm on both sides (CogView, Ding et al. 2021, section 2.4; Gemma 2)."""

    norms = ("norm", "post_norm")

    def __init__(self, dim: int, attention: Mixer, ffn: nn.Module, norm: Norm, **others: Any) -> None:
        super().__init__(dim, attention, ffn, norm, **others)
        self.attention_post_norm = norm(dim)
        self.ffn_post_norm = norm(dim)

    def add(self, name: str, branch: Branch, x: Tensor) -> Tensor:
        """Add a branch to `x (B, T, D)`."""
        before, after = getattr(self, f"{name}_norm"), getattr(self, f"{name}_post_norm")
        return x + getattr(self, f"{name}_scale")(after(branch(before(x))))  # type: ignore[no-any-return]


class Parallel(Block):
    """x + attention(norm(x)) + ffn(norm'(x)): in parallel, each with its own norm (GPT-NeoX, section 2.1)."""

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Transform `x (B, T, D)`."""
        attended = self.attention_scale(self.attend(self.attention_norm(x), context, state))
        return x + attended + self.ffn_scale(self.feed(self.ffn_norm(x)))  # type: ignore[no-any-return]


class ParallelSharedNorm(Block):
    """x + attention(norm(x)) + ffn(norm(x)): in parallel, behind one norm (GPT-J; PaLM, section 2; Falcon 7B)."""

    def __init__(self, dim: int, attention: Mixer, ffn: nn.Module, norm: Norm, **others: Any) -> None:
        super().__init__(dim, attention, ffn, norm, **others)
        del self.ffn_norm

    def forward(self, x: Tensor, context: AttentionContext, state: State | None = None) -> Tensor:
        """Transform `x (B, T, D)`."""
        normed = self.attention_norm(x)
        attended = self.attention_scale(self.attend(normed, context, state))
        return x + attended + self.ffn_scale(self.feed(normed))  # type: ignore[no-any-return]
