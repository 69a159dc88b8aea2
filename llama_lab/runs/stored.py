"""The single registry of what a run records: metrics, metadata, and the files that hold them.

The columns of metrics.csv, dashboards, terminal output, checks and comparisons of reports, and docs/design.md's table
are derived from these declarations. What eval.json holds is in `evaluation.py`.
"""

# ruff: noqa: RUF009  # `recorded` and `compared` return fields

import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import percent

from .json_file import JsonRecord

StatusName = Literal["running", "interrupted", "pruned", "done", "diverged", "failed"]
NATS = "nats per token"


@dataclass(frozen=True)
class Metric:
    """A number that runs record; summary.json has the last value of each.

    means: in words. logged: in rows of metrics.csv, and so on dashboards; else a cost, or found at the end. noun: in
    sentences about wrong records. unlike_rows: why a summary's need not be the last of its rows. progress: how a
    terminal shows it while a run trains. final: whether TensorBoard's HParams have it. curve: what a report's export of
    curves has it as. of_arms: whether a report compares arms by it, beside their losses.
    """

    name: str
    means: str
    unit: str = ""
    logged: bool = True
    noun: str = ""
    unlike_rows: str = ""
    progress: str = ""
    final: bool = False
    curve: Literal["loss", "optimizer"] | None = None
    of_arms: bool = False


SPEED = "perf/tokens_per_second"
ACTIVE = "params_active_non_embedding"
STATE = "state/bytes_per_sequence"
SOURCE = "kv_cache/source_bytes"
cost = partial(Metric, logged=False, of_arms=True)
METRICS = (
    Metric("step", "optimizer steps so far"),
    Metric("tokens", "trained on so far; the x-axis of every plot"),
    Metric("seconds", "of training, without evaluations and checkpoints"),
    Metric("train/loss", "the mean since the last row", NATS, progress="loss {:.3f}", curve="loss"),
    Metric("val/loss", "of the whole validation set", NATS, progress="val {:.3f}", final=True, curve="loss"),
    Metric("val/bits_per_byte", "the same, whatever the tokenizer", "bits per byte", final=True, curve="loss"),
    Metric("val/second_half_loss", "of windows, given the first", f"{NATS} of second halves", curve="loss"),
    Metric(
        "val/accuracy",
        "right answers: of a probe, of pairs, of masked tokens, and of spans",
        progress="accuracy {:.1%}",
        final=True,
    ),
    Metric("val/exact_match", "windows whose answers are all right, which greedy decoding finds"),
    Metric("val/ema_loss", "of the average of the weights", NATS, progress="ema {:.3f}", final=True),
    cost("params", "parameters, tied ones once", noun="parameters", final=True),
    cost("params_active", "those of them that one token uses", noun="active parameters"),
    cost("params_non_embedding", "parameters without tables and head", noun="parameters without embeddings"),
    cost(ACTIVE, "active ones without tables and head", noun="active parameters without embeddings"),
    cost("flops_per_token", "of a forward pass", noun="FLOPs per token", final=True),
    cost("flops_per_token_dense", "of a forward pass, masked keys included", of_arms=False),
    cost("train_flops_per_token", "of a forward and a backward pass", noun="FLOPs per token of training"),
    Metric("optim/lr", "the learning rate of the next step", curve="optimizer"),
    Metric("optim/grad_norm", "of the step, before clipping", curve="optimizer"),
    Metric(
        SPEED,
        "of all devices; in a summary, of the whole run",
        unlike_rows="of the whole run, in a row of an interval; unequal ones of one arm are named",
        progress="{:,.0f} tokens/s",
        final=True,
        of_arms=True,
    ),
    Metric(f"{SPEED}_per_device", "the same of one", unlike_rows="follows from the speed"),
    Metric("perf/mfu", "model FLOPs utilisation", unlike_rows="follows from speed and peak", of_arms=True),
    Metric("perf/peak_memory_bytes", "of one device since training began", final=True, of_arms=True),
    cost("perf/compile_seconds", "spent on compiling", unlike_rows="wall clock, in no row", of_arms=False),
    cost("kv_cache/bytes_per_token", "16-bit", noun="bytes of KV cache per token", logged=True, final=True),
    cost("kv_cache/bytes", "and of state, of one sequence of `seq_len` tokens", noun="bytes of KV cache", logged=True),
    cost(SOURCE, "of its source, in an encoder-decoder", noun="bytes of a source's keys and values"),
    cost(STATE, "recurrent, the same at any length", noun="bytes of state per sequence"),
    cost("seq_len", "at which costs hold: `max_seq_len`"),
)
COLUMNS = tuple(metric.name for metric in METRICS if metric.logged)  # of metrics.csv
CONSTANT = tuple(metric.name for metric in METRICS if metric.logged and metric.name.startswith("kv_cache/"))
FINAL = tuple(metric.name for metric in METRICS if metric.final)
PROGRESS = {metric.name: metric.progress for metric in METRICS if metric.progress}
CURVES = tuple(metric.name for metric in METRICS if metric.curve)
LOSSES = tuple(metric.name for metric in METRICS if metric.curve == "loss")
UNITS = {metric.name: metric.unit for metric in METRICS if metric.unit}
SIZES = {metric.name: metric.noun for metric in METRICS if metric.noun}
OF_THE_RUN = {metric.name: metric.unlike_rows for metric in METRICS if metric.unlike_rows}
MEASURED_COSTS = tuple(metric.name for metric in METRICS if metric.of_arms and metric.name.startswith("perf/"))
FIXED_COSTS = tuple(metric.name for metric in METRICS if metric.of_arms and metric.name not in MEASURED_COSTS)

