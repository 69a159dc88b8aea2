"""A study's record, study.yaml: its arms, the runs of each, and what they are compared with."""

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from omegaconf import OmegaConf

from llama_lab.config.trust import stored_config
from llama_lab.runs.folder import write_yaml

FILE = "study.yaml"
SUMMARY = "summary.csv"  # of a report


@dataclass(frozen=True)
class Member:
    """One run of a study.

    folder: of the run, relative to the study's folder, or absolute. learning_rate: where the study sweeps it. tunes:
    the judged seed of the arm whose learning rate this run helps to choose; None for a run that is judged.
    """

    folder: str
    seed: int
    learning_rate: float | None = None
    tunes: int | None = None


@dataclass(frozen=True)
class Arm:
    """One architecture of a study, with its runs over seeds and, where they are swept, learning rates.

    axes: the level of each of the study's axes, such as `{"norm": "rmsnorm"}`. previous: the arm that its step is
    counted from, None for none. residual: what matching left, as a fraction of the reference; None where unmatched.
    settings: the arm's own value of every config key in which the study's plan sets its arms apart, such as
    `{"model.norm.eps": 1e-6}`; None where no plan recorded it.
    """

    name: str
    axes: dict[str, str]
    members: tuple[Member, ...]
    previous: str | None = None
    residual: float | None = None
    settings: dict[str, Any] | None = None

    @property
    def judged(self) -> tuple[Member, ...]:
        """The runs that are compared."""
        return tuple(member for member in self.members if member.tunes is None)

    @property
    def tuning(self) -> tuple[Member, ...]:
        """The runs that learning rates are chosen by."""
        return tuple(member for member in self.members if member.tunes is not None)


@dataclass(frozen=True)
class Study:
    """What belongs together. baseline: name of the arm that all are compared with.

    design: ladder, leave_one_out, ...; "comparison" for runs that were put together afterwards. match: params, flops or
    none; "" if unknown. notes: what a reader must know, in whole sentences. margin: a change of the loss that is too
    small to matter, in the unit that arms are judged in; None for none. looks: reports that were written over fewer
    seeds. title: of the report; see `heading` where there is none.
    """

    name: str
    design: str
    baseline: str
    arms: tuple[Arm, ...]
    match: str = ""
    command: str = ""
    notes: tuple[str, ...] = field(default=())
    margin: float | None = None
    looks: int = 0
    title: str = ""

    @property
    def heading(self) -> str:
        """The title of the report; without one of its own, of design and baseline."""
        others = len(self.arms) - 1
        arms = f" and {others} other {'arm' if others == 1 else 'arms'}" if others else ""
        return self.title or f"{self.design.replace('_', ' ').capitalize()}: {self.baseline}{arms}"

    @property
    def is_chain(self) -> bool:
        """Whether each arm is a step from the one before it."""
        return all(arm.previous == before.name for before, arm in pairwise(self.arms))

    def save(self, folder: Path) -> None:
        """Write study.yaml in one move."""
        write_yaml(asdict(self), folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The study whose record is in `folder`."""
        content: Any = OmegaConf.to_container(stored_config(folder / FILE), resolve=True)
        arms = [arm | {"members": tuple(Member(**member) for member in arm["members"])} for arm in content["arms"]]
        return cls(**content | {"arms": tuple(Arm(**arm) for arm in arms), "notes": tuple(content["notes"])})
