"""Charts of measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama_lab.plots import MARKERS, PALETTE, new_figure, style

from .rows import PASSES

SPREAD = "median; whiskers: lowest and highest round"


class Quantity(NamedTuple):
    """What a panel shows: a column of the CSV file times `scale`, which goes with a `power` of the time."""

    title: str
    unit: str
    column: str
    scale: float = 1.0
    power: int = 0

    def with_whiskers(self, rows: pd.DataFrame) -> tuple[pd.Series, np.ndarray]:
        """The values at the median times `(rows,)`, and distances to the lowest and the highest round's `(2, rows)`."""
        middle = self.scale * rows[self.column]
        ends = [middle * (rows[end] / rows.median_s) ** self.power for end in ("low_s", "high_s")]
        return middle, np.abs(np.sort(ends, axis=0) - middle.to_numpy())


TIME = Quantity("time", "ms", "median_s", scale=1e3, power=1)
SPEED = Quantity("speed", "tokens per second", "tokens_per_s", power=-1)
PEAK = Quantity("peak memory", "MiB", "peak_bytes", scale=2**-20)
COMPUTATIONS = Quantity("key and value computations", "tokens, in each layer", "kv_computations")


def chart(title: str, size_name: str, rows: pd.DataFrame, quantities: Sequence[Quantity], over_sizes: bool) -> Figure:
    """A panel for each quantity that was measured, and each pass.

    over_sizes: draw lines over the sizes; otherwise bars, and a panel for each size.
    """
    names = rows["pass"].replace(PASSES)
    groups = rows.groupby(names if over_sizes else f"{size_name} " + rows["size"] + ", " + names, sort=False)
    panels = [(quantity, *group) for quantity in quantities if quantity.column in rows for group in groups]
    width, height = 4.6 if len(panels) < 3 else 3.6, 3.6 if over_sizes else 1.7 + 0.2 * len(panels[0][2])
    figure, axes = new_figure(len(panels), f"{title} ({SPREAD})", width, height)
    for panel, (quantity, name, group) in zip(axes, panels, strict=True):
        (draw_lines if over_sizes else draw_bars)(panel, group, quantity)
        labels = (size_name, f"{quantity.unit}, logarithmic") if over_sizes else (quantity.unit, "")
        style(panel, f"{quantity.title}, {name}", *labels)
    return figure


def draw_lines(axes: Axes, rows: pd.DataFrame, quantity: Quantity) -> None:
    """Draw a line for each contender over the sizes, on a logarithmic scale."""
    axes.set_prop_cycle(color=PALETTE, marker=MARKERS)
    for what, ours in rows.groupby("what", sort=False):
        middle, spread = quantity.with_whiskers(ours)
        axes.errorbar(ours["size"], middle, spread, label=what, markersize=4, linewidth=1.4, capsize=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False)


def draw_bars(axes: Axes, rows: pd.DataFrame, quantity: Quantity) -> None:
    """Draw a labelled bar for each contender, the first at the top."""
    middle, spread = quantity.with_whiskers(rows)
    whiskers = spread if spread.any() else None
    bars = axes.barh(rows.what, middle, xerr=whiskers, color=PALETTE[0], height=0.65, capsize=2, ecolor=PALETTE[1])
    labels = [f"{length:.3g}" if length < 1000 else f"{length:,.0f}" for length in middle]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # to cover grid lines
    axes.bar_label(bars, labels, padding=4, fontsize=8, bbox=box)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlim(left=0)


def decode_chart(speeds: pd.DataFrame, floors: pd.DataFrame, growth: pd.DataFrame) -> Figure:
    """Tokens per second with the floors, and the time per token over the context."""
    figure, axes = new_figure(2, f"Greedy text, batch 1 ({SPREAD})", height=3.2)
    draw_bars(axes[0], speeds, SPEED)
    for name, at, colour, dashes in zip(floors.what, floors.tokens_per_s, PALETTE[2:], ("--", ":"), strict=False):
        axes[0].axvline(at, color=colour, linestyle=dashes, linewidth=2, label=f"at the {name}: {at:,.0f}")
    axes[0].set_xlim(0, 1.2 / min(speeds.low_s.min(), floors.low_s.min()))
    style(axes[0], "speed", SPEED.unit, "")
    bottom = 0.0
    for part, colour in (("attention alone", PALETTE[1]), ("the rest", PALETTE[0])):
        rows = growth[growth.what == part]
        times = rows.median_s.to_numpy() * 1e3
        axes[1].bar(rows["size"], times, width=0.6, bottom=bottom, color=colour, label=part)
        bottom = times
    style(axes[1], "time of a token, eager (medians)", "", "ms")
    for panel in axes:
        panel.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return figure
