"""Files of a study: its arms and comparisons in study.yaml, and measured speeds in speed.json."""

from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any, ClassVar, Self

from llama_lab.config.trust import read_settings
from llama_lab.util.errors import ConfigError, first_line

from .folder import write_yaml
from .json_file import JsonRecord, from_json

FILE = "study.yaml"
SUMMARY = "summary.csv"  # of a report
# What `match` makes equal among arms. Parameters exclude token and position tables and the head. Otherwise most of a
# small model's feed-forward would make up for the untied embeddings.
MATCHED = {
    "params": "parameters without embeddings",
    "active": "active parameters without embeddings",
    "flops": "FLOPs per token",
}
MOST_RESIDUAL = 0.005  # of matching that is not reported, relative
Pair = tuple[str, str]  # an arm and the one that it is compared with


@dataclass(frozen=True)
class Member:
    """One run of a study.

    folder: of the run, relative to the study's folder, or absolute. learning_rate: a tuning run's; a judged one's is in
    its record. tunes: the first judged seed whose learning rate this run helps to choose; None for a judged run.
    """

    folder: str
    seed: int
    learning_rate: float | None = None
    tunes: int | None = None


@dataclass(frozen=True)
class Arm:
    """One architecture of a study, with its judged and tuning runs.

    axes: the level of each axis, such as `{"norm": "rmsnorm"}`. previous: the arm one step before, if any. residual:
    relative difference to the reference that is left after matching; None if unmatched.
    settings: the arm's values of the config keys in which the planned arms differ, such as `{"model.norm.eps": 1e-6}`;
    None if no plan recorded them. overrides: those that make the arm, in addition to the shared ones. reference: the
    arm whose size it is matched to; its own name for none. Both are empty if the arm is not of a design. tuned_by: the
    arm whose tuning runs choose this one's learning rates; empty: its own. flops: of training each run, by the plan.
    """

    name: str
    axes: dict[str, str]
    members: tuple[Member, ...] = ()
    previous: str | None = None
    residual: float | None = None
    settings: dict[str, Any] | None = None
    overrides: tuple[str, ...] = ()
    reference: str = ""
    tuned_by: str = ""
    flops: float | None = None

    @property
    def tuner(self) -> str:
        """The name of the arm whose tuning runs choose its learning rates."""
        return self.tuned_by or self.name

    @property
    def judged(self) -> tuple[Member, ...]:
        """The runs that are compared."""
        return tuple(member for member in self.members if member.tunes is None)

    @property
    def tuning(self) -> tuple[Member, ...]:
        """The runs that choose learning rates."""
        return tuple(member for member in self.members if member.tunes is not None)

    def below(self, folder: Path) -> Self:
        """The arm with `folder` before the relative paths of its members."""
        return replace(self, members=tuple(replace(one, folder=str(folder / one.folder)) for one in self.members))


