"""Measures what textbooks claim about the parts of a decoder: `python -m benchmarks components`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from llama_lab.plots import save

from . import decoders, layers
from .charts import COMPUTATIONS, PEAK, SPEED, TIME, Quantity, chart
from .rows import row_table, start, write_csv

COLUMNS = ("peak_bytes", "kv_cache_bytes", "kv_computations", "tokens_per_s")


@dataclass(frozen=True)
class Component:
    """A claim of textbooks, with functions that measure it and state the finding.

    size_name: what the sizes of its measurements are, for headings. measure: takes the rounds, the device and the
    sizes (default: those of the command); yields tables. tiny: small sizes. charted: what its chart shows, as lines
    over the sizes (`over_sizes`) or bars.
    """

    title: str
    size_name: str
    textbook: str
    measure: Callable[..., Iterable[pd.DataFrame]]
    finding: Callable[[pd.DataFrame], str]
    tiny: Mapping[str, Any]
    charted: Sequence[Quantity] = (TIME,)
    over_sizes: bool = False


COMPONENTS = {
    "norm": Component(
        "LayerNorm and RMSNorm",
        "width",
        "RMSNorm about 2 times as fast as a plain LayerNorm kernel",
        layers.measure_norms,
        layers.norm_finding,
        {"dims": (16, 32), "vectors": 8},
        over_sizes=True,
    ),
    "ffn": Component(
        "Feed-forwards at equal parameters",
        "width",
        "gated ones compute as much as ungated ones, at two thirds of the width (Shazeer 2020)",
        layers.measure_feedforwards,
        layers.feedforward_finding,
        {"dim": 24, "tokens": 8},
    ),
    "attention": Component(
        "Causal attention, fused and written out",
        "tokens",
        "fused attention 1.2 to 8 times as fast, with half of the memory",
        layers.measure_attention,
        layers.attention_finding,
        {"shapes": [(1, 2, 64, 16), (1, 2, 128, 16)]},
        (TIME, PEAK),
        over_sizes=True,
    ),
    "decoding": Component(
        "Decoding with fewer key and value heads, a token of every sequence",
        "B x T",
        "MQA decodes 38% faster than MHA",
        decoders.measure_decoding,
        decoders.decoding_finding,
        {"overrides": decoders.TINY, "batch_sizes": [1], "contexts": [16, 32]},
        (SPEED,),
    ),
    "caching": Component(
        "Greedy text with and without a KV cache",
        "tokens",
        "50 times fewer key and value computations for 100 tokens",
        decoders.measure_caching,
        decoders.caching_finding,
        {"overrides": decoders.TINY, "new_tokens": 10},
        (TIME, COMPUTATIONS),
    ),
}


def run(only: str, preset: str, device: str, rounds: int, out: Path) -> None:
    """Measure components and print a table of each; write `components.csv` and a plot of each into `out`."""
    here, where, console = start(device, f"{rounds} rounds")
    found: list[pd.DataFrame] = []
    for name in only.split(","):
        component = COMPONENTS[name]
        tables = component.measure(rounds, here, **(component.tiny if preset == "tiny" else {}))
        rows = pd.concat(tables, ignore_index=True).assign(component=name)
        left = {component.size_name: "size", "what": "what", "pass": "pass"}
        console.print(row_table(component.title, left, rows))
        console.print(f"textbooks: {component.textbook}\nhere: {component.finding(rows)}\n")
        found.append(rows)
        write_csv(found, COLUMNS, where, out / "components.csv")  # after each, in case the command is interrupted
        picture = chart(component.title, component.size_name, rows, component.charted, component.over_sizes)
        save(picture, out / f"{name}.png")
    console.print(f"wrote {out / 'components.csv'} and a picture of each", soft_wrap=True)
