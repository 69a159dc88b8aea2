"""The result of a study's analysis: plain data that the page, the tables and the exports are made from.

Losses are in nats per token, `bits` in bits per byte of text. Differences are arm minus reference: negative is better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

import pandas as pd

from llama_lab.config.trust import Trust
from llama_lab.data.objectives import targets_of
from llama_lab.drawing.anatomy import Anatomy
from llama_lab.runs.record import MISSING, Record, finished, started
from llama_lab.runs.stored import STATE, UNITS
from llama_lab.runs.study import Arm, Member, Study, StudySpeed
from llama_lab.util.formatting import UNKNOWN

from .scaling_law import Scaling
from .sentences import by_value
from .settings import KIND
from .statistics import Effect, Estimate, PairedDifference, SeedRange, estimate, pareto_front

Loss = Literal["val/loss", "val/bits_per_byte", "val/second_half_loss"]
BITS: Loss = "val/bits_per_byte"
SECOND_HALF: Loss = "val/second_half_loss"
Quantity = Literal["loss", "train", "decode", "prefill", "memory", "cache", "longest"]
Architectures = tuple[tuple[Anatomy, Anatomy | None], ...]
CurveMetric = Literal[Loss, "train/loss"]
SPEEDS = ("perf/tokens_per_second", "perf/mfu")


@dataclass(frozen=True)
class Comparison:
    """One arm against another, over the seeds that both have finished.

    nats: None if the tokenizers differ, and nats per token are not comparable. bits: None of second halves, whose bytes
    are not counted. Intervals and p are those of the family that the comparison belongs to; nan if it belongs to none,
    or is untested. untested: the reason, in words; empty if there is none. seeds_needed: the fewest and the most seeds
    that would detect such a difference with 80% power; None if it is significant or untested. over_documents: the
    difference in nats with its 95% interval over other held-out documents; None where that is not known.
    """

    arm: str
    against: str
    seeds: tuple[int, ...]
    nats: PairedDifference | None
    bits: PairedDifference | None
    seeds_needed: SeedRange | None = None
    untested: str = ""
    over_documents: PairedDifference | None = None

    @property
    def name(self) -> str:
        """The name of the arm."""
        return self.arm

    @property
    def change(self) -> PairedDifference:
        """The difference in the unit that the arms are judged in."""
        change = self.bits if self.nats is None else self.nats
        assert change is not None
        return change

    @property
    def is_of_these_documents(self) -> bool:
        """Whether it is significant over seeds, and other documents might not show it."""
        others = self.over_documents
        return self.change.significant and others is not None and others.low <= 0 <= others.high


Finding = Comparison | Effect
"""The change of the loss by a step, an arm or an effect."""


@dataclass(frozen=True)
class Reach:
    """The tokens that an arm took to reach the baseline's final loss at the same seed, over those the baseline took.

    ratios: by seed. censored: the seeds whose run ended before reaching it; their ratio is a lower bound. ratio: the
    geometric mean over seeds with its interval by Student's t; None if a seed is censored.
    """

    ratios: dict[int, float]
    censored: frozenset[int]
    ratio: Estimate | None


@dataclass(frozen=True)
class ArmResult:
    """An arm at the learning rates it is judged at.

    learning_rates: of its runs, each once. records: its runs at these rates, finished or not. loss, bits: over the
    finished ones; None without any. accuracy: the same of a probe's answers. ema: of the average of the weights,
    where they have one. to_reach: "tokens", "flops" (of training)
    and "seconds" to the baseline's final loss at the same seed, means over seeds; empty unless every seed reached it.
    reach: the tokens seed by seed. costs: the known ones of FIXED_COSTS, and means over seeds of MEASURED_COSTS.
    difference: config groups and keys that differ from the arm before, or else from the baseline, with (its value, this
    arm's value).
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
    accuracy: Estimate | None = None
    ema: Estimate | None = None

    @property
    def name(self) -> str:
        """The name of the arm."""
        return self.arm.name

    @property
    def comparison(self) -> Comparison | None:
        """The comparison to the arm before, or else to the baseline."""
        return self.to_previous or self.to_baseline

    @property
    def verdict(self) -> str:
        """The verdict of `comparison`; a dash without one, as for the baseline."""
        if self.loss is None:
            return "no finished run"
        return self.comparison.change.verdict if self.comparison else UNKNOWN

    @property
    def entropy_floor(self) -> float | None:
        """The loss of a probe's best predictor; None for text."""
        return next((floor for r in self.records if (floor := r.environment.entropy_floor) is not None), None)

    def judged(self, metric: Loss) -> Estimate | None:
        """The loss that the arm is judged by."""
        return self.bits if metric == BITS else self.loss


def unit_of(arms: Sequence[ArmResult], metric: str) -> str:
    """The unit of a loss of these arms: that of a probe is a mean over its answers alone."""
    is_probe = any(arm.entropy_floor is not None for arm in arms)
    return UNITS[metric].replace("token", "answer") if is_probe else UNITS[metric]


def judged_by(records: Sequence[Record]) -> list[Loss]:
    """The losses that compare runs, of which the first judges them: in nats of the same tokens, or in bits.

    Families and objectives predict different parts of a window, and all of them the second half of it.
    """
    if len({(record.environment.tokenizer_hash, record.environment.data_hash) for record in records}) > 1:
        return [BITS]
    kinds = {tuple(record.config.get(key) for key in KIND) for record in records}
    if len(kinds) > 1 and all(SECOND_HALF in record.summary for record in finished(records)):
        return [SECOND_HALF]
    return ["val/loss", BITS] if all(BITS in record.summary for record in finished(records)) else ["val/loss"]


def final_losses(runs: Mapping[str, Sequence[Record]], metric: Loss) -> pd.DataFrame:
    """The final loss of every finished run, (seeds, arms); nan for the others. runs: by arm."""
    found = {arm: {r.seed: r.summary.get(metric, math.nan) for r in records if r.done} for arm, records in runs.items()}
    return pd.DataFrame(found, dtype=float).sort_index()


def first_losses(records: Sequence[Record], metric: Loss) -> dict[int, float]:
    """The loss before the first step of every run that started from trained weights, by seed."""
    found = {r.seed: next((row for row in r.metrics if metric in row), None) for r in records}
    return {seed: row[metric] for seed, row in found.items() if row and row["step"] == 0}


def estimate_of(records: Sequence[Record], metric: Loss | Literal["val/accuracy", "val/ema_loss"]) -> Estimate | None:
    """The mean over the finished runs that have the metric, with its interval; None without any."""
    found = [record.summary[metric] for record in finished(records) if metric in record.summary]
    return estimate(found) if found else None


def common_losses(arms: Sequence[ArmResult], metric: Loss) -> pd.DataFrame:
    """The `final_losses` of the arms with any finished run, at the seeds that all of these have finished.

    Otherwise the survivors of a divergence would be ranked against runs with other seeds.
    """
    losses = final_losses({arm.name: arm.records for arm in arms}, metric)
    return losses.dropna(axis="columns", how="all").dropna()


@dataclass(frozen=True)
class Curve:
    """A loss over the training of one arm: mean, lowest and highest over seeds, at up to 200 points."""

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
    """A comparison or an effect over training, tested at up to 40 evaluations that all finished runs share.

    name: of the arm or effect. against: the arm's reference; empty for an effect. low, high: the simultaneous interval,
    nan if untested; the last one is the reported interval.
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

    levels: each axis's options, the baseline's first. means: `means[i][j]` at level i of the first axis and j of the
    second. changes: likewise, the interaction of both changes from the first levels, an Effect's; None at these, and
    where a fraction of the design cannot separate it from an effect that is reported.
    """

    axes: tuple[str, str]
    levels: tuple[tuple[str, ...], tuple[str, ...]]
    means: tuple[tuple[float, ...], ...]
    changes: tuple[tuple[PairedDifference | None, ...], ...]

    @property
    def largest(self) -> PairedDifference | None:
        """The largest of the changes."""
        known = [change for row in self.changes for change in row if change]
        return max(known, key=lambda change: abs(change.mean), default=None)


@dataclass(frozen=True)
class LearningRates:
    """The final loss of one arm over its grid of learning rates.

    loss: None at a rate where no run finished. at_edge: the best rates, of tuning seeds if there are any, that are an
    end of their grid. sensitivity: mean loss over the grid minus the lowest, where a diverged run counts with the
    entropy of token frequencies (Wortsman et al. 2023, section 2.2, who cap all losses at that of initialization).
    chosen: the rate that each judged seed's own tuning runs choose; empty without tuning runs, when the rate with the
    best mean is judged on the runs that it was chosen from. left: by how much the judged runs end above the loss at the
    arm's best rate, by the curvature of the mean loss of its tuning seeds and the spread of the judged rates; nan if
    not known.
    """

    arm: str
    rates: list[float]
    loss: list[Estimate | None]
    diverged: list[int]
    best: float
    at_edge: list[float]
    sensitivity: float
    chosen: dict[int, float] = field(default_factory=dict)
    left: float = math.nan


@dataclass(frozen=True)
class Lengths:
    """The final loss of one arm at several context lengths; None beyond the end of its position encoding.

    by_position: for each length, the mean position and loss of each bucket, over seeds. changes: for each length, the
    loss minus that at the trained length, paired by seed; None if no seed has both.
    """

    arm: str
    trained: int
    loss: dict[int, Estimate | None]
    by_position: dict[int, tuple[list[float], list[float]]]
    changes: dict[int, PairedDifference | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, with the lowest and the highest seed."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """How fast an arm generates `batch_size` sequences at once, at the end of a context of `context` tokens.

    Over the `runs` runs that measured it, each with the median of its rounds. decode, uncached: tokens per second over
    all sequences, with and without the KV cache. gain: their ratio. prefill: seconds to read the prompts. None if some
    run did not measure it.
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

    measured: from its tensors. formula: from the cost model.
    """

    dtype: str
    context: int
    measured: Spread | None
    formula: Spread | None


@dataclass(frozen=True)
class Inference:
    """The cost of generation of one arm, at each batch size and context that all of its evaluated runs measured."""

    arm: str
    speeds: tuple[Speed, ...]
    caches: tuple[CacheSize, ...]

    def speed(self, batch_size: int) -> Speed | None:
        """The speed at the largest context measured with this batch size."""
        found = (speed for speed in self.speeds if speed.batch_size == batch_size)
        return max(found, key=lambda speed: speed.context, default=None)

    def cache(self, dtype: str) -> CacheSize | None:
        """The size at the largest context measured with this element type."""
        found = (cache for cache in self.caches if cache.dtype == dtype)
        return max(found, key=lambda cache: cache.context, default=None)


@dataclass(frozen=True)
class Telemetry:
    """What the runs of one arm logged of each layer, see `train.telemetry`.

    tokens: of a few logged steps, the first and the last among them. values: of each quantity, a row for each of these
    with a value for each layer, means over seeds; nan where a layer has none.
    """

    arm: str
    tokens: list[float]
    values: dict[str, list[list[float]]]


@dataclass(frozen=True)
class Standing:
    """An arm's value of a quantity and its rank, 1 being the best.

    value: with its 95% interval, which exact values do not have; None if unknown. ranks: the interval of the rank, see
    rank_intervals; None if the arm is not ranked, and `reason` says why.
    """

    arm: str
    value: Estimate | None
    ranks: tuple[int, int] | None
    reason: str = ""


@dataclass(frozen=True)
class Ranking:
    """All arms by one quantity.

    quantity: the loss; tokens per second of training, decoding and prefill, means over rounds; bytes that training
    allocates on a GPU, and of the KV cache of a full context; the loss at the longest evaluated context, of `context`
    tokens. better: the pairs of arms of which the first is better than the second, significantly unless values are
    exact.
    """

    quantity: Quantity
    standings: tuple[Standing, ...]
    better: frozenset[tuple[str, str]]
    context: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether any arm has a value."""
        return any(standing.value for standing in self.standings)

    def standing(self, arm: str) -> Standing:
        """The standing of the arm of this name."""
        return next(standing for standing in self.standings if standing.arm == arm)


@dataclass(frozen=True)
class Result:
    """Everything that the report shows.

    metric: what arms are judged by, see `judged_by`. verdict: one sentence.
    answer: several. tests: which comparisons were tested together, and how. warnings: what was not controlled, in
    sentences. notes: other remarks. records: one per member of the study, in their order, tuning runs included. seeds:
    those that are judged. environment: for each fact, its values with the number of runs that had them. speed: of the
    arms side by side; None if not measured, when costs have the speeds that the runs logged. pairs, ranks: of all arms,
    with the interval of each rank (see rank_intervals); empty unless the study compares all pairs. architectures: see
    `architectures`. scaling: of a study over sizes and budgets. trust: packages whose components the configs of runs
    may name; models are rebuilt to check sizes.
    """

    study: Study
    metric: Loss = "val/loss"
    tests: str = "none"
    arms: tuple[ArmResult, ...] = ()
    records: tuple[Record, ...] = ()
    seeds: tuple[int, ...] = ()
    environment: dict[str, dict[str, int]] = field(default_factory=dict)
    baseline_config: str = ""
    curves: tuple[Curve, ...] = ()
    inference: tuple[Inference, ...] = ()
    effects: tuple[Effect, ...] = ()
    learning_rates: tuple[LearningRates, ...] = ()
    lengths: tuple[Lengths, ...] = ()
    unfinished: tuple[tuple[Member, Record], ...] = ()
    speed: StudySpeed | None = None
    verdict: str = ""
    answer: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    difference_curves: tuple[DifferenceCurve, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    telemetry: tuple[Telemetry, ...] = ()
    pairs: tuple[Comparison, ...] = ()
    ranks: dict[str, tuple[int, int]] = field(default_factory=dict)
    rankings: tuple[Ranking, ...] = ()
    architectures: Architectures = ()
    scaling: Scaling | None = None
    trust: Trust = field(default_factory=Trust)

    @property
    def unit(self) -> str:
        """The unit of `metric`."""
        return unit_of(self.arms, self.metric)

    @property
    def nats(self) -> Loss:
        """The loss of arms in nats per token: `metric`, if that is not in bits per byte."""
        return "val/loss" if self.metric == BITS else self.metric

    @property
    def targets(self) -> list[str]:
        """What runs predict; losses of unlike targets do not compare."""
        return sorted({targets_of(record.config) for record in self.started})

    def front(self, cost: str) -> tuple[str, ...]:
        """The arms that no other one beats in both the loss, over common seeds, and a cost, of speeds the slowness."""
        means, sign = common_losses(self.arms, self.metric).mean().dropna(), -1 if cost in SPEEDS else 1
        costs = {arm.name: sign * arm.costs[cost] for arm in self.arms if cost in arm.costs and arm.name in means}
        return tuple(compress(costs, pareto_front([*costs.values()], [means[name] for name in costs])))

    @property
    def members(self) -> list[tuple[Member, Record]]:
        """Each member of the study with its record."""
        members = [member for arm in self.study.arms for member in arm.members]
        return list(zip(members, self.records, strict=True))

    @property
    def is_complete(self) -> bool:
        """Whether all judged runs have ended."""
        return all(record.status in ("done", "diverged") for arm in self.arms for record in arm.records)

    @property
    def undecided_arms(self) -> list[str]:
        """The arms of comparisons whose interval is neither within the margin of the study nor beyond it.

        All arms if an effect has such an interval. A comparison over fewer seeds than others was decided before these.
        """
        margin = self.study.margin or math.inf
        if any(effect.change.is_undecided(margin) for effect in self.effects):
            return [arm.name for arm in self.arms]
        compared = [found for arm in self.arms for found in (arm.to_previous, arm.to_baseline) if found]
        undecided = set[str]()
        for c in (*compared, *self.pairs):
            if c.change.n == len(self.seeds) and c.change.is_undecided(margin):
                undecided |= {c.arm, c.against}
        return [arm.name for arm in self.arms if arm.name in undecided]

    @property
    def is_swept(self) -> bool:
        """Whether the learning rate of some arm was searched."""
        return bool(self.learning_rates)

    @property
    def has_states(self) -> bool:
        """Whether some arm has a recurrent state, of any size."""
        return any(arm.costs.get(STATE) for arm in self.arms)

    @property
    def started(self) -> list[Record]:
        """The records of the runs that left anything."""
        return started(self.records)

    @property
    def by_role(self) -> list[list[Record]]:
        """Those of judged runs, and those of tuning runs."""
        roles = [str(member.tunes is None) for member, record in self.members if record.status != MISSING]
        return list(by_value(self.started, roles).values())
