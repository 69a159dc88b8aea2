"""Objectives: which tokens of a training window are predicted, as a function of `data.seed` and the step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hydra.utils import get_class
from omegaconf import DictConfig

from llama_lab.model.attention_context import LEAST_PREFIX
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError

from .dataset import Examples, Ids


class Objective(ABC):
    """What is predicted of windows, and from what: inputs, targets, and what a model is given beside them.

    extra_tokens: special tokens that the tokenizer gains where it lacks them; an objective with any is built with the
    `tokenizer`, whose `ids_of` they are. targets: what is predicted; losses of unlike targets do not compare.
    """

    extra_tokens: ClassVar[Sequence[str]] = ()
    targets: ClassVar[str] = "next tokens"

    @abstractmethod
    def require_room(self, seq_len: int) -> None:
        """Raise ConfigError unless windows of `seq_len` tokens have room for the objective."""

    @abstractmethod
    def examples(self, whole: Examples, seed: int, step: int, batch_size: int, rows: range) -> tuple[Ids, ...]:
        """Of `rows` of the batch at `step`, which are `whole`; drawn for all of its rows, so that devices agree."""

    def val_examples(self, whole: Examples, at: Sequence[int]) -> tuple[Ids, ...]:
        """Of the validation windows with the numbers `at`, the same ones whenever a run validates."""
        return whole


def extra_tokens(cfg: DictConfig) -> Sequence[str]:
    """The special tokens of the objective that `cfg` describes."""
    kind: Any = get_class(cfg.objective._target_) if cfg.get("objective") else Objective
    return kind.extra_tokens  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Prefix(Objective):
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
