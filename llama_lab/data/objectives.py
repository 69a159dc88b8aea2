"""Objectives: which tokens of a training window are predicted, as a function of `data.seed` and the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from hydra.utils import get_class
from omegaconf import DictConfig

from llama_lab.config.components import build
from llama_lab.model.attention_context import LEAST_PREFIX
from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError

from .dataset import Dataset, Examples, Ids, Validation
from .tokenizer import TextTokenizer

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Objective:
    """What is predicted of windows, and from what: inputs, targets, and what a model is given beside them.

    Here each next token; subclasses predict something else. extra_tokens: special tokens that the tokenizer gains where
    it lacks them. targets: what is predicted; losses of unlike targets do not compare.
    """

    tokenizer: TextTokenizer
    extra_tokens: ClassVar[Sequence[str]] = ()
    targets: ClassVar[str] = "next tokens"

    def require_room(self, seq_len: int) -> None:
        """Raise ConfigError unless windows of `seq_len` tokens have room for the objective."""

    def examples(self, whole: Examples, seed: int, step: int, batch_size: int, rows: range) -> tuple[Ids, ...]:
        """Of `rows` of the batch at `step`, which are `whole`; drawn for all of its rows, so that devices agree."""
        return whole

    def lengths(self, seq_len: int) -> tuple[int, int] | None:
        """Tokens of source and target that a window of `seq_len` tokens becomes; None: the model divides it."""
        return None

    def val_examples(self, whole: Examples, at: Sequence[int]) -> tuple[Ids, ...]:
        """Of the validation windows with the numbers `at`, the same ones whenever a run validates."""
        return whole

    def val_batch(self, windows: Validation, at: Sequence[int]) -> tuple[Ids, ...]:
        """The examples of `windows` with the numbers `at`; without any, one that predicts nothing."""
        chosen = [windows[i] for i in at] or [windows.nothing()]
        return self.val_examples(Examples(*map(np.stack, zip(*chosen, strict=True))), at or [0])


def open_objective(cfg: DictConfig, dataset: Dataset) -> Objective:
    """The objective that `cfg` describes, for a dataset. Raises ConfigError."""
    tokenizer = dataset.tokenizer
    return build(cfg.objective, "objective", tokenizer=tokenizer) if cfg.get("objective") else Objective(tokenizer)


def kind_of(cfg: DictConfig) -> type[Objective]:
    """The class of the objective that `cfg` describes."""
    return get_class(cfg.objective._target_) if cfg.get("objective") else Objective


def predicts_text(cfg: DictConfig) -> bool:
    """Whether each next token is predicted, so that a loss in bits per byte means something."""
    return kind_of(cfg).targets == Objective.targets


def targets_of(config: Mapping[str, Any]) -> str:
    """What a run of this flat config predicts; of an objective that is none of ours, the default."""
    known = {f"{kind.__module__}.{kind.__name__}": kind.targets for kind in Objective.__subclasses__()}
    return known.get(str(config.get("objective._target_")), Objective.targets)


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


@dataclass(frozen=True)
class Span(Objective):
    """What `objective=span` selects: spans left out of a source are predicted (Raffel et al. 2020, section 3.1.4).

    A sentinel stands for each span in the source, and before each one in the targets; both finish with the end of text,
    with which the decoder begins. The tokens are those that a window predicts. Validation leaves out windows that
    predict some of theirs alone: the last one of a text, and where two texts of a mixture meet.

    density: of a window, what spans have together. mean_span: tokens of one, on average. Both numbers are the same in
    all windows. Raises ConfigError for densities and spans that are impossible.
    """

    density: float
    mean_span: float
    extra_tokens = tuple(f"<extra_id_{i}>" for i in range(100))  # as T5's are called
    targets = "spans"

    def __post_init__(self) -> None:
        if not 0 < self.density < 1:
            raise ConfigError(f"objective.density={self.density}: must be between 0 and 1, such as 0.15")
        if not self.mean_span >= 1:
            raise ConfigError(f"objective.mean_span={self.mean_span}: must be at least 1 token, such as 3")

    def require_room(self, seq_len: int) -> None:
        """Raise ConfigError unless windows of `seq_len` tokens have room between spans, and sentinels suffice."""
        noise, spans = self.counts(seq_len)
        most = min(noise - 1, seq_len - noise - 1, len(self.extra_tokens))  # neither part is longer than its window
        if spans > most:
            problem = f"{spans} spans, of {noise} tokens in all, where at most {most} fit"
            raise ConfigError(
                f"objective.mean_span={self.mean_span}: a window of model.max_seq_len={seq_len} has {problem}; "
                f"raise it, or change the other"
            )

    def lengths(self, seq_len: int) -> tuple[int, int]:
        """Tokens of source and target, sentinels and ends included."""
        noise, spans = self.counts(seq_len)
        return seq_len - noise + spans + 1, noise + spans + 1

    def counts(self, length: int) -> tuple[int, int]:
        """Tokens in spans, and spans, of a window of `length` tokens."""
        noise = min(max(round(length * self.density), 1), length - 1)
        return noise, max(1, round(noise / self.mean_span))

    def examples(self, whole: Examples, seed: int, step: int, batch_size: int, rows: range) -> tuple[Ids, ...]:
        """The decoder's inputs, targets and sources of `rows` of the batch at `step`."""
        generator = np.random.default_rng(np.random.SeedSequence([seed, step]))
        return self.divide(whole.targets, self.draw(generator, batch_size, whole.targets.shape[1])[rows])

    def val_examples(self, whole: Examples, at: Sequence[int]) -> tuple[Ids, ...]:
        """The same of the validation windows with the numbers `at`, by which spans are drawn."""
        length = whole.targets.shape[1]
        spans = np.concatenate([self.draw(np.random.default_rng(number), 1, length) for number in at])
        inputs, targets, source = self.divide(np.maximum(whole.targets, 0), spans)
        is_whole = (whole.targets >= 0).all(1, keepdims=True)
        return inputs, np.where(is_whole, targets, IGNORE), source

    def draw(self, generator: np.random.Generator, rows: int, length: int) -> Mask:
        """Which tokens are in spans, `(rows, length)`; each row begins outside, and finishes inside (T5's code)."""
        noise, spans = self.counts(length)
        lengths = [segments(generator, rows, tokens, spans) for tokens in (length - noise, noise)]
        is_noise = np.tile([False, True], rows * spans)
        return np.repeat(is_noise, np.stack(lengths, -1).ravel()).reshape(rows, length)

    def divide(self, tokens: Ids, is_noise: Mask) -> tuple[Ids, ...]:
        """The decoder's inputs and targets, and the sources, of windows of `tokens (B, T)`."""
        source, targets = self.shorten(tokens, is_noise), self.shorten(tokens, ~is_noise)
        return np.concatenate((source[:, -1:], targets[:, :-1]), 1), targets, source

    def shorten(self, tokens: Ids, left_out: Mask) -> Ids:
        """`tokens (B, T)` with a sentinel for each span of those left out, and the end of text."""
        first = left_out & ~np.pad(left_out, ((0, 0), (1, 0)))[:, :-1]
        sentinels = np.array(self.tokenizer.ids_of(self.extra_tokens))
        kept = np.where(first, sentinels[first.cumsum(1) - 1], tokens)[first | ~left_out]
        return np.pad(kept.reshape(len(tokens), -1), ((0, 0), (0, 1)), constant_values=self.tokenizer.eot_id)


