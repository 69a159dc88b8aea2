"""What a decoder keeps between tokens: a `State` for each mixer, and the length of each sequence."""

from typing import Self

import torch
from torch import Tensor


class State:
    """What one mixer keeps between tokens: tensors whose first dimension is the batch.

    Mixers update them in place: `row` returns views, and compiled code relies on their addresses.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row(self, index: int) -> Self:
        """A view of one sequence; writes to it change this state."""
        return type(self)([tensor[index : index + 1] for tensor in self.tensors])


class DecoderState:
    """The states of all layers, and the number of tokens of each sequence.

    lengths: int64 `(B,)` on the CPU, so that reading them never waits for a GPU.
    starts: places at which the present documents start, int64 `(B,)` on the model's device; see `Layout`.
    context: number of tokens per sequence that fit. A state that `slides` accepts any number.
    """

    def __init__(self, layers: list[State], lengths: Tensor, starts: Tensor, context: int, slides: bool) -> None:
        self.layers = layers
        self.lengths = lengths
        self.starts = starts
        self.context = context
        self.slides = slides

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def row(self, index: int) -> "DecoderState":
        """A view of one sequence, so that its prompt can be read by itself; writes to it change this state."""
        rows = [layer.row(index) for layer in self.layers]
        lengths, starts = (of_all[index : index + 1] for of_all in (self.lengths, self.starts))
        return DecoderState(rows, lengths, starts, self.context, self.slides)

    def next_positions(self, batch_size: int, n_tokens: int) -> tuple[Tensor, int, int]:
        """Positions of the next `n_tokens` of each sequence, and the lengths of the shortest and the longest.

        Positions are int64 `(B, T)` on the CPU, or `(1, T)` if all sequences are equally long. Raises ValueError unless
        this is a state of `batch_size` sequences with room for `n_tokens` more in each.
        """
        lengths = self.lengths.tolist()
        if len(lengths) != batch_size:
            raise ValueError(
                f"tokens: a batch of {batch_size}, but the state is of {len(lengths)} sequences; "
                f"make one with new_state({batch_size})"
            )
        shortest, longest = min(lengths), max(lengths)
        if not self.slides and longest + n_tokens > self.context:
            raise ValueError(f"context={self.context}: the cache is for so many tokens, not for {longest + n_tokens}")
        starts = self.lengths[:1, None] if shortest == longest else self.lengths[:, None]
        return starts + torch.arange(n_tokens, device="cpu"), shortest, longest
