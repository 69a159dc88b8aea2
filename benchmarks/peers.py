"""Our decoder beside its peers, in training or greedy decoding on a CPU: `python -m benchmarks peers`.

Each contender is a process of its own that waits while another works. In a round each works once, on the same shape and
the same tokens, and the order alternates. Large matrix products in every round show the ceiling.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch.utils.benchmark import Timer

from llama_lab.api import cost
from llama_lab.evaluation.speed import alternating
from llama_lab.util.errors import ConfigError

from .contenders import CONTENDERS, Spec, begin, work
from .decoders import SMALL, TINY, build_decoder
from .processes import process
from .rows import show, start, write

KEPT = "ours, memory kept"
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}  # mallopt(3); in effect `keep_freed_memory`
CEILING = "ceiling"


@dataclass(frozen=True)
class Preset:
    """A model and the work of a round: training steps, or greedy texts of `new_tokens` after `prompt`.

    overrides: those of its config. warm_up: steps or texts before the first round. product: rows of the matrices
    whose products are the ceiling.
    """

    overrides: tuple[str, ...]
    warm_up: int = 3
    steps: int = 5
    texts: int = 4
    prompt: int = 64
    new_tokens: int = 128
    product: int = 2048


PRESETS = {
    "small": Preset((*SMALL, "model.max_seq_len=256", "train.batch_size=8")),
    "default": Preset(("model.vocab_size=4096", "train.batch_size=16")),  # of its tokenizer
    "tiny": Preset((*TINY, "train.batch_size=2"), 1, steps=2, texts=1, prompt=4, new_tokens=8, product=64),
}


def run(preset: str, compile: bool, decode: bool, precision: str, rounds: int, out: Path) -> None:
    """Measure all contenders, print what was found, and write `peers.csv` into `out`.

    Freed memory is returned by all, as in other programs; our training is also measured as a run does it, keeping it.
    Raises ConfigError for decoding that is compiled.
    """
    if decode and compile:
        raise ConfigError("--compile: peers decode eagerly; leave it out, or --decode")
    _, where = start("cpu")
    sizes = PRESETS[preset]
    spec = Spec(sizes.overrides, compile, precision == "bf16")
    names = [*CONTENDERS] if decode else ["ours", KEPT, *list(CONTENDERS)[1:]]
    if decode:
        spec = replace(spec, prompt=sizes.prompt, new_tokens=sizes.new_tokens)
    speeds, facts = measure(names, spec, sizes, rounds)
    table = compared(speeds, train_flops(spec)).join(facts).rename_axis("contender").reset_index()
    show("Medians and ranges of the rounds; ratios to ours, and shares of the ceiling, are those of a round", table)
    conditions = {"preset": preset, "compile": spec.compile, "decode": decode, "precision": precision}
    write([table], where | conditions, out / "peers.csv")


def measure(names: Sequence[str], spec: Spec, sizes: Preset, rounds: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tokens per second of all contenders, and FLOP/s of matrix products, by round; their parameters and losses."""
    count = sizes.texts if spec.new_tokens else sizes.steps
    tokens = count * (spec.new_tokens or spec.config.train.batch_size * spec.config.model.max_seq_len)
    fixed = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
    found = []
    with ExitStack() as stack:
        contenders = {name: stack.enter_context(process(**fixed, **(KEEP if name == KEPT else {}))) for name in names}
        params = {name: contenders[name].submit(begin, name.partition(",")[0], spec).result() for name in names}
        losses = {name: contenders[name].submit(work, sizes.warm_up).result()[1] for name in names}
        for number in range(rounds):
            speeds = {}
            for name in alternating(names, number):
                seconds, more = contenders[name].submit(work, count).result()
                speeds[name] = tokens / seconds
                losses[name] += more
            found.append({CEILING: product_speed(sizes.product, spec.bf16), **{name: speeds[name] for name in names}})
            show(f"round {number + 1} of {rounds}", pd.DataFrame(found[-1:]))
    facts = pd.DataFrame({"parameters": params})
    if not spec.new_tokens:
        facts = facts.assign(first_loss=[of[0] for of in losses.values()], last_loss=[of[-1] for of in losses.values()])
    return pd.DataFrame(found), facts


def compared(speeds: pd.DataFrame, flops: float) -> pd.DataFrame:
    """Over the rounds: a contender's tokens per second, ratio to ours of the same round, and share of its ceiling.

    speeds: of every contender, and FLOP/s of matrix products, by round. flops: of training on one token; 0 in decoding.
    """
    contenders = speeds.drop(columns=CEILING)
    tables = {"tokens_per_s": contenders, "ratio": contenders.div(contenders.ours, axis=0)}
    if flops:
        tables["of_ceiling"] = flops * contenders.div(speeds[CEILING], axis=0)
    spreads = [table.agg(["median", "min", "max"]).T.add_prefix(f"{name}_") for name, table in tables.items()]
    return pd.concat(spreads, axis=1)


def train_flops(spec: Spec) -> float:
    """FLOPs of training on a token of the model that all contenders share; 0 in decoding."""
    return 0.0 if spec.new_tokens else cost(build_decoder(spec.config, torch.device("meta"))).train_flops_per_token


def product_speed(rows: int, bf16: bool) -> float:
    """FLOP/s of a product of two square matrices in the precision of the training."""
    a, b = torch.randn(2, rows, rows, dtype=torch.bfloat16 if bf16 else torch.float32)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    seconds: float = timer.timeit(5).mean
    return 2 * rows**3 / seconds