@dataclass(frozen=True)
class Study:
    """A set of arms. baseline: the name of the arm that all others are compared with.

    design: ladder, leave_one_out, ...; "comparison" for runs that were grouped afterwards. match: of MATCHED, or
    none; "" if unknown. notes: caveats, as sentences. margin: the largest change of the loss that does not matter, in
    the unit in which arms are judged; None if not given. looks: reports on fewer seeds, as version 0.4 counted them.
    title: of the report; default: see `heading`. lead: the title of the section that its report begins with; default:
    that of the arms. compare: "all": all pairs of arms are tested as one family; "baseline": each arm with the one that
    it is a step from, or else with the baseline. max_seeds: the most seeds on which reports will test; None if that was
    not declared. reported_seeds: numbers of seeds on which reports have tested; None if no command recorded them.
    """

    name: str
    design: str
    baseline: str
    arms: tuple[Arm, ...]
    match: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    margin: float | None = None
    looks: int = 0
    title: str = ""
    lead: str = ""
    compare: str = "baseline"
    max_seeds: int | None = None
    reported_seeds: tuple[int, ...] | None = None

    @property
    def heading(self) -> str:
        """The title of the report; default: design and baseline."""
        others = len(self.arms) - 1
        arms = f" and {others} other {'arm' if others == 1 else 'arms'}" if others else ""
        return self.title or f"{self.design.replace('_', ' ').capitalize()}: {self.baseline}{arms}"

    @property
    def axes(self) -> list[str]:
        """Those of all arms, once each."""
        return list(dict.fromkeys(axis for arm in self.arms for axis in arm.axes))

    @property
    def is_factorial(self) -> bool:
        """Whether its arms are combinations of the options of several axes, which are compared by their effects."""
        return self.design == "factorial" or (self.design == "options" and len(self.arms[0].axes) > 1)

    @property
    def is_chain(self) -> bool:
        """Whether each arm is a step from the one before it."""
        return all(arm.previous == before.name for before, arm in pairwise(self.arms))

    @property
    def is_scaling(self) -> bool:
        """Whether its arms are compared within one size and budget, and not with one baseline."""
        return self.design == "scaling"

    @property
    def is_grouped(self) -> bool:
        """Whether its arms are runs that were grouped afterwards."""
        return self.design == "comparison"

    @property
    def steps(self) -> list[Pair]:
        """Every arm that is a step from another one, with that."""
        return [(arm.name, arm.previous) for arm in self.arms if arm.previous]

    @property
    def to_baseline(self) -> list[Pair]:
        """Every other arm with the baseline."""
        return [(arm.name, self.baseline) for arm in self.arms if arm.name != self.baseline and not self.is_scaling]

    @property
    def question(self) -> list[Pair]:
        """The pairs that answer the question of the design; none of a factorial, which its effects answer."""
        return [] if self.is_factorial else self.steps or self.to_baseline

    @property
    def family(self) -> list[Pair]:
        """The pairs that are tested together: those of the question, or all, directed as in the others."""
        if self.compare != "all":
            return self.question
        others = [(later.name, arm.name) for arm, later in combinations(self.arms, 2)]
        return list({frozenset(pair): pair for pair in (*others, *self.to_baseline, *self.question)}.values())

    @property
    def ends(self) -> list[Pair]:
        """The last arm of a ladder with its baseline, the first; none for a ladder of one step, or all pairs."""
        last = self.arms[-1].name
        is_asked = self.is_chain and len(self.arms) > 2 and self.compare != "all" and last != self.baseline
        return [(last, self.baseline)] if is_asked else []

    @property
    def before(self) -> str:
        """What an arm's `previous` is to it, in words."""
        return "the step before" if self.is_chain else "its reference"

    def level_share(self, seeds: int) -> float:
        """The share of the 5% level at which this number of seeds is tested, after the reports on fewer.

        All reports up to `max_seeds` together spend the level once, a part for each seed. Without it, the first report
        spends all.
        """
        before = max((n for n in self.reported_seeds or () if n < seeds), default=0)
        if self.max_seeds is None:
            return 0.0 if before else 1.0
        return (seeds - before) / self.max_seeds

    def is_in(self, folder: Path) -> bool:
        """Whether the study.yaml of a folder lists these very runs. Raises ConfigError if it is damaged."""
        if not (folder / FILE).exists():
            return False
        ours, theirs = ([arm.below(folder.absolute()).members for arm in one.arms] for one in (self, self.load(folder)))
        return ours == theirs

    def save(self, folder: Path) -> None:
        """Write study.yaml atomically."""
        write_yaml(asdict(self), folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read study.yaml in `folder`. Raises ConfigError if it is damaged."""
        try:
            study = from_json(cls, read_settings(folder / FILE))
            named = {study.baseline, *(arm.previous for arm in study.arms if arm.previous)}
            if unknown := named - {arm.name for arm in study.arms}:
                raise ValueError(f"it has no arm {min(unknown)}")
        except Exception as error:  # of YAML or OmegaConf, without a common base
            damage = f"{folder / FILE}: is damaged, {first_line(error)}"
            raise ConfigError(f"{damage}; restore it, or run the command that wrote it again") from error
        return study


BATCH = 8  # sequences that are decoded together


@dataclass(frozen=True)
class ArmSpeed:
    """What was measured in every round, tokens per second first; what older versions did not measure is empty.

    train: of training, on all devices. decode, decode_batch, prefill: of decoding one sequence and `BATCH`, and of
    reading one as long as the context, on one device. memory: peak bytes that training allocates on the first GPU;
    empty on other devices, whose processes hold much else.
    """

    train: list[float]
    decode: list[float]
    prefill: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    decode_batch: list[float] = field(default_factory=list)

    @property
    def costs(self) -> dict[str, float]:
        """By metric name: the geometric means of speeds, as arms are ranked by them, and the most memory."""
        rounds = {
            "perf/tokens_per_second": self.train,
            "decode_tokens_per_second": self.decode,
            "decode_batch_tokens_per_second": self.decode_batch,
            "prefill_tokens_per_second": self.prefill,
        }
        costs = {name: geometric_mean(values) for name, values in rounds.items() if values}
        return costs | ({"perf/peak_memory_bytes": max(self.memory)} if self.memory else {})


@dataclass(frozen=True)
class StudySpeed(JsonRecord):
    """The speeds of a study's arms, and the hardware and software that they were measured with."""

    FILE: ClassVar[str] = "speed.json"
    device: str
    devices: int
    precision: str
    threads: int
    torch: str
    arms: dict[str, ArmSpeed]


def measured_speed(folder: Path) -> StudySpeed | None:
    """The speeds of the study in `folder`; None if they were not measured."""
    return StudySpeed.load(folder) if (folder / StudySpeed.FILE).exists() else None
