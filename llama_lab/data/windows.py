"""Fixed-length windows of a token stream: in training a pure function of (seed, step), in validation fixed."""

from functools import lru_cache
from typing import Protocol

import numpy as np

from llama_lab.model.loss import ELSEWHERE, IGNORE

from .dataset import Examples, Ids, Tokens, Training, Validation
from .folders import TokenStream


def count_train_windows(predicted_tokens: int, seq_len: int) -> int:
    """Return the number of windows per epoch of `TrainWindows`, for a stream of `predicted_tokens + 1` tokens."""
    left_by_latest_start = (predicted_tokens - (seq_len - 1)) // seq_len
    return max(left_by_latest_start, min(predicted_tokens // seq_len, 1))


class Windows(Training, Protocol):
    """An endless series of training sequences; step *s* of it depends on nothing but what the series is made of."""

    def examples(self, step: int, batch_size: int, rows: slice | range = slice(None)) -> Examples:
        """Return `rows` of the batch at `step`: all tokens but the last as inputs, all but the first as targets.

        Row *i* is sequence `step * batch_size + i` of the series.
        """
        sequences = self.take((step * batch_size + np.arange(batch_size)[rows]).tolist())
        return Examples(sequences[:, :-1], sequences[:, 1:])

    def take(self, sequences: list[int]) -> Ids:
        """Return these sequences of the series: `(sequences, seq_len + 1)`."""


class TrainWindows(Windows):
    """Training sequences of `seq_len + 1` tokens: inputs and, shifted by one, targets.

    An epoch cuts `tokens` (one dimension, at least `seq_len + 1`) into non-overlapping windows from a random
    start, and visits each once in random order; start and order depend on (seed, epoch) alone. So step *s* is the same
    in every run, on any number of devices, resumed or not.
    """

    def __init__(self, tokens: Tokens | TokenStream, seq_len: int, seed: int):
        self._tokens = tokens
        self._seq_len = seq_len
        self._seed = seed
        self._starts = lru_cache(maxsize=2)(self._draw_starts)  # a batch can span two epochs

    def __len__(self) -> int:
        """Windows per epoch."""
        return count_train_windows(len(self._tokens) - 1, self._seq_len)

    def take(self, sequences: list[int]) -> Ids:
        """Return these sequences of an endless series of epochs: `(sequences, seq_len + 1)`."""
        places = [divmod(sequence, len(self)) for sequence in sequences]
        starts = [self._starts(epoch)[position] for epoch, position in places]
        return np.stack([self._tokens[start : start + self._seq_len + 1] for start in starts]).astype(np.int64)

    def _draw_starts(self, epoch: int) -> Ids:
        """Index of the first token of each window of an epoch, in the order of its visits: `(windows,)`."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        spare = len(self._tokens) - 1 - len(self) * self._seq_len
        first = int(generator.integers(min(self._seq_len, spare + 1)))
        return first + generator.permutation(len(self)) * self._seq_len


class ValWindows(Validation):
    """Non-overlapping windows that predict every token of `tokens` except the first exactly once.

    The last window is padded with inputs 0 and targets `IGNORE`. predicted: only these of the predicted tokens, from 0,
    in the windows that hold any of them; the targets before these are `ELSEWHERE`, and those after them `IGNORE`.
    """

    def __init__(self, tokens: Tokens, seq_len: int, predicted: range | None = None):
        self._stream = tokens
        self._predicted = predicted or range(len(tokens) - 1)
        self._first = self._predicted.start // seq_len
        self.seq_len, self.tokens = seq_len, len(self._predicted)

    def __len__(self) -> int:
        return -(-self._predicted.stop // self.seq_len) - self._first

    def __getitem__(self, i: int) -> tuple[Ids, Ids]:
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} of {len(self)}")
        start = (self._first + i) * self.seq_len
        window = self._stream[start : start + self.seq_len + 1]
        inputs, targets = self.nothing()
        inputs[: len(window) - 1] = window[:-1]
        targets[: len(window) - 1] = window[1:]
        targets[: max(0, self._predicted.start - start)] = ELSEWHERE
        targets[max(0, self._predicted.stop - start) :] = IGNORE
        return inputs, targets
