"""eval.json: the results of evaluating a trained run."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .json_file import JsonRecord


@dataclass(frozen=True)
class LengthLoss:
    """The loss on a token stream read in windows of `length` tokens.

    loss: mean nats per token; None where there is none, and `note` says why. accuracy: of a probe, the share of answers
        that got the largest logit.
    positions, losses, tokens: for each bucket of positions its mean position, mean nats per token, and number of
        predicted tokens, by which the losses are to be weighted. Position p, from 0, predicts from p + 1 tokens.
    """

    length: int
    loss: float | None = None
    positions: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    note: str = ""
    accuracy: float | None = None


@dataclass(frozen=True)
class CacheSize:
    """Bytes of the KV caches of `batch_size` sequences of `context` tokens.

    formula_bytes: by `llama_lab/model/cost.py`. state_bytes: those of them before any token. measured_bytes: of the
    memory behind its tensors after the tokens were read. allocated_bytes: what CUDA's allocator gave for it when it was
    new, in blocks of 512 bytes; None on other devices. source_bytes: of an encoder-decoder's, those of the source.
    """

    batch_size: int
    context: int
    dtype: str
    formula_bytes: int
    measured_bytes: int
    allocated_bytes: int | None = None
    state_bytes: int = 0
    source_bytes: int = 0


@dataclass(frozen=True)
class CacheLoss:
    """Mean nats per token of the validation text, read in trained windows through a KV cache of this dtype.

    None unless it is finite.
    """

    dtype: str
    loss: float | None


@dataclass(frozen=True)
class GenerationSpeed:
    """Seconds per measured round, with `batch_size` sequences of up to `context` tokens.

    prefill: to read prompts of `context` tokens. decode: for the next token of every sequence, with the cache.
    uncached: the same without it, which reads the whole context again. Empty where it was not measured.
    """

    batch_size: int
    context: int
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    uncached: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class TaskScore:
    """A metric of one task of EleutherAI's lm-evaluation-harness.

    stderr: its standard error; None where the harness gives none. fewshot: examples in the context. samples: number of
    questions asked. version: of the task. harness: version of lm-eval.
    """

    task: str
    metric: str
    value: float
    stderr: float | None = None
    fewshot: int | None = None
    samples: int | None = None
    version: str = ""
    harness: str = ""


@dataclass(frozen=True)
class DocumentLosses(JsonRecord):
    """What a finished run loses on each held-out document, or group of neighbouring ones, in reading order.

    tokens: that are predicted of each. nats: the sum of their losses.
    """

    FILE: ClassVar[str] = "documents.json"
    tokens: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Evaluation(JsonRecord):
    """The results after `step` steps, and where they were measured; parts that were not asked for are empty.

    metrics: `val/loss`, `val/perplexity`, `val/bits_per_byte` of next tokens; `val_tokens`, those predicted;
    `val/accuracy`, unless those are the next tokens of a text. unit: what losses are means over; None: tokens. lengths:
    the trained one first. data_hash: of the text that an imported model was evaluated on; runs of the same `data_hash`
    were validated on it.
    """

    FILE: ClassVar[str] = "eval.json"
    step: int | None = None
    device: str = ""
    precision: str = ""
    threads: int = 0
    torch: str = ""
    data_hash: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    unit: str | None = None
    lengths: list[LengthLoss] = field(default_factory=list)
    tasks: list[TaskScore] = field(default_factory=list)
    cache: list[CacheSize] = field(default_factory=list)
    cache_losses: list[CacheLoss] = field(default_factory=list)
    speed: list[GenerationSpeed] = field(default_factory=list)
    sample: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The content of the file, without empty parts."""
        return {key: value for key, value in super().to_json().items() if value not in (None, [])}


@dataclass(frozen=True, kw_only=True)
class EmaEvaluation(Evaluation):
    """The same of the average of a run's weights; see `train.ema`."""

    FILE: ClassVar[str] = "eval_ema.json"
