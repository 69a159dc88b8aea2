"""What an evaluation found, as a picture: eval.png."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_lab.plots import PALETTE, save, style
from llama_lab.runs.evaluation import Evaluation


def plot_evaluation(found: Evaluation, folder: Path) -> None:
    """Write eval.png into a run's folder: a panel for each thing that was found."""
    panels = [draw for part, draw in PANELS if any(getattr(e, "loss", 0) is not None for e in getattr(found, part))]
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.8 * rows), dpi=150, layout="constrained")
    for number, draw in enumerate(panels, 1):
        draw(found, figure.add_subplot(rows, columns, number))
    save(figure, folder / "eval.png")


def by_position(found: Evaluation, axes: Axes) -> None:
    """Loss over the position in the context, a line for each context length."""
    entries = [entry for entry in found.lengths if entry.loss is not None]
    for entry, colour in zip(entries, PALETTE, strict=False):
        x = [position + 1 for position in entry.positions]
        axes.plot(x, entry.losses, color=colour, linewidth=1.2, label=f"{entry.length:,} tokens")
    style(axes, "Loss by position", "tokens that a prediction has before it", "nats per token")
    octaves(axes, found)
    legend(axes, "context")


def by_length(found: Evaluation, axes: Axes) -> None:
    """Loss over the context length."""
    losses = {entry.length: entry.loss for entry in found.lengths if entry.loss is not None}
    axes.plot(list(losses), list(losses.values()), marker="o", color=PALETTE[0])
    style(axes, "Loss by context length", "tokens", "nats per token")
    octaves(axes, found)
    ends = [f"{e.length:,}" for e in found.lengths if e.loss is None]
    if ends:
        axes.text(0.98, 0.02, f"no loss at {', '.join(ends)}", transform=axes.transAxes, ha="right", va="bottom")


def cache_bytes(found: Evaluation, axes: Axes) -> None:
    """Bytes of one sequence's KV cache over the context: lines by formula, marks as measured."""
    smallest = min(size.batch_size for size in found.cache)
    sizes = [size for size in found.cache if size.batch_size == smallest]
    dtypes = dict.fromkeys(size.dtype for size in sizes)
    for dtype, colour in zip(dtypes, PALETTE, strict=False):
        of_dtype = [size for size in sizes if size.dtype == dtype]
        x = [size.context for size in of_dtype]
        axes.plot(x, [kib(size.formula_bytes) / smallest for size in of_dtype], color=colour, label=dtype)
        axes.plot(x, [kib(size.measured_bytes) / smallest for size in of_dtype], "o", color=colour)
    style(axes, "KV cache of one sequence", "tokens", "KiB (lines: by formula; dots: measured)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    legend(axes)


def speeds(found: Evaluation, axes: Axes) -> None:
    """Tokens per second over the context, with the cache and without, a colour for each batch size."""
    batch_sizes = dict.fromkeys(speed.batch_size for speed in found.speed)
    for batch_size, colour in zip(batch_sizes, PALETTE, strict=False):
        of_size = [speed for speed in found.speed if speed.batch_size == batch_size]
        x = [speed.context for speed in of_size]
        for name, line, words in (("decode", "-", ""), ("uncached", "--", ", no cache")):
            rounds = [getattr(speed, name) for speed in of_size]
            y = [batch_size / median(seconds) for seconds in rounds]
            spread = [
                [middle - batch_size / max(seconds) for middle, seconds in zip(y, rounds, strict=True)],
                [batch_size / min(seconds) - middle for middle, seconds in zip(y, rounds, strict=True)],
            ]
            label = f"batch {batch_size}{words}"
            axes.errorbar(x, y, spread, color=colour, linestyle=line, marker="o", capsize=3, label=label)
    style(axes, "Decoding: medians and ranges of rounds", "tokens in the context", "tokens per second")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    legend(axes)


def octaves(axes: Axes, found: Evaluation) -> None:
    """A logarithmic axis of tokens, with a line where the trained context ends."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.axvline(found.lengths[0].length, color="black", linestyle=":", linewidth=1)


def legend(axes: Axes, title: str = "") -> None:
    """Which line is which."""
    axes.legend(title=title, fontsize=8, title_fontsize=8, framealpha=0.8, edgecolor="none")  # lines may pass below


def kib(count: float) -> float:
    """Bytes in KiB."""
    return count / 1024


PANELS: tuple[tuple[str, Callable[[Evaluation, Axes], None]], ...] = (
    ("lengths", by_position),
    ("lengths", by_length),
    ("cache", cache_bytes),
    ("speed", speeds),
)
