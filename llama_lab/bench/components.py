"""Measures what textbooks claim about the parts of a decoder: `python -m llama_lab.bench components`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from llama_lab.plots import save

from .attention import AttentionSizes, attention_finding, measure_attention
from .charts import attention_chart, caching_chart, decoding_chart, feedforward_chart, norm_chart
from .feedforward import feedforward_finding, measure_feedforwards
from .generation import caching_finding, decoding_finding, measure_caching, measure_decoding
from .measurement import Measurement, conditions, console, measurement_table, write_csv
from .norm import measure_norms, norm_finding
from .subjects import SMALL, TINY, Shape

LENGTHS = AttentionSizes((512, 1024, 2048, 4096, 8192))


@dataclass(frozen=True)
class Sizes:
    """The sizes of all benchmarks; the defaults are those of the command."""

    norm_dims: Sequence[int] = (256, 512, 1024, 2048, 4096)
    norm_rows: int = 2048
    ffn_dim: int = 768  # gives gated and ungated feed-forwards exactly equal parameters
    ffn_tokens: int = 512
    attention: AttentionSizes = LENGTHS
    decoder: Shape = SMALL
    batch_sizes: Sequence[int] = (1, 8)
    contexts: Sequence[int] = (1024, 4096)
    new_tokens: int = 100


PRESETS = {
    "full": Sizes(),
    "tiny": Sizes(
        norm_dims=(16, 32),
        norm_rows=8,
        ffn_dim=24,
        ffn_tokens=8,
        attention=AttentionSizes((64, 128), n_heads=2, head_dim=16),
        decoder=TINY,
        batch_sizes=(1,),
        contexts=(16, 32),
        new_tokens=10,
    ),
}


@dataclass(frozen=True)
class Component:
    """A claim of textbooks, with functions that measure it, state the finding, and plot it.

    size_name: what the sizes of its measurements are, for headings.
    """

    title: str
    size_name: str
    textbook: str
    measure: Callable[[Sizes, int, torch.device], list[Measurement]]
    finding: Callable[[Sequence[Measurement]], str]
    chart: Callable[[Sequence[Measurement]], Figure]


COMPONENTS = {
    "norm": Component(
        "LayerNorm and RMSNorm",
        "width",
        "RMSNorm about 2 times as fast as a plain LayerNorm kernel",
        lambda sizes, rounds, device: measure_norms(sizes.norm_dims, sizes.norm_rows, rounds, device),
        norm_finding,
        norm_chart,
    ),
    "ffn": Component(
        "Feed-forwards at equal parameters",
        "width",
        "gated ones compute as much as ungated ones, at two thirds of the width (Shazeer 2020)",
        lambda sizes, rounds, device: measure_feedforwards(sizes.ffn_dim, sizes.ffn_tokens, rounds, device),
        feedforward_finding,
        feedforward_chart,
    ),
    "attention": Component(
        "Causal attention, fused and written out",
        "tokens",
        "fused attention 1.2 to 8 times as fast, with half of the memory",
        lambda sizes, rounds, device: measure_attention(sizes.attention, rounds, device),
        attention_finding,
        attention_chart,
    ),
    "decoding": Component(
        "Decoding with fewer key and value heads, a token of every sequence",
        "B x T",
        "MQA decodes 38% faster than MHA",
        lambda sizes, rounds, device: measure_decoding(
            sizes.decoder, sizes.batch_sizes, sizes.contexts, rounds, device
        ),
        decoding_finding,
        decoding_chart,
    ),
    "caching": Component(
        "Greedy text with and without a KV cache",
        "tokens",
        "50 times fewer key and value computations for 100 tokens",
        lambda sizes, rounds, device: measure_caching(sizes.decoder, sizes.new_tokens, rounds, device),
        caching_finding,
        caching_chart,
    ),
}


def run(names: Sequence[str], sizes: Sizes, rounds: int, device: torch.device, out: Path) -> None:
    """Measure components and print a table of each; write `components.csv` and a plot of each into `out`."""
    terminal = console()
    where = conditions(device)
    terminal.print(f"{where['device']}, {where['threads']} threads, PyTorch {where['torch']}; {rounds} rounds")
    rows = []
    for name in names:
        component = COMPONENTS[name]
        measurements = component.measure(sizes, rounds, device)
        terminal.print(measurement_table(component.title, component.size_name, measurements))
        terminal.print(f"textbooks: {component.textbook}\nhere: {component.finding(measurements)}\n")
        rows += [m.row() | where for m in measurements]
        write_csv(rows, out / "components.csv")  # after each, in case the command is interrupted
        save(component.chart(measurements), out / f"{name}.png")
    terminal.print(f"wrote {out / 'components.csv'} and a picture of each", soft_wrap=True)
