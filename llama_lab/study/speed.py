"""speed.json: the speeds of a study's arms, measured in turn."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Self

from llama_lab.files import replacing

FILE = "speed.json"


@dataclass(frozen=True)
class ArmSpeed:
    """Tokens per second in every round: of training, on all devices, and of decoding one sequence, on one device."""

    train: tuple[float, ...]
    decode: tuple[float, ...]

    @property
    def costs(self) -> dict[str, float]:
        """The medians by metric name."""
        return {"perf/tokens_per_second": median(self.train), "decode_tokens_per_second": median(self.decode)}


@dataclass(frozen=True)
class StudySpeed:
    """The speeds of a study's arms, and the hardware and software that they were measured with."""

    device: str
    devices: int
    precision: str
    threads: int
    torch: str
    arms: Mapping[str, ArmSpeed]

    def save(self, folder: Path) -> None:
        """Write speed.json atomically."""
        with replacing(folder / FILE) as fresh:
            fresh.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read speed.json in `folder`; None if there is none."""
        if not (folder / FILE).exists():
            return None
        content = json.loads((folder / FILE).read_text())
        arms = {name: ArmSpeed(tuple(arm["train"]), tuple(arm["decode"])) for name, arm in content["arms"].items()}
        return cls(**content | {"arms": arms})
