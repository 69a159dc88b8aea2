"""What the analysis of a study finds: plain data, from which page, table and CSV are made.

Losses are in nats per token, `bits` in bits per byte of text. Deltas are arm minus reference: negative is better.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from llama_lab.formatting import UNKNOWN
from llama_lab.runs.record import Record
from llama_lab.study.speed import StudySpeed
from llama_lab.study.statistics import Effect, Estimate, PairedDifference, SeedRange
from llama_lab.study.study import Arm, Study

Metric = Literal["val/loss", "val/bits_per_byte"]
CurveMetric = Literal["val/loss", "train/loss", "val/bits_per_byte"]

# What an arm costs: by its config, and as measured.
FIXED_COSTS = (
    "params",
    "params_non_embedding",
    "flops_per_token",
    "train_flops_per_token",
    "kv_cache/bytes_per_token",
    "kv_cache/bytes",
    "seq_len",
)
MEASURED_COSTS = ("perf/tokens_per_second", "perf/mfu", "perf/peak_memory_bytes")


@dataclass(frozen=True)
class Comparison:
    """One arm against another, over the seeds that both have finished.

    nats: None where the two have different tokenizers, and nats per token mean different things. Interval and p are
    those of the family that the comparison belongs to; nan where it belongs to none, or is not tested. untested: why
    it is not, in words. seeds_needed: from how many to how many seeds would find such a difference (80% power); None
    where it is significant, or nothing is known.
    """

    arm: str
    against: str
    seeds: tuple[int, ...]
    nats: PairedDifference | None
    bits: PairedDifference
    seeds_needed: SeedRange | None = None
    untested: str = ""

    @property
    def significant(self) -> bool:
        """Whether the difference is significant at 5%, in its family."""
        return self.difference.significant

    @property
    def difference(self) -> PairedDifference:
        """In the unit that the two are judged in."""
        return self.bits if self.nats is None else self.nats


@dataclass(frozen=True)
class Reach:
    """The tokens in which an arm came to the baseline's final loss at the same seed, over those the baseline took.

    ratios: by seed. censored: the seeds whose run ended before it came there; their ratio is what it is known to be
    above. ratio: the geometric mean over seeds with its interval by Student's t; None where a seed is censored.
    """

    ratios: dict[int, float]
    censored: frozenset[int]
    ratio: Estimate | None


@dataclass(frozen=True)
class ArmResult:
    """An arm at the learning rates it is judged at.

    learning_rates: those of its runs, each once. records: all of them at these rates, finished or not. loss, bits: of
    the finished ones; None without any. to_reach: what it took to reach the baseline's final loss at the same seed:
    "tokens", "flops" (of training) and "seconds", means over seeds; empty where not every seed came there. reach: the
    tokens of every seed. costs: of FIXED_COSTS, and means over seeds of MEASURED_COSTS, what is known. difference:
    config groups and keys that differ from those of the arm before, or else of the baseline, with (its value, this
    one's).
    """

    arm: Arm
    learning_rates: tuple[float, ...]
    records: tuple[Record, ...]
    loss: Estimate | None
    bits: Estimate | None
    to_previous: Comparison | None = None
    to_baseline: Comparison | None = None
    to_reach: dict[str, float] = field(default_factory=dict)
    reach: Reach | None = None
    costs: dict[str, float] = field(default_factory=dict)
    difference: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    @property
    def comparison(self) -> Comparison | None:
        """To the arm before, or else to the baseline."""
        return self.to_previous or self.to_baseline

    @property
    def verdict(self) -> str:
        """Of that comparison, in a word; a dash where there is none, as of the baseline."""
        if self.loss is None:
            return "no finished run"
        return self.comparison.difference.verdict if self.comparison else UNKNOWN

    def judged(self, metric: Metric) -> Estimate | None:
        """The loss that the arm is judged by."""
        return self.loss if metric == "val/loss" else self.bits

    def mean_over(self, seeds: Collection[int], metric: Metric) -> float:
        """The mean loss of the finished runs with these seeds, at least one."""
        return fmean(record.summary[metric] for record in self.records if record.done and record.seed in seeds)


def ranked(arms: Sequence[ArmResult], metric: Metric) -> tuple[tuple[int, ...], dict[str, float]]:
    """The seeds that all arms have finished, of those that finished any, and each such arm's mean over them.

    Survivors of a divergence would otherwise be ranked against runs on other seeds.
    """
    finished = {arm.name: {record.seed for record in arm.records if record.done} for arm in arms}
    common = set.intersection(*filter(None, finished.values())) if any(finished.values()) else set()
    means = {arm.name: arm.mean_over(common, metric) for arm in arms if common and finished[arm.name]}
    return tuple(sorted(common)), means


@dataclass(frozen=True)
class Curve:
    """A loss over the training of one arm: mean over seeds, with the lowest and highest seed.

    All lists are of one length, at most 200.
    """

    arm: str
    metric: CurveMetric
    tokens: list[float]
    flops: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class DifferenceCurve:
    """A comparison, or an effect, at the evaluations that all finished runs share, at most 40, judged at each.

    name: of the arm, or the effect. against: what the arm is compared with; empty for an effect. low, high: the
    simultaneous interval, nan where nothing is tested; the last one is that of the report.
    """

    name: str
    against: str
    tokens: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Interaction:
    """The mean loss at each combination of two axes of a factorial.

    levels: of each axis, the baseline's option and the other one. means: `means[i][j]` at level i of the first axis and
    j of the second.
    """

    axes: tuple[str, str]
    levels: tuple[tuple[str, str], tuple[str, str]]
    means: tuple[tuple[float, float], tuple[float, float]]

    @property
    def size(self) -> float:
        """The absolute effect: half the change of one axis's effect as the other one goes over."""
        (a, b), (c, d) = self.means
        return abs(d - c - b + a) / 2


@dataclass(frozen=True)
class LearningRates:
    """The final loss of one arm over its grid of learning rates; `loss` is None where no run finished.

    on_edge: whether the best lies at an end of the grid, and a better one may lie beyond. sensitivity: mean of
    min(loss, loss of unigram frequencies) minus the best loss over the grid (Wortsman et al. 2023, section 2.2, with
    the loss of a model that has learned frequencies alone in the place of the loss at the start). chosen: for each
    judged seed the rate that its own tuning runs are best at; empty where there are none, and the rate with the best
    mean is judged on the runs that it was chosen by.
    """

    arm: str
    rates: list[float]
    loss: list[Estimate | None]
    diverged: list[int]
    best: float
    on_edge: bool
    sensitivity: float
    chosen: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Divergence:
    """A run that did not come to its end, and why. tokens: how far it is known to have come.

    is_tuning: whether it only helped to choose a learning rate.
    """

    arm: str
    seed: int
    status: str
    tokens: float
    message: str
    learning_rate: float | None = None
    is_tuning: bool = False


@dataclass(frozen=True)
class Lengths:
    """The final loss of one arm at several context lengths; None where its position encoding ends before.

    by_position: for each length, the mean position of each bucket, and its loss; both over seeds. changes: for each
    length, the loss minus that at the trained one, paired by seed; None where no seed has both.
    """

    arm: str
    trained: int
    lengths: list[int]
    loss: list[Estimate | None]
    by_position: dict[int, tuple[list[float], list[float]]]
    changes: list[PairedDifference | None] = field(default_factory=list)


@dataclass(frozen=True)
class Front:
    """The arms that no other one beats in both loss and cost."""

    kv_cache: tuple[str, ...]
    throughput: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, with the lowest and the highest of them."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """How fast an arm generates, `batch_size` sequences at once, at the end of a context of `context` tokens.

    Over the runs in which it was measured, `runs` of them; of each run the median of its rounds. decode, uncached:
    tokens per second, of all sequences together, with the KV cache and without it. gain: the former over the latter.
    prefill: seconds to read the prompts. None where it was not measured in all of the runs.
    """

    batch_size: int
    context: int
    runs: int
    decode: Spread | None
    uncached: Spread | None
    gain: Spread | None
    prefill: Spread | None


@dataclass(frozen=True)
class CacheSize:
    """The bytes of the KV cache of one sequence of `context` tokens, with elements of `dtype`.

    measured: of its tensors. formula: of the cost model.
    """

    dtype: str
    context: int
    measured: Spread
    formula: Spread


@dataclass(frozen=True)
class Inference:
    """What generating costs one arm, as measured at every batch size and context that all of its measured runs have."""

    arm: str
    speeds: tuple[Speed, ...]
    caches: tuple[CacheSize, ...]

    def speed(self, batch_size: int) -> Speed | None:
        """At the largest context that was measured with this batch size."""
        found = (speed for speed in self.speeds if speed.batch_size == batch_size)
        return max(found, key=lambda speed: speed.context, default=None)

    def cache(self, dtype: str) -> CacheSize | None:
        """At the largest context that was measured with elements of this type."""
        found = (cache for cache in self.caches if cache.dtype == dtype)
        return max(found, key=lambda cache: cache.context, default=None)


@dataclass(frozen=True)
class Provenance:
    """How it was made. environment: a fact's name, and each of its values with the number of runs that had it."""

    seeds: tuple[int, ...]
    environment: dict[str, dict[str, int]]
    baseline_config: str


@dataclass(frozen=True)
class Result:
    """Everything the report says, in the order of its sections.

    metric: what arms are judged by: "val/loss", or "val/bits_per_byte" where tokenizers differ. verdict: one sentence.
    answer: several. tests: which comparisons were tested together, and how. warnings: what was not controlled, in
    sentences. notes: what else a reader must know. speed: of the arms side by side; None where that was not measured,
    and costs have the speeds that the runs logged. records: every run that the study lists, at every learning rate.
    """

    study: Study
    metric: Metric
    tests: str
    answer: tuple[str, ...]
    arms: tuple[ArmResult, ...]
    curves: tuple[Curve, ...]
    front: Front
    inference: tuple[Inference, ...]
    effects: tuple[Effect, ...]
    learning_rates: tuple[LearningRates, ...]
    divergences: tuple[Divergence, ...]
    lengths: tuple[Lengths, ...]
    provenance: Provenance
    warnings: tuple[str, ...]
    speed: StudySpeed | None = None
    verdict: str = ""
    notes: tuple[str, ...] = ()
    difference_curves: tuple[DifferenceCurve, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    records: tuple[Record, ...] = ()
