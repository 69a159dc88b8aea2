"""Plot the results of an evaluation: eval.png."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_lab.runs.evaluation import Evaluation
from llama_lab.util.files import replacing

from .printing import predicted, smallest_caches

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe & Ito 2008
INK, GRID = "#222222", "#E4E4E4"


def plot_evaluation(found: Evaluation, folder: Path) -> None:
    """Write eval.png, or eval_ema.png, into a run's folder: a panel for each thing that was found."""
    panels = [draw for part, draw in PANELS if any(getattr(e, "loss", 0) is not None for e in getattr(found, part))]
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.8 * rows), dpi=150, layout="constrained")
    for number, draw in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set_prop_cycle(color=PALETTE)
        draw(found, axes)
    with replacing((folder / found.FILE).with_suffix(".png")) as fresh:
        figure.savefig(fresh, format="png")


def by_position(found: Evaluation, axes: Axes) -> None:
    """Loss over the position in the context, a line for each context length."""
    for entry in found.lengths:
        if entry.loss is not None:
            before = [position + 1 for position in entry.positions]
            axes.plot(before, entry.losses, linewidth=1.2, label=f"{entry.length:,} tokens")
    style(axes, "Loss by position", "tokens that a prediction has before it", f"nats per {predicted(found)}", "context")
    octaves(axes, found)


def by_length(found: Evaluation, axes: Axes) -> None:
    """Loss over the context length."""
    losses = {entry.length: entry.loss for entry in found.lengths if entry.loss is not None}
    axes.plot(list(losses), list(losses.values()), marker="o")
    style(axes, "Loss by context length", "tokens", f"nats per {predicted(found)}")
    octaves(axes, found)
    if ends := [f"{entry.length:,}" for entry in found.lengths if entry.loss is None]:
        axes.text(0.98, 0.02, f"no loss at {', '.join(ends)}", transform=axes.transAxes, ha="right", va="bottom")


def cache_bytes(found: Evaluation, axes: Axes) -> None:
    """Bytes of one sequence's KV cache over the context: lines by formula, marks as measured."""
    for dtype, sizes in groupby(smallest_caches(found), lambda size: size.dtype):
        kib = [(s.context, *(n / s.batch_size / 1024 for n in (s.formula_bytes, s.measured_bytes))) for s in sizes]
        tokens, formula, measured = zip(*kib, strict=True)
        (line,) = axes.plot(tokens, formula, label=dtype)
        axes.plot(tokens, measured, "o", color=line.get_color())
    style(axes, "KV cache of one sequence", "tokens", "KiB (lines: by formula; dots: measured)", "")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def speeds(found: Evaluation, axes: Axes) -> None:
    """Tokens per second over the context, with the cache and without, a colour for each batch size."""
    groups = groupby(found.speed, lambda speed: speed.batch_size)
    for (batch_size, group), colour in zip(groups, PALETTE, strict=False):
        measured = list(group)
        contexts = [speed.context for speed in measured]
        for name, line, words in (("decode", "-", ""), ("uncached", "--", ", no cache")):
            rounds = np.array([getattr(speed, name) for speed in measured])
            middle = batch_size / np.median(rounds, axis=1)
            spread = middle - batch_size / rounds.max(axis=1), batch_size / rounds.min(axis=1) - middle
            label = f"batch {batch_size}{words}"
            axes.errorbar(contexts, middle, spread, color=colour, linestyle=line, marker="o", capsize=3, label=label)
    style(axes, "Decoding: medians and ranges of rounds", "tokens in the context", "tokens per second", "")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def octaves(axes: Axes, found: Evaluation) -> None:
    """A logarithmic axis of tokens, with a line where the trained context ends."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.axvline(found.lengths[0].length, color="black", linestyle=":", linewidth=1)


PANELS: tuple[tuple[str, Callable[[Evaluation, Axes], None]], ...] = (
    ("lengths", by_position),
    ("lengths", by_length),
    ("cache", cache_bytes),
    ("speed", speeds),
)


def style(axes: Axes, title: str, x: str, y: str, legend: str | None = None) -> None:
    """Set the title, the axis labels and the legend, draw a light grid, and hide the frame at the top and right."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(which="both", labelsize=8, colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend is not None:  # lines may pass below it
        axes.legend(title=legend, fontsize=8, title_fontsize=8, framealpha=0.8, edgecolor="none")
