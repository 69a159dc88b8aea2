"""The layout that charts share: fonts, axes, ticks, and choices among views."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from plotly import graph_objects as go

from llama_lab.analysis.result import Result, unit_of

from .style import GRID, INK

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
AXIS = {"gridcolor": GRID, "zeroline": False, "linecolor": "#999999", "ticks": "outside", "tickcolor": "#999999"}
AXIS |= {"automargin": True}
BARE = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False, "zeroline": False}
BARE |= {"fixedrange": True}
ZERO = {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1.5, "zerolinelayer": "below traces"}
TITLE = {"font": {"size": 15}, "x": 0, "xref": "container", "y": 1, "yref": "container", "yanchor": "top"}
TITLE |= {"pad": {"t": 12}}
LATE: dict[str, Any] = {  # ranges of the loss axis of curves
    "without the first fifth": {},
    "from the start": {"yaxis.range": None, "yaxis.autorange": True},
}
LOSS = {"val/loss": "validation loss", "val/bits_per_byte": "validation loss", "train/loss": "training loss"}


def axis_of(result: Result, metric: str) -> str:
    """The title of a loss's axis."""
    return f"{LOSS[metric]}, {unit_of(result.arms, metric)}"


def change_axis(result: Result) -> str:
    """The title of an axis of differences."""
    return f"change of validation loss, {result.unit}"


def without_shared(names: Iterable[str]) -> dict[str, str]:
    """Each name without the settings that all of them share."""
    settings = {name: name.split(",") for name in names}
    shared = set.intersection(*map(set, settings.values())) if settings else set()
    return {name: ",".join(one for one in own if one not in shared) or name for name, own in settings.items()}


def new_chart(traces: list[Any], title: str, x: str, y: str | None, height: int) -> go.Figure:
    """A figure of these traces, with the titles of its axes."""
    return dress(go.Figure(traces), title, height).update_layout(
        xaxis={**AXIS, "title": {"text": x, "standoff": 8}},
        yaxis={**AXIS, "title": {"text": y, "standoff": 8}},
    )


def dress(figure: go.Figure, title: str, height: int) -> go.Figure:
    """A figure with the layout that all charts share."""
    return figure.update_layout(
        template="none",
        title={**TITLE, "text": title},
        height=height,
        margin={"l": 12, "r": 14, "t": 44, "b": 12},
        showlegend=False,
        hovermode="closest",
        font={"family": FONT, "size": 12, "color": INK},
        hoverlabel={"bgcolor": "white", "font": {"color": INK}, "align": "left"},
        paper_bgcolor="white",
        plot_bgcolor="white",
    )


def choose(figure: go.Figure, *groups: str) -> go.Figure:
    """Add choices among the views of the traces, with an option per group; the first trace's view is shown first."""
    views = [trace.meta["view"] for trace in figure.data]
    for trace, view in zip(figure.data, views, strict=True):
        trace.visible = view == views[0]
    options = zip(groups, zip(*views, strict=True), strict=False)  # without a trace, there are no options
    figure.layout.meta = {"choices": {group: {option: {} for option in found} for group, found in options}}
    return figure


def set_ticks(figure: go.Figure, values: list[float], text: Callable[[float], str], axis: str = "x") -> go.Figure:
    """Make an axis logarithmic, with a tick at each of these values if they are few."""
    figure.layout[f"{axis}axis"].type = "log"
    if values and len(values) <= 7:
        figure.layout[f"{axis}axis"].update(tickvals=values, ticktext=[text(value) for value in values])
    return figure


def set_octaves(figure: go.Figure, text: Callable[[float], str], axis: str = "x") -> go.Figure:
    """Make an axis logarithmic, with at most eight ticks at powers of two."""
    found = [value for trace in figure.data for value in trace[axis] or () if math.isfinite(value) and value > 0]
    if not found:
        return figure
    lowest, highest = math.floor(math.log2(min(found))), math.ceil(math.log2(max(found)))
    ticks = [2.0**power for power in range(lowest, highest + 1, max(1, (highest - lowest) // 4))]
    figure = set_ticks(figure, ticks, text, axis)
    figure.layout[f"{axis}axis"].range = [math.log10(min(found)) - 0.15, math.log10(max(found)) + 0.15]
    return figure


def late_range(found: Iterable[tuple[list[float], list[float]]]) -> list[float] | None:
    """The range of the values after the first fifth of training, which would flatten the rest; None without any.

    found: the tokens and the values of each line.
    """
    points = [(at / max(tokens), value) for tokens, line in found for at, value in zip(tokens, line, strict=True)]
    late = [value for share, value in points if share >= 0.2 and math.isfinite(value)]
    if not late:
        return None
    space = 0.05 * (max(late) - min(late)) or 0.1
    return [min(late) - space, max(late) + space]
