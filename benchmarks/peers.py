"""Our decoder beside its peers, in training or greedy decoding on a CPU: `python -m benchmarks peers`.

Each side is a process of its own (`side.py`) that waits while another works. In a round each works once, on the same
shape and the same tokens, and the order rotates. Large matrix products in every round show the ceiling.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from omegaconf import DictConfig
from rich.console import Console
from torch.utils.benchmark import Timer

from llama_lab.config.components import build_model
from llama_lab.model import measure_cost

from .decoders import SMALL, TINY, compose
from .peer_tables import TABLES, conditions, markdown, rows_of, text_table
from .side import Shape, Spec
from .side_process import Contender, Measured, SideProcess, skipped, started

T = TypeVar("T")
SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "max_seq_len")
ADAMW = ("lr", "beta1", "beta2", "eps", "weight_decay")


@dataclass(frozen=True)
class Preset:
    """A model and the work of a round: training steps, or greedy texts of `new_tokens` after `prompt`.

    overrides: those of its config. warm_up: steps or texts before the first round. product: rows of the matrices
    whose products are the ceiling.
    """

    overrides: Sequence[str]
    warm_up: int = 3
    steps: int = 5
    texts: int = 4
    prompt: int = 64
    new_tokens: int = 128
    product: int = 2048


PRESETS = {
    "small": Preset((*SMALL, "model.max_seq_len=256", "train.batch_size=8")),
    "default": Preset(()),
    "tiny": Preset((*TINY, "train.batch_size=2"), 1, steps=2, texts=1, prompt=4, new_tokens=8, product=64),
}


def run(
    preset: str,
    compile: bool,
    decode: bool,
    precision: str,
    rounds: int,
    keep_freed_memory: bool,
    threads: int | None = None,
    litgpt: Path | None = None,
) -> None:
    """Measure all sides, and print what was found as tables and as Markdown.

    threads: of each side, by default as many as PyTorch chooses. litgpt: the Python of an environment that holds it.
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    torch.set_num_threads(threads or torch.get_num_threads())
    sizes = PRESETS[preset]
    spec = replace(spec_of(sizes, decode), compile=compile, bf16=precision == "bf16")
    found, ceiling = measure(contenders(spec, keep_freed_memory, litgpt), sizes, rounds, console)
    rows = rows_of(found, train_flops(spec), ceiling)
    console.print(conditions(preset, spec, found, ceiling))
    for columns in TABLES:
        console.print(text_table(rows, columns))
    console.print(markdown(rows))


def spec_of(sizes: Preset, decode: bool) -> Spec:
    """Our side's training in a preset, or its decoding."""
    overrides = (f"model.vocab_size={compose().tokenizer.vocab_size}", *sizes.overrides)
    cfg = compose(*overrides)
    shape, optim = shape_of(cfg.model), {key: cfg.optim[key] for key in ADAMW}
    spec = Spec("ours", shape, overrides, optim, cfg.train.grad_clip, cfg.train.batch_size, torch.get_num_threads())
    return replace(spec, prompt=sizes.prompt, new_tokens=sizes.new_tokens) if decode else spec


def shape_of(model: DictConfig) -> Shape:
    """The shape of a config's Llama."""
    return Shape(**{key: model[key] for key in SIZES}, theta=model.position.theta, eps=model.norm.eps)


def train_flops(spec: Spec) -> float:
    """FLOPs of training on a token of the shape that all sides share."""
    with torch.device("meta"):
        model = build_model(compose(*spec.overrides), spec.shape.vocab_size)
    return measure_cost(model).train_flops_per_token


def contenders(spec: Spec, kept: bool, litgpt: Path | None) -> list[Contender]:
    """All sides, ours first; unless all keep freed memory, our training also as a run does it, keeping it."""
    found = [Contender(replace(spec, side=name), kept) for name in ("ours", "transformers", "x-transformers")]
    if not (kept or spec.new_tokens):
        found.insert(1, Contender(spec, kept=True))
    if litgpt:
        found.append(Contender(replace(spec, side="litgpt"), kept, str(litgpt)))
    return found


def measure(
    sides: Sequence[Contender], sizes: Preset, rounds: int, console: Console
) -> tuple[list[Measured], list[float]]:
    """What was found of all sides that are installed, and the FLOP/s of matrix products in every round of training."""
    spec, ceiling = sides[0].spec, []
    count = sizes.texts if spec.new_tokens else sizes.steps
    with ExitStack() as stack:
        processes = [stack.enter_context(started(contender)) for contender in sides]
        found: dict[SideProcess, Measured] = {}
        for process in processes:
            if measured := process.ready():
                found[process] = measured
                measured.losses += process.work(sizes.warm_up)[1]
            else:
                console.print(skipped(process))
        for number in range(rounds):
            for process in rotated(list(found), number):
                seconds, losses = process.work(count)
                found[process].speeds.append(count * spec.tokens / seconds)
                found[process].losses += losses
            if not spec.new_tokens:
                ceiling.append(product_speed(sizes.product, spec))
            speeds = (f"{m.contender.name} {m.speeds[-1]:,.0f}" for m in found.values())
            console.print(f"round {number + 1} of {rounds}, tokens/s: {', '.join(speeds)}")
    return list(found.values()), ceiling


def rotated(items: Sequence[T], number: int) -> Iterator[T]:
    """The order of a round, whose first is the next one in each."""
    start = number % len(items)
    yield from (*items[start:], *items[:start])


def product_speed(rows: int, spec: Spec) -> float:
    """FLOP/s of a product of two square matrices in the precision of the training."""
    a, b = torch.randn(2, rows, rows, dtype=torch.bfloat16 if spec.bf16 else torch.float32)
    seconds: float = Timer("a @ b", globals={"a": a, "b": b}, num_threads=spec.threads).timeit(5).mean
    return 2 * rows**3 / seconds
