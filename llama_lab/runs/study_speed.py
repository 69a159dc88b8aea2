"""speed.json: the speeds of a study's arms, measured in turn."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import ClassVar

from .json_file import Stored


@dataclass(frozen=True)
class ArmSpeed:
    """What was measured in every round, tokens per second first; what older versions did not measure is empty.

    train: of training, on all devices. decode, prefill: of decoding one sequence, and of reading one as long as the
    context, on one device. memory: peak bytes that training allocates on the first GPU; empty on other devices, whose
    processes hold much else.
    """

    train: list[float]
    decode: list[float]
    prefill: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def costs(self) -> dict[str, float]:
        """By metric name: the geometric means of speeds, as arms are ranked by them, and the most memory."""
        rounds = {
            "perf/tokens_per_second": self.train,
            "decode_tokens_per_second": self.decode,
            "prefill_tokens_per_second": self.prefill,
        }
        costs = {name: geometric_mean(values) for name, values in rounds.items() if values}
        return costs | ({"perf/peak_memory_bytes": max(self.memory)} if self.memory else {})


@dataclass(frozen=True)
class StudySpeed(Stored):
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
