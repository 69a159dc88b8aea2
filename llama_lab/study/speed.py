"""speed.json: the speeds of a study's arms, measured in turn."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ClassVar

from llama_lab.runs.stored import Stored


@dataclass(frozen=True)
class ArmSpeed:
    """Tokens per second in every round: of training, on all devices, and of decoding one sequence, on one device."""

    train: list[float]
    decode: list[float]

    @property
    def costs(self) -> dict[str, float]:
        """The medians by metric name."""
        return {"perf/tokens_per_second": median(self.train), "decode_tokens_per_second": median(self.decode)}


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