def segments(generator: np.random.Generator, rows: int, items: int, count: int) -> Ids:
    """Lengths of `count` segments of `items`, all equally likely: `(rows, count)`, none of them 0."""
    starts = generator.permuted(np.tile(np.arange(1, items) < count, (rows, 1)), axis=1)
    inner = np.nonzero(starts)[1].reshape(rows, count - 1) + 1
    return np.diff(inner, axis=1, prepend=0, append=items)


@dataclass(frozen=True)
class Masked(Objective):
    """What `objective=masked` selects: some tokens of a window are predicted at their own places (BERT, section 3.1).

    share: of the tokens that a window predicts, the number rounded, and at least one. Of these, 80% become the mask,
    10% any token, and 10% stay as they are. An encoder reads the tokens up to the last that the window predicts. Raises
    ConfigError for a share of nothing.
    """

    share: float
    extra_tokens = ("[MASK]",)
    targets = "masked tokens"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"objective.share={self.share}: must be more than 0 and less than 1, such as 0.15")

    def require_room(self, seq_len: int) -> None:
        """Raise ConfigError unless windows of `seq_len` tokens keep one that is not masked."""
        if seq_len < 2:
            raise ConfigError(f"model.max_seq_len={seq_len}: its only token would be masked; make it at least 2")

    def examples(self, whole: Examples, seed: int, step: int, batch_size: int, rows: range) -> tuple[Ids, ...]:
        """The examples of `rows` of the batch at `step`."""
        generator = np.random.default_rng(np.random.SeedSequence([seed, step]))
        return self.masked(whole, generator.random((3, batch_size, whole.targets.shape[1]))[:, rows])

    def val_examples(self, whole: Examples, at: Sequence[int]) -> tuple[Ids, ...]:
        """Of the validation windows with the numbers `at`, each masked by its number."""
        draws = [np.random.default_rng(number).random((3, whole.targets.shape[1])) for number in at]
        return self.masked(whole, np.stack(draws, 1))

    def masked(self, whole: Examples, draws: npt.NDArray[np.float64]) -> tuple[Ids, ...]:
        """Inputs and targets, and if windows are padded their lengths. draws: `(3, B, T)`, uniform from 0 to 1.

        By these are tokens ranked, the fate of masked ones chosen, and other tokens drawn.
        """
        order, fate, other = draws
        predicted = whole.targets >= 0
        lengths = np.where(predicted, np.arange(1, predicted.shape[1] + 1), 1).max(1)
        tokens = np.concatenate((whole.inputs[:, 1:], np.maximum(whole.targets[:, -1:], 0)), 1)
        count = np.maximum(np.rint(self.share * predicted.sum(1, keepdims=True)), 1)
        chosen = predicted & (np.where(predicted, order, 1).argsort(1).argsort(1) < count)
        (mask,) = self.tokenizer.ids_of(self.extra_tokens)
        drawn = (other * self.tokenizer.vocab_size).astype(np.int64)
        inputs = np.where(chosen, np.select([fate < 0.8, fate < 0.9], [np.int64(mask), drawn], tokens), tokens)
        targets = np.where(chosen, tokens, IGNORE)
        return (inputs, targets) if (lengths == tokens.shape[1]).all() else (inputs, targets, lengths)