# Telemetry, of layers counted from 0 at the input, those of an encoder first, such as
# `telemetry/ffn_grad_norm/layer_03`: of a block as a whole, and of its two parts.
PARTS = ("block", "attention", "ffn")
OF_PARTS = ("grad_norm", "update_ratio", "activation_rms", "activation_max")
OF_SCORES = ("attention_entropy", "attention_logit_max")
OF_ROUTERS = ("router_load_entropy", "router_load_max", "router_dead_experts", "router_z")
QUANTITIES = (*(f"{part}_{quantity}" for quantity, part in product(OF_PARTS, PARTS)), *OF_SCORES, *OF_ROUTERS)


def layer_metric(quantity: str, layer: int) -> str:
    """The name of one of QUANTITIES in a layer."""
    return f"telemetry/{quantity}/layer_{layer:02d}"


def layer_metrics(layers: int) -> list[str]:
    """All names of a model with so many layers."""
    return [layer_metric(quantity, layer) for quantity, layer in product(QUANTITIES, range(layers))]


def parse_layer_metric(name: str) -> tuple[str, int] | None:
    """The quantity and the layer of a metric's name; None for another metric."""
    found = re.fullmatch(r"telemetry/(\w+)/layer_(\d+)", name)
    return (found[1], int(found[2])) if found and found[1] in QUANTITIES else None


def is_ours(name: str) -> bool:
    """Whether the name is reserved: a user's metric cannot have it."""
    ours = {metric.name for metric in METRICS} | {fact.name for fact in fields(Environment)} | {"rows", "checksum"}
    return name in ours or name.startswith(("val/loss/", "telemetry/"))


@dataclass(frozen=True)
class Status(JsonRecord):
    """The status of a run, and the reason in one line."""

    FILE: ClassVar[str] = "status.json"
    status: StatusName
    message: str = ""


UNLIKE_SPEEDS = "their speeds cannot be compared"
ROUNDING = f"{UNLIKE_SPEEDS}, and their losses differ by rounding"
CODE = "their code may differ"
HASHES = ("data_hash", "tokenizer_hash")


def recorded(default: Any, **handling: Any) -> Any:
    """A dataclass field with how reports treat differences in it.

    checked: in a way of its own, in words. free: it may differ between runs, with the reason. See also `compared`.
    """
    if default in ([], {}):
        return field(default_factory=type(default), metadata=handling)
    return field(default=default, metadata=handling)


def compared(default: Any, consequence: str | dict[str, str] = "", name: str = "", within: tuple[str, ...] = ()) -> Any:
    """A field that should agree between the runs of a study; a report warns of differences.

    consequence: what follows if they differ, where that is not plain; of a dict, by key. name: in the report, default:
    the field's. within: facts and settings that it follows from: only runs that agree in these are compared.
    """
    return recorded(default, compared=consequence, name=name, within=within)


