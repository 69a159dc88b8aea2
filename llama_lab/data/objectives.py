"""Objectives: which tokens of a training window are predicted, as a function of `data.seed` and the step."""

from dataclasses import dataclass

import numpy as np

from llama_lab.model.attention_context import LEAST_PREFIX
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError

from .dataset import Examples


@dataclass(frozen=True)
class Prefix:
    """What `objective=prefix` selects: the prefix of each window, drawn uniformly, is not predicted.

    least: tokens of the shortest prefix; the longest leaves one input. A window whose first tokens have no targets
    keeps these as its prefix, such as the source in a probe of reversing. Raises ConfigError for a prefix of nothing.
    """

    least: int

    def __post_init__(self) -> None:
        if self.least < LEAST_PREFIX:
            problem = f"a prefix of {self.least} tokens has nothing to read both ways; choose at least {LEAST_PREFIX}"
            raise ConfigError(f"objective.least={self.least}: {problem}")

    def require_room(self, seq_len: int) -> None:
        """Raise ConfigError unless windows of `seq_len` tokens have room for a prefix and what follows it."""
        if self.least >= seq_len:
            problem = f"model.max_seq_len={seq_len} leaves nothing to predict; make it smaller"
            raise ConfigError(f"objective.least={self.least}: {problem}")

    def examples(self, whole: Examples, seed: int, step: int, batch_size: int, rows: range) -> Examples:
        """The examples of `rows` of the batch at `step`, with `IGNORE` as the target of a prefix's tokens."""
        length = whole.targets.shape[1]
        generator = np.random.default_rng(np.random.SeedSequence([seed, step]))
        prefix = generator.integers(self.least, length, batch_size)[rows, None]
        is_seen = (np.arange(length) < prefix - 1) & (whole.targets[:, :1] != IGNORE)
        return Examples(whole.inputs, np.where(is_seen, IGNORE, whole.targets))
