"""The JSON files of a run's folder as dataclasses: status.json, environment.json, summary.json.

What eval.json holds is in `evaluation.py`.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from llama_lab.errors import ConfigError, first_line
from llama_lab.files import replacing

T = TypeVar("T")
StatusName = Literal["running", "interrupted", "pruned", "done", "diverged", "failed"]


@dataclass(frozen=True)
class Stored:
    """A dataclass that a run keeps in the JSON file `FILE` of its folder.

    A key is the name of a field, except that the field `metrics` is not nested: it takes every number that no field is
    named after. A field that an older version did not write has its default; what else a newer one wrote is ignored.
    """

    FILE: ClassVar[str]

    @classmethod
    def load(cls, folder: Path, needs: Collection[str] = ()) -> Self:
        """Read the file. Raises ConfigError if it is missing, damaged, or has not all of the keys `needs`."""
        with reading(folder, cls.FILE):
            content = json.loads((folder / cls.FILE).read_text())
            stored = from_json(cls, content)
            if missing := [key for key in needs if key not in content]:
                raise KeyError(missing[0])
            return stored

    def save(self, folder: Path) -> None:
        """Replace the file in one move."""
        with replacing(folder / self.FILE) as fresh:
            fresh.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        return asdict(self, dict_factory=_with_flat_metrics)


def _with_flat_metrics(items: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(items)
    metrics: dict[str, Any] = content.pop("metrics", {})
    return content | metrics


def from_json(kind: type[T], content: Any) -> T:
    """An instance of a dataclass from what `json.loads` returns; see `Stored`. Values are taken as they are.

    Raises ValueError or TypeError if it is no object, or lacks a field without a default.
    """
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    hints = get_type_hints(kind)
    kinds = {one.name: hints[one.name] for one in fields(kind)}  # type: ignore[arg-type]
    values = {name: _value(kinds[name], value) for name, value in content.items() if name in kinds}
    if "metrics" in kinds:
        values["metrics"] = {k: v for k, v in content.items() if k not in kinds and type(v) in (int, float)}
    return kind(**values)


def _value(kind: Any, value: Any) -> Any:
    """A field's value; its type may be a dataclass, a list or dict of one, or one or None."""
    nested: Any = next((part for part in (kind, *get_args(kind)) if is_dataclass(part)), None)
    if nested is None or value is None:
        return value
    if get_origin(kind) is dict:
        return {key: from_json(nested, one) for key, one in value.items()}
    return [from_json(nested, one) for one in value] if isinstance(value, list) else from_json(nested, value)


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


@dataclass(frozen=True, kw_only=True)
class Facts(Stored):
    """The facts of a run before it trains; those that an older run did not record are empty, or 0.

    label: what people call the arm, see `short_name`. choices: the option of each config group. devices: of all nodes.
    init_hash: of the weights that it started from, see `WarmStart`; empty for fresh ones. unigram_entropy: of the
    tokens' frequencies, in nats per token. entropy_floor: a probe's, the loss of the best predictor; None for text.
    revisions: the commit of each published dataset. epochs: how often each part of a mixture is read.
    token_to_position_ratio: see `llama_lab/training/train.py`; None where positions are not added.
    metrics: costs: `seq_len`, at which the others hold, `params`, `params_non_embedding`, `flops_per_token`,
    `train_flops_per_token`, `kv_cache/bytes_per_token`, `kv_cache/bytes`, ...; see `llama_lab/model/cost.py`.
    """

    name: str = ""
    arm: str = ""
    label: str = ""
    seed: int = 0
    choices: dict[str, str] = field(default_factory=dict)
    device: str = ""
    devices: int = 1
    sharded: bool = False
    precision: str = ""
    attention_kernel: str = ""
    compiled: bool = False
    data_hash: str = ""
    tokenizer_hash: str = ""
    vocab_size: int = 0
    init_hash: str = ""
    bytes_per_token: float = 0.0
    unigram_entropy: float = 0.0
    entropy_floor: float | None = None
    revisions: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, float] = field(default_factory=dict)
    token_to_position_ratio: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


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
    """A finished run: its facts, and in `metrics` its costs and the last value of every metric."""

    FILE: ClassVar[str] = "summary.json"


@dataclass(frozen=True)
class Git:
    """The commit of the code, and whether tracked files differ from it."""

    commit: str = ""
    dirty: bool = False


@dataclass(frozen=True, kw_only=True)
class Environment(Facts):
    """A run's facts, and what its last session ran on; `earlier_sessions`: the same of those that it went on from.

    git: None outside a checkout.
    """

    FILE: ClassVar[str] = "environment.json"
    command: list[str] = field(default_factory=list)
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    cpu_threads: int = 0
    gpus: list[str] = field(default_factory=list)
    git: Git | None = None
    earlier_sessions: list["Environment"] = field(default_factory=list)