@dataclass(frozen=True, kw_only=True)
class RunMetadata(JsonRecord):
    """Metadata of a run, known before it trains.

    label: what people call the arm, see `short_name`. choices: the option of each config group. devices: of all nodes.
    init_hash: of the weights that it started from, see `WarmStart`; empty for fresh ones. unigram_entropy: of the
    tokens' frequencies, in nats per token. entropy_floor: a probe's, the loss of the best predictor; None for text.
    revisions: the commit of each published dataset. epochs: how often each part of a mixture is read.
    token_to_position_ratio: see `llama_lab/training/recording.py`; None where positions are not added. metrics: costs.
    """

    name: str = recorded("", free="of its folder")
    arm: str = recorded("", free="the study names its arms")
    label: str = recorded("", free="of its arm")
    seed: int = recorded(0, checked="is the one that the study lists")
    choices: dict[str, str] = recorded({}, free="the settings that they make are compared")
    device: str = compared("", ROUNDING)
    devices: int = compared(1, f"{ROUNDING}, with shards in bf16 more so")
    sharded: bool = recorded(False, checked="is compared with the number of devices")
    precision: str = compared("", "a part of the difference in loss may be rounding")
    attention_kernel: str = compared("", "their speeds are not those of their architectures")
    experts_kernel: str = compared("", "their speeds are not those of their architectures")
    compiled: bool = compared(False, "their speeds and last digits differ", within=("trainer.compile",))
    data_hash: str = compared("", "their losses are of different texts", "data")
    tokenizer_hash: str = compared("", "their nats per token mean different things", "tokenizer")
    vocab_size: int = compared(0, within=("tokenizer_hash", "model.vocab_size"))
    init_hash: str = recorded("", checked="is equal within a seed, and empty only without init_from")
    bytes_per_token: float = compared(0.0, within=HASHES)
    unigram_entropy: float = compared(0.0, within=HASHES)
    entropy_floor: float | None = compared(None, within=("data_hash",))
    revisions: dict[str, str] = compared({}, "their texts may differ", "dataset revisions")
    epochs: dict[str, float] = compared(
        {}, "one text was repeated more", within=(*HASHES, "train.tokens", "train.batch_size", "model.max_seq_len")
    )
    token_to_position_ratio: float | None = recorded(None, checked="is about that of the other runs")
    metrics: dict[str, float] = recorded({}, checked="are those of the rebuilt model")


# What becomes of parameters in a warm start, by the fields of its record.
FATES = {"taken": "taken", "pooled": "pooled", "rows": "first rows taken", "anew": "made anew", "left": "left"}


@dataclass(frozen=True, kw_only=True)
class WarmStart(JsonRecord):
    """Record of a warm start: the source, and the outcome for every parameter.

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

    def describe(self) -> list[str]:
        """What came from where, in a few lines."""
        lines = [f"from {self.source}: {percent(self.share)} of the parameters"]
        lines += [f"  {word}: {', '.join(names)}" for fate, word in FATES.items() if (names := getattr(self, fate))]
        settings = [f"{key} {there} -> {here}" for key, (there, here) in self.settings.items()]
        return [*lines, f"  settings: {', '.join(settings)}"] if settings else lines


@dataclass(frozen=True, kw_only=True)
class Summary(RunMetadata):
    """Summary of a finished run: metadata, and in `metrics` its costs and the last value of every metric.

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
class Environment(RunMetadata):
    """Metadata and environment of a run's last session; `earlier_sessions`: those that it resumed from.

    git: None outside a checkout. runs_at_once: how many runs may have trained on its device at a time. tf32: whether
    products of 32-bit matrices are rounded to TF32 on a GPU. deterministic: whether PyTorch was told to use
    deterministic algorithms alone.
    """

    FILE: ClassVar[str] = "environment.json"
    command: list[str] = recorded([], free="the settings that it makes are compared")
    python: str = compared("")
    versions: dict[str, str] = compared({}, {"torch": "their kernels and rounding may differ", "llama-lab": CODE})
    platform: str = compared("")
    cpu: str = compared("", ROUNDING, "CPU")
    cpu_threads: int = compared(0, UNLIKE_SPEEDS, "CPU threads")
    runs_at_once: int = compared(1, UNLIKE_SPEEDS)
    gpus: list[str] = compared([], UNLIKE_SPEEDS, "GPUs")
    tf32: bool | None = compared(None, "a part of the difference in loss may be rounding", "TF32")
    deterministic: bool | None = compared(None, ROUNDING)
    git: Git | None = compared(None, CODE, "commit")
    earlier_sessions: list["Environment"] = recorded([], checked="are compared with the run's last one")

    @classmethod
    def load(cls, folder: Path, needs: Collection[str] = ()) -> Self:
        """Read the file, see `JsonRecord`. Raises ConfigError for a run of a version before 0.4, too."""
        stored = super().load(folder, needs)
        version = stored.versions.get("llama-lab", "before 0.4")
        if re.match(r"before|0\.[0-3]\b", version):
            problem = f"was written by llama-lab {version}; this version reads runs of 0.4 and later"
            raise ConfigError(f"{folder}: {problem}: use that version")
        return stored
