"""Charts of measurements."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_lab.plots import MARKERS, PALETTE, new_figure, style

from .rows import PASSES, Row

SPREAD = "median; whiskers: lowest and highest round"


class Quantity(NamedTuple):
    """What a panel shows: a column of the CSV file times `scale`, which goes with a `power` of the time."""

    title: str
    unit: str
    column: str
    scale: float = 1.0
    power: int = 0

    def with_whiskers(self, row: Row) -> tuple[float, float, float]:
        """The value at the median time, and the distances to the lowest and the highest value of all rounds."""
        middle = self.scale * row.cells()[self.column]
        values = [middle * (seconds / row.timing.median) ** self.power for seconds in row.timing.times]
        return middle, middle - min(values), max(values) - middle


TIME = Quantity("time", "ms", "median_s", scale=1e3, power=1)
SPEED = Quantity("speed", "tokens per second", "tokens_per_s", power=-1)
PEAK = Quantity("peak memory", "MiB", "peak_bytes", scale=2**-20)
COMPUTATIONS = Quantity("key and value computations", "tokens, in each layer", "kv_computations")


def chart(title: str, size_name: str, rows: Sequence[Row], quantities: Sequence[Quantity], over_sizes: bool) -> Figure:
    """A panel for each quantity that was measured, and each pass.

    over_sizes: draw lines over the sizes; otherwise bars, and a panel for each size.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        name = PASSES.get(row.direction, row.direction)
        groups.setdefault(name if over_sizes else f"{size_name} {row.size}, {name}", []).append(row)
    panels = [(quantity, name) for quantity in quantities if quantity.column in rows[0].cells() for name in groups]
    width, height = 4.6 if len(panels) < 3 else 3.6, 3.6 if over_sizes else 1.7 + 0.2 * len(groups[panels[0][1]])
    figure, axes = new_figure(len(panels), f"{title} ({SPREAD})", width, height)
    for panel, (quantity, name) in zip(axes, panels, strict=True):
        (draw_lines if over_sizes else draw_bars)(panel, groups[name], quantity)
        labels = (size_name, f"{quantity.unit}, logarithmic") if over_sizes else (quantity.unit, "")
        style(panel, f"{quantity.title}, {name}", *labels)
    return figure


def draw_lines(axes: Axes, rows: Sequence[Row], quantity: Quantity) -> None:
    """Draw a line for each contender over the sizes, on a logarithmic scale."""
    for i, what in enumerate(dict.fromkeys(row.what for row in rows)):
        ours = [row for row in rows if row.what == what]
        middle, below, above = zip(*map(quantity.with_whiskers, ours), strict=True)
        axes.errorbar(
            [row.size for row in ours],
            middle,
            (below, above),
            label=what,
            color=PALETTE[i],
            marker=MARKERS[i],
            markersize=4,
            linewidth=1.4,
            capsize=2,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False)


def draw_bars(axes: Axes, rows: Sequence[Row], quantity: Quantity) -> None:
    """Draw a labelled bar for each contender, the first at the top."""
    middle, below, above = zip(*map(quantity.with_whiskers, rows), strict=True)
    whiskers = (below, above) if any(below + above) else None
    names = [row.what for row in rows]
    bars = axes.barh(names, middle, xerr=whiskers, color=PALETTE[0], height=0.65, capsize=2, ecolor=PALETTE[1])
    labels = [f"{length:.3g}" if length < 1000 else f"{length:,.0f}" for length in middle]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # to cover grid lines
    axes.bar_label(bars, labels, padding=4, fontsize=8, bbox=box)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)


def decode_chart(speeds: Sequence[Row], floors: Sequence[Row], growth: Sequence[Row]) -> Figure:
    """Tokens per second with the floors, and the time per token over the context."""
    figure, axes = new_figure(2, f"Greedy text, batch 1 ({SPREAD})", height=3.2)
    draw_bars(axes[0], speeds, SPEED)
    for floor, colour, dashes in zip(floors, PALETTE[2:], ("--", ":"), strict=False):
        at = floor.values["tokens_per_s"]
        axes[0].axvline(at, color=colour, linestyle=dashes, linewidth=2, label=f"at the {floor.what}: {at:,.0f}")
    fastest = min(seconds for row in (*speeds, *floors) for seconds in row.timing.times)
    axes[0].set_xlim(0, 1.2 / fastest)
    style(axes[0], "speed", SPEED.unit, "")
    bottom = None
    for part, colour in (("attention alone", PALETTE[1]), ("the rest", PALETTE[0])):
        times = {row.size: row.timing.median * 1e3 for row in growth if row.what == part}
        axes[1].bar(list(times), list(times.values()), width=0.6, bottom=bottom, color=colour, label=part)
        bottom = list(times.values())
    style(axes[1], "time of a token, eager (medians)", "", "ms")
    for panel in axes:
        panel.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure
