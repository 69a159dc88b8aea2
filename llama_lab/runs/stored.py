"""The JSON files of a run's folder as dataclasses: status.json, environment.json, summary.json.

What eval.json holds is in `evaluation.py`.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from llama_lab.util.errors import ConfigError, first_line
from llama_lab.util.files import ALTERED, checksum, replace_text

T = TypeVar("T")
StatusName = Literal["running", "interrupted", "pruned", "done", "diverged", "failed"]


@dataclass(frozen=True)
class Stored:
    """A dataclass that a run keeps in the JSON file `FILE` of its folder.

    A key is the name of a field, except that the field `metrics` is not nested: it takes every number that no field is
    named after. What a newer version wrote besides is ignored.
    The key `checksum` is that of all others. NEEDS: metrics that every file has.
    """

    FILE: ClassVar[str]
    NEEDS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, folder: Path, needs: Collection[str] = ()) -> Self:
        """Read the file. Raises ConfigError if it is missing, damaged, or has not all of the keys `needs`."""
        with reading(folder, cls.FILE):
            content = read_json(folder / cls.FILE)
            stored = from_json(cls, content)
            if missing := [key for key in (*cls.NEEDS, *needs) if key not in content]:
                raise KeyError(missing[0])
            return stored

    def save(self, folder: Path) -> None:
        """Replace the file in one move."""
        content = self.to_json()
        content = {"checksum": checksum(json.dumps(content)), **content}
        replace_text(folder / self.FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return asdict(self, dict_factory=_with_flat_metrics)


def _with_flat_metrics(items: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(items)
    metrics: dict[str, Any] = content.pop("metrics", {})
    return content | metrics


def read_json(file: Path) -> Any:
    """What a JSON file holds, without its checksum. Raises ValueError if it was altered since it was written."""
    content = json.loads(file.read_text(encoding="utf-8"))
    expected = content.pop("checksum", None) if isinstance(content, dict) else None
    if expected is not None and expected != checksum(json.dumps(content)):
        raise ValueError(ALTERED)
    return content


def from_json(kind: type[T], content: Any) -> T:
    """An instance of a dataclass from what `json.loads` or `yaml.safe_load` returns; see `Stored`.

    Raises ValueError or TypeError if it is no object, lacks a field without a default, or has one of another type.
    """
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    hints = get_type_hints(kind)
    kinds = {one.name: hints[one.name] for one in fields(kind)}  # type: ignore[arg-type]
    values = {name: as_type(kinds[name], value) for name, value in content.items() if name in kinds}
    if "metrics" in kinds:
        values["metrics"] = {k: v for k, v in content.items() if k not in kinds and type(v) in (int, float)}
    return kind(**values)


def as_type(kind: Any, value: Any) -> Any:
    """What JSON or YAML holds as a value of this type. Raises TypeError for another."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return from_json(kind, value)  # type: ignore[arg-type]
    if origin is UnionType:
        return None if value is None and NoneType in parts else as_type(parts[0], value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(as_type(parts[0], one) for one in value)
    if origin is dict and isinstance(value, dict):
        return {key: as_type(parts[1], one) for key, one in value.items()}
    fits = value in parts if origin is Literal else type(value) in ((float, int) if kind is float else (kind,))
    if not (fits or kind is Any):
        raise TypeError(f"{value!r:.40} is not of the type {kind}")
    return value


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turn any error of reading the file `name` of the run in `path` into a ConfigError that names both."""
    try:
        yield
    except Exception as error:  # of yaml, json, tokenizers or the file system
        raise ConfigError(
            f"run={path}: its {name} is damaged, {first_line(error)}; restore the file, or train the run again"
        ) from error


@dataclass(frozen=True)
class Status(Stored):
    """The status of a run, and the reason in one line."""

    FILE: ClassVar[str] = "status.json"
    status: StatusName
    message: str = ""


SPEEDS = "their speeds cannot be compared"
ROUNDING = f"{SPEEDS}, and their losses differ by rounding"
CODE = "their code may differ"
TEXT = ("data_hash", "tokenizer_hash")


def compared(consequence: str | dict[str, str] = "", name: str = "", within: tuple[str, ...] = ()) -> dict[str, Any]:
    """The metadata of a field in which the runs of a study should agree; else a report says so.

    consequence: what follows if they differ, where that is not plain; of a dict, by key. name: in the report, default:
    the field's. within: facts and settings that it follows from: only runs that agree in these are compared.
    """
    return {"compared": consequence, "name": name, "within": within}


def checked(how: str) -> dict[str, Any]:
    """The metadata of a field that a report checks in a way of its own, in words."""
    return {"checked": how}


def free(why: str) -> dict[str, Any]:
    """The metadata of a field that may differ between runs, with the reason."""
    return {"free": why}


@dataclass(frozen=True, kw_only=True)
class Facts(Stored):
    """The facts of a run before it trains.

    label: what people call the arm, see `short_name`. choices: the option of each config group. devices: of all nodes.
    init_hash: of the weights that it started from, see `WarmStart`; empty for fresh ones. unigram_entropy: of the
    tokens' frequencies, in nats per token. entropy_floor: a probe's, the loss of the best predictor; None for text.
    revisions: the commit of each published dataset. epochs: how often each part of a mixture is read.
    token_to_position_ratio: see `llama_lab/training/train.py`; None where positions are not added.
    metrics: costs: `seq_len`, at which the others hold, `params`, `params_non_embedding`, `flops_per_token`,
    `train_flops_per_token`, `kv_cache/bytes_per_token`, `kv_cache/bytes`, ...; see `llama_lab/model/cost.py`.
    """

    name: str = field(default="", metadata=free("of its folder"))
    arm: str = field(default="", metadata=free("the study names its arms"))
    label: str = field(default="", metadata=free("of its arm"))
    seed: int = field(default=0, metadata=checked("is the one that the study lists"))
    choices: dict[str, str] = field(
        default_factory=dict, metadata=checked("are equal within an arm, and those of its config")
    )
    device: str = field(default="", metadata=compared(ROUNDING))
    devices: int = field(default=1, metadata=compared(f"{ROUNDING}, with shards in bf16 more so"))
    sharded: bool = field(default=False, metadata=checked("is compared with the number of devices"))
    precision: str = field(default="", metadata=compared("a part of the difference in loss may be rounding"))
    attention_kernel: str = field(default="", metadata=compared("their speeds are not those of their architectures"))
    compiled: bool = field(
        default=False, metadata=compared("their speeds and last digits differ", within=("trainer.compile",))
    )
    data_hash: str = field(default="", metadata=compared("their losses are of different texts", "data"))
    tokenizer_hash: str = field(
        default="", metadata=compared("their nats per token mean different things", "tokenizer")
    )
    vocab_size: int = field(default=0, metadata=compared(within=("tokenizer_hash", "model.vocab_size")))
    init_hash: str = field(default="", metadata=checked("is equal within a seed, and empty only without init_from"))
    bytes_per_token: float = field(default=0.0, metadata=compared(within=TEXT))
    unigram_entropy: float = field(default=0.0, metadata=compared(within=TEXT))
    entropy_floor: float | None = field(default=None, metadata=compared(within=("data_hash",)))
    revisions: dict[str, str] = field(
        default_factory=dict, metadata=compared("their texts may differ", "dataset revisions")
    )
    epochs: dict[str, float] = field(
        default_factory=dict,
        metadata=compared(
            "one text was repeated more", within=(*TEXT, "train.tokens", "train.batch_size", "model.max_seq_len")
        ),
    )
    token_to_position_ratio: float | None = field(default=None, metadata=checked("is about that of the other runs"))
    metrics: dict[str, float] = field(default_factory=dict, metadata=checked("are those of the rebuilt model"))


@dataclass(frozen=True, kw_only=True)
class WarmStart(Stored):
    """The weights that a run started from, and what became of them.

    source: the folder they were read from. hash: of all of them. share: of the run's parameters that came from there.
    taken, pooled, rows, anew, left: names of parameters, `*` for all layers; see `Transfer` in
    `llama_lab/model/transfer.py`. settings: of the model, there and here, where they differ.
    """

    FILE: ClassVar[str] = "warm_start.json"
    source: str
    hash: str
    share: float
    taken: list[str]
    pooled: list[str]
    rows: list[str]
    anew: list[str]
    left: list[str]
    settings: dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Summary(Facts):
    """A finished run: its facts, and in `metrics` its costs and the last value of every metric.

    rows: the checksum of the rows of metrics.csv.
    """

    FILE: ClassVar[str] = "summary.json"
    NEEDS: ClassVar[tuple[str, ...]] = ("val/loss",)
    rows: str = ""


@dataclass(frozen=True)
class Git:
    """The commit of the code, and whether tracked files differ from it."""

    commit: str = ""
    dirty: bool = False


@dataclass(frozen=True, kw_only=True)
class Environment(Facts):
    """A run's facts, and what its last session ran on; `earlier_sessions`: the same of those that it went on from.

    git: None outside a checkout. runs_at_once: how many runs may have trained on its device at a time. tf32: whether
    products of 32-bit matrices are rounded to TF32 on a GPU. deterministic: whether PyTorch was told to use
    deterministic algorithms alone.
    """

    FILE: ClassVar[str] = "environment.json"
    command: list[str] = field(default_factory=list, metadata=free("the settings that it makes are compared"))
    python: str = field(default="", metadata=compared())
    versions: dict[str, str] = field(
        default_factory=dict, metadata=compared({"torch": "their kernels and rounding may differ", "llama-lab": CODE})
    )
    platform: str = field(default="", metadata=compared())
    cpu: str = field(default="", metadata=compared(ROUNDING, "CPU"))
    cpu_threads: int = field(default=0, metadata=compared(SPEEDS, "CPU threads"))
    runs_at_once: int = field(default=1, metadata=compared(SPEEDS))
    gpus: list[str] = field(default_factory=list, metadata=compared(SPEEDS, "GPUs"))
    tf32: bool | None = field(
        default=None, metadata=compared("a part of the difference in loss may be rounding", "TF32")
    )
    deterministic: bool | None = field(default=None, metadata=compared(ROUNDING))
    git: Git | None = field(default=None, metadata=compared(CODE, "commit"))
    earlier_sessions: list["Environment"] = field(
        default_factory=list, metadata=checked("are compared with the run's last one")
    )

    @classmethod
    def load(cls, folder: Path, needs: Collection[str] = ()) -> Self:
        """Read the file, see `Stored`. Raises ConfigError for a run of a version before 0.4, too."""
        stored = super().load(folder, needs)
        version = stored.versions.get("llama-lab", "before 0.4")
        if re.match(r"before|0\.[0-3]\b", version):
            raise ConfigError(
                f"{folder}: was written by llama-lab {version}; this version reads runs of 0.4 and later: "
                f"use that version"
            )
        return stored
