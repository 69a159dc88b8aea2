"""Synthetic probes: sequences whose answers are known, drawn anew for every step.

A probe's tokens are symbols, its loss and accuracy are those of the answers alone, and nothing is stored.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from llama_lab.model.loss import IGNORE
from llama_lab.util.errors import ConfigError, require_positive

from .dataset import EMPTY, HALVES, Dataset, Examples, Ids, Index, SplitIndex, Training, Validation
from .folders import json_hash
from .tokenizer import TextTokenizer, symbol_tokenizer

Mask = npt.NDArray[np.bool_]

BLANK, BORDER = ".", "|"
_VERSION = 1  # of what is drawn; raised when a probe draws other sequences
_TRAIN, _VAL = 0, 1  # so that no seed draws the validation set


@dataclass(frozen=True, kw_only=True)
class Probe(ABC):
    """A distribution of sequences of symbols, some of which, the answers, follow from those before them.

    noise: probability with which an answer is replaced by any of the possible ones, drawn uniformly. Raises
    ConfigError.
    """

    noise: float

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if key != "noise":
                require_positive(f"data.{key}", value)
        if not 0 <= self.noise < 1:
            raise ConfigError(f"data.noise={self.noise}: must be at least 0 and less than 1")

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The symbol of each id."""

    @property
    @abstractmethod
    def answers(self) -> range:
        """The ids of which each is an answer equally often."""

    @abstractmethod
    def answered(self, length: int) -> int:
        """The number of answers in a sequence of `length` symbols, the same in all. Raises ConfigError without any."""

    @abstractmethod
    def draw(self, generator: np.random.Generator, sequences: int, length: int) -> tuple[Ids, Mask]:
        """Sequences without noise, and where their answers are: `(sequences, length)` each."""

    @property
    def entropy_floor(self) -> float:
        """The loss of the best predictor, in nats per answer: the entropy of an answer, given all symbols before it.

        The symbols that determine an answer are no answers, and so without noise: they tell the best predictor the one
        of A possible answers that is right. With noise p, it appears with probability q = 1 - p + p/A and each other
        one with r = p/A, independently of all else, and no predictor pays less than
        -q ln q - (A - 1) r ln r nats for it (Gibbs' inequality). Without noise that is 0.
        """
        others = len(self.answers) - 1
        wrong = self.noise / len(self.answers)
        return sum(count * p * math.log(1 / p) for count, p in ((1, self.best_accuracy), (others, wrong)) if p)

    @property
    def best_accuracy(self) -> float:
        """The share of answers that the best predictor gets right."""
        return 1 - self.noise + self.noise / len(self.answers)

    def dataset(self, seq_len: int, val_sequences: int) -> "ProbeDataset":
        """Its training and validation sequences."""
        return ProbeDataset(self, seq_len, val_sequences)


