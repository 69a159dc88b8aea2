"""Measures what textbooks claim about the parts of a decoder: `python -m benchmarks components`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from . import decoders, layers, recurrence
from .rows import show, start, write


@dataclass(frozen=True)
class Component:
    """A claim of textbooks, with the function that measures it.

    measure: takes the rounds, the device and the sizes (default: those of the command); yields tables. tiny: small
    sizes.
    """

    title: str
    textbook: str
    measure: Callable[..., Iterable[pd.DataFrame]]
    tiny: Mapping[str, Any]


COMPONENTS = {
    "norm": Component(
        "LayerNorm and RMSNorm, by width",
        "RMSNorm about 2 times as fast as a plain LayerNorm kernel",
        layers.measure_norms,
        {"dims": (16, 32), "vectors": 8},
    ),
    "ffn": Component(
        "Feed-forwards at equal parameters",
        "gated ones compute as much as ungated ones, at two thirds of the width (Shazeer 2020)",
        layers.measure_feedforwards,
        {"dim": 24, "tokens": 8},
    ),
    "attention": Component(
        "Causal attention, fused and written out, by tokens",
        "fused attention 1.2 to 8 times as fast, with half of the memory",
        layers.measure_attention,
        {"shapes": [(1, 2, 64, 16), (1, 2, 128, 16)]},
    ),
    "recurrence": Component(
        "The gated delta rule in chunks, and the mixer of Mamba 2, ours and transformers' in PyTorch",
        "no claim",
        recurrence.measure_recurrence,
        {"shape": (1, 2, 20, 4)},
    ),
    "decoding": Component(
        "Decoding with fewer key and value heads, a token of every sequence, by sequences x tokens",
        "MQA decodes 38% faster than MHA",
        decoders.measure_decoding,
        {"overrides": decoders.TINY, "batch_sizes": [1], "contexts": [16, 32]},
    ),
    "states": Component(
        "Decoding with recurrent states in place of KV caches, a token of one sequence, by sequences x tokens",
        "no claim",
        partial(
            decoders.measure_decoding,
            overrides=decoders.EIGHT,
            batch_sizes=(1,),
            contexts=(256, 4096, 32_768),
            models=decoders.STATES,
        ),
        {"overrides": decoders.TINY, "contexts": [16, 32]},
    ),
    "caching": Component(
        "Greedy text with and without a KV cache, by tokens",
        "50 times fewer key and value computations for 100 tokens",
        decoders.measure_caching,
        {"overrides": decoders.TINY, "new_tokens": 10},
    ),
}


def run(only: Sequence[str], preset: str, device: str, rounds: int, out: Path) -> None:
    """Measure components and print two tables of each: all, and the ratios over its sizes; write `components.csv`."""
    here, where = start(device)
    found: list[pd.DataFrame] = []
    for name in only:
        component = COMPONENTS[name]
        rows = pd.concat(component.measure(rounds, here, **(component.tiny if preset == "tiny" else {})))
        show(component.title, rows)
        ratios = rows.groupby(["what", "pass"], sort=False).ratio.agg(["min", "max"])
        show(f"ratios; textbooks: {component.textbook}", ratios.reset_index())
        found.append(rows.assign(component=name))
        write(found, where, out / "components.csv")  # after each, in case the command is interrupted
