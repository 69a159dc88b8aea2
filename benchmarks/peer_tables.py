"""What `peers` prints: the conditions, a row for each side, and the same rows as Markdown."""

import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import date
from statistics import median

from rich.table import Table

from llama_lab.display import plain_table
from llama_lab.runs.environment import cpu_name

from .side import Spec
from .side_process import Measured

SIDE, MEMORY, PARAMETERS, SPEED = "side", "freed memory", "parameters", "tokens/s"
RATIO, ROUNDS, SHARE, LOSS = "relative to ours", "in each round", "of ceiling", "loss, first and last step"
TABLES = ((SIDE, SPEED, RATIO, SHARE), (SIDE, ROUNDS), (SIDE, PARAMETERS, MEMORY, LOSS))

Row = dict[str, str]  # texts by heading


def rows_of(found: Sequence[Measured], flops: float, ceiling: Sequence[float]) -> list[Row]:
    """A row for each side; what does not apply to decoding is left out, which has no ceiling.

    flops: of training on one token. ceiling: FLOP/s in every round.
    """
    return [row_of(measured, found[0], flops, ceiling) for measured in found]


def row_of(measured: Measured, ours: Measured, flops: float, ceiling: Sequence[float]) -> Row:
    """A side's row; its speed is compared with ours of the same round, and with the ceiling of that round."""
    ratios = [theirs / own for theirs, own in zip(measured.speeds, ours.speeds, strict=True)]
    row = {
        SIDE: measured.contender.name,
        MEMORY: "kept" if measured.contender.kept else "returned",
        PARAMETERS: f"{measured.params:,}",
        SPEED: spread(measured.speeds, "{:,.0f}".format),
        RATIO: spread(ratios, "{:.2f}".format),
        ROUNDS: " ".join(f"{ratio:.2f}" for ratio in ratios),
    }
    if ceiling:
        shares = [flops * speed / most for speed, most in zip(measured.speeds, ceiling, strict=True)]
        row[SHARE] = f"{median(shares):.0%}"
    if measured.losses:
        row[LOSS] = f"{measured.losses[0]:.3f}, {measured.losses[-1]:.3f}"
    return row


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The median, and the lowest and the highest value."""
    return f"{text(median(values))} ({text(min(values))} to {text(max(values))})"


def text_table(rows: Sequence[Row], headings: Sequence[str]) -> Table:
    """Some columns of the rows, for a terminal of 80 columns."""
    shown = [heading for heading in headings if heading in rows[0]]
    table = plain_table("", shown[:1], shown[1:], gap=2)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, all columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(preset: str, spec: Spec, found: Sequence[Measured], ceiling: Sequence[float]) -> str:
    """What was measured, on what, with which versions, when and how: the caption of the tables."""
    shape, work = spec.shape, f"training on batches of {spec.batch_size} x {spec.shape.max_seq_len} tokens"
    if spec.new_tokens:
        work = f"greedy decoding, batch 1, {spec.new_tokens} tokens after {spec.prompt}"
    model = (
        f"Llama of {shape.n_layers} layers, width {shape.dim}, {shape.n_heads} heads, {shape.n_kv_heads} key and value "
        f"heads, feed-forward {shape.hidden_dim}, vocabulary {shape.vocab_size}"
    )
    precision = "bfloat16" if spec.bf16 else "float32"
    versions = dict.fromkeys(f"{m.contender.spec.side} {m.version} (torch {m.torch})" for m in found)
    lines = [
        f"{preset}: {work}, {model}, {precision}, {'compiled' if spec.compile else 'eager'}",
        f"{cpu_name()}, {spec.threads} threads, Python {platform.python_version()}, {date.today().isoformat()}",
        ", ".join(versions),
        f"python -m benchmarks {shlex.join(sys.argv[1:])}",
    ]
    if ceiling:
        gigaflops = spread([flops / 1e9 for flops in ceiling], "{:,.0f}".format)
        lines.append(f"ceiling, matrix products in {precision}: {gigaflops} GFLOP/s")
    return "\n".join(lines)