@dataclass(frozen=True, kw_only=True)
class Recall(Probe):
    """Multi-query associative recall (Arora et al. 2023, "Zoology", section 3.1): `k3 v1 k7 v4 . . k7 v4 . . k3 v1`.

    `pairs` of different keys and any values, then a place for each two symbols that are left: `queries` of them, drawn
    at random, hold any of the keys and its value, which is the answer; the others are blank.
    """

    keys: int
    values: int
    pairs: int
    queries: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs > self.keys:
            raise ConfigError(f"data.pairs={self.pairs}: their keys differ; choose at most data.keys={self.keys}")

    @property
    def names(self) -> list[str]:
        """Keys, values and the blank."""
        return [*(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values)), BLANK]

    @property
    def answers(self) -> range:
        """The values."""
        return range(self.keys, self.keys + self.values)

    def answered(self, length: int) -> int:
        """As many as queries."""
        needed = 2 * (self.pairs + self.queries)
        if length < needed:
            problem = f"with data.queries={self.queries} they need {needed} tokens, and the context has {length}"
            raise ConfigError(f"data.pairs={self.pairs}: {problem}; raise model.max_seq_len, or choose fewer")
        return self.queries

    def draw(self, generator: np.random.Generator, sequences: int, length: int) -> tuple[Ids, Mask]:
        """See the class."""
        start = 2 * self.pairs
        keys = _distinct(generator, sequences, self.keys, self.pairs)
        values = generator.choice(self.answers, (sequences, self.pairs))
        tokens = np.full((sequences, length), self.names.index(BLANK))
        tokens[:, 0:start:2], tokens[:, 1:start:2] = keys, values
        asked = generator.integers(self.pairs, size=(sequences, self.queries))
        places = start + 2 * _distinct(generator, sequences, (length - start) // 2, self.queries)
        np.put_along_axis(tokens, places, np.take_along_axis(keys, asked, 1), 1)
        np.put_along_axis(tokens, places + 1, np.take_along_axis(values, asked, 1), 1)
        is_answer = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(is_answer, places + 1, True, 1)
        return tokens, is_answer


@dataclass(frozen=True, kw_only=True)
class _Alphabet(Probe):
    """A probe whose answers are all of its `symbols`."""

    symbols: int

    @property
    def names(self) -> list[str]:
        """The symbols."""
        return [f"s{i}" for i in range(self.symbols)]

    @property
    def answers(self) -> range:
        """All symbols."""
        return range(self.symbols)


@dataclass(frozen=True, kw_only=True)
class Copy(_Alphabet):
    """Copying (Graves et al. 2014, "Neural Turing Machines", section 4.1): `s5 s2 s2 s9 | s5 s2 s2 s9`.

    Random symbols, a border, and the same symbols again, which are the answers; as many as the length holds.
    """

    @property
    def names(self) -> list[str]:
        """Symbols, the border, and the blank that fills a sequence of even length."""
        return [*super().names, BORDER, BLANK]

    def answered(self, length: int) -> int:
        """Half of them."""
        if length < 3:
            raise ConfigError(
                f"model.max_seq_len={length}: data={type(self).__name__.lower()} needs at least 3 tokens; raise it"
            )
        return (length - 1) // 2

    def draw(self, generator: np.random.Generator, sequences: int, length: int) -> tuple[Ids, Mask]:
        """See the class."""
        n = self.answered(length)
        tokens = np.full((sequences, length), self.names.index(BLANK))
        tokens[:, :n] = tokens[:, n + 1 : 2 * n + 1] = generator.choice(self.answers, (sequences, n))
        tokens[:, n] = self.names.index(BORDER)
        place = np.arange(length)
        return tokens, np.broadcast_to((place > n) & (place <= 2 * n), tokens.shape)


@dataclass(frozen=True, kw_only=True)
class Reverse(Copy):
    """Reversing: `s5 s2 s2 s9 | s9 s2 s2 s5`; see `Copy`."""

    def draw(self, generator: np.random.Generator, sequences: int, length: int) -> tuple[Ids, Mask]:
        """See the class."""
        tokens, is_answer = super().draw(generator, sequences, length)
        n = self.answered(length)
        tokens[:, n + 1 : 2 * n + 1] = tokens[:, n - 1 :: -1]
        return tokens, is_answer


@dataclass(frozen=True, kw_only=True)
class Induction(_Alphabet):
    """Induction (Olsson et al. 2022, "In-context Learning and Induction Heads"): `s5 s2 s9 s5 s2 s9 s5 s2`.

    A block of different symbols, drawn at random, repeats to the end. Its size is drawn from `period`/2, rounded up,
    to `period`, so that no fixed distance leads to the answer: only the last occurrence of the present symbol does,
    which the answer followed. Answers are the symbols from the second one after `period` on.
    """

    period: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period > self.symbols:
            raise ConfigError(f"data.period={self.period}: symbols differ; choose at most data.symbols={self.symbols}")

    def answered(self, length: int) -> int:
        """All but the first `period` + 1: by then, the best predictor has seen the block, and where it repeats."""
        if length < self.period + 2:
            problem = f"needs {self.period + 2} tokens, and the context has {length}"
            raise ConfigError(f"data.period={self.period}: {problem}; raise model.max_seq_len, or make it smaller")
        return length - self.period - 1

    def draw(self, generator: np.random.Generator, sequences: int, length: int) -> tuple[Ids, Mask]:
        """See the class."""
        block = _distinct(generator, sequences, self.symbols, self.period)
        sizes = generator.integers(-(-self.period // 2), self.period, (sequences, 1), endpoint=True)
        tokens = np.take_along_axis(block, np.arange(length) % sizes, 1)
        return tokens, np.broadcast_to(np.arange(length) > self.period, tokens.shape)


def _distinct(generator: np.random.Generator, sequences: int, total: int, count: int) -> Ids:
    """For each sequence, `count` different numbers below `total`, in random order: `(sequences, count)`."""
    return generator.random((sequences, total)).argsort(axis=1)[:, :count]


def draw_examples(probe: Probe, generator: np.random.Generator, sequences: int, length: int) -> Examples:
    """Draw sequences of `length` symbols with the probe's noise; inputs begin with the end-of-text token.

    Raises ConfigError if they have no answers.
    """
    probe.answered(length)
    tokens, is_answer = probe.draw(generator, sequences, length)
    noisy = is_answer & (generator.random(tokens.shape) < probe.noise)
    tokens = np.where(noisy, generator.choice(probe.answers, tokens.shape), tokens)
    inputs = np.insert(tokens[:, :-1], 0, len(probe.names), axis=1)  # the end-of-text token has the last id
    return Examples(inputs, np.where(is_answer, tokens, IGNORE))


class Symbols:
    """What `tokenizer=symbols` selects: the tokens are the probe's own symbols."""

    vocabulary_from = "probe"


class ProbeTraining(Training):
    """Training sequences: those of a step are a pure function of the seed and the step."""

    def __init__(self, probe: Probe, seq_len: int, seed: int):
        self._probe, self._seq_len, self._seed = probe, seq_len, seed

    def examples(self, step: int, batch_size: int, rows: slice | range = slice(None)) -> Examples:
        """Return `rows` of the batch at `step`."""
        seeds = np.random.SeedSequence(self._seed, spawn_key=(_TRAIN, step))
        drawn = draw_examples(self._probe, np.random.default_rng(seeds), batch_size, self._seq_len)
        return Examples(drawn.inputs[rows], drawn.targets[rows])


class ProbeValidation(Validation):
    """The fixed validation sequences of a length, the same for every seed.

    half: one of `HALVES`, each of which has sequences of its own; None: yet others.
    """

    def __init__(self, probe: Probe, sequences: int, length: int, half: str | None = None):
        self.seq_len, self.tokens = length, sequences * length
        key = (_VAL, length, *([HALVES.index(half)] if half else []))
        generator = np.random.default_rng(np.random.SeedSequence(0, spawn_key=key))
        self._examples = draw_examples(probe, generator, sequences, length)

    def __len__(self) -> int:
        return len(self._examples.inputs)

    def __getitem__(self, i: int) -> tuple[Ids, Ids]:
        return self._examples.inputs[i], self._examples.targets[i]


class ProbeDataset(Dataset):
    """A probe at the context `seq_len`. Raises ConfigError for a short context.

    half: see `ProbeValidation`. In the index, an answer counts as a token and as a byte; training has no size.
    """

    def __init__(self, probe: Probe, seq_len: int, val_sequences: int, half: str | None = None):
        require_positive("data.val_sequences", val_sequences)
        self.probe, self.val_sequences, self.half = probe, val_sequences, half
        self._seq_len = seq_len
        answers = val_sequences * probe.answered(seq_len)
        settings = [_VERSION, type(probe).__name__, asdict(probe), val_sequences, *([half] if half else [])]
        self.index = Index(
            vocab_size=self.tokenizer.vocab_size,
            data_hash=json_hash(settings, 16),  # without seed and context
            tokenizer_hash=self.tokenizer.hash,
            train=EMPTY,
            val=SplitIndex(val_sequences, answers, answers),
        )
        self.entropy_floor = probe.entropy_floor

    def validated_on(self, half: str | None) -> "ProbeDataset":
        """The same probe with other validation sequences, as many."""
        return ProbeDataset(self.probe, self._seq_len, self.val_sequences, half)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """A token per symbol; symbols are separated by spaces."""
        return symbol_tokenizer(self.probe.names)

    def unigram_entropy(self) -> float:
        """Nats per answer of the best predictor without context: all answers are equally likely."""
        return math.log(len(self.probe.answers))

    def require_windows(self, seq_len: int, batch_size: int) -> None:
        """Raise ConfigError unless sequences of `seq_len` symbols have answers."""
        self.probe.answered(seq_len)

    def train_windows(self, seq_len: int, seed: int) -> ProbeTraining:
        """Training sequences."""
        return ProbeTraining(self.probe, seq_len, seed)

    def val_windows(self, length: int) -> ProbeValidation:
        """Validation sequences of any length."""
        return ProbeValidation(self.probe, self.val_sequences, length, self.half)
