"""Charts of differences and effects: with their intervals, over training, and as interactions."""

import math
from collections.abc import Sequence
from html import escape
from typing import Literal

from plotly import graph_objects as go
from plotly.subplots import make_subplots

from llama_lab.analysis.result import Finding, Interaction, Result
from llama_lab.analysis.statistics import PairedDifference, term_name
from llama_lab.util import formatting as fmt

from .axes import AXIS, BARE, LATE, ZERO, change_axis, dress, late_range, new_chart, without_shared
from .style import COLOUR_OF, INK, UNCLEAR, curve_styles, cycle_styles, foremost_curves
from .traces import band, error_bars, mean_line

ROW_HEIGHT, LOW_ROW_HEIGHT, MOST_HIGH_ROWS = 44, 32, 8
SQUEEZED = 5.0  # an interval so many times longer than the next one is cut off at the axis's end
LABEL_LENGTH = 34  # characters, for the width of a phone
MOST_PANELS = 6
Against = Literal["previous", "baseline"]


def difference_rows(result: Result, against: Against) -> list[Finding]:
    """The arms' differences to the step before, or to the baseline."""
    found = [arm.to_previous if against == "previous" else arm.to_baseline for arm in result.arms]
    return [one for one in found if one and math.isfinite(one.change.mean)]


def effect_rows(result: Result) -> list[Finding]:
    """The main effects and interactions of a factorial."""
    return [effect for effect in result.effects if math.isfinite(effect.change.mean)]


def in_words(found: Finding) -> str:
    """A row of a chart of differences as text."""
    against = f" against {found.against}" if found.against else ""
    return f"{found.name} {found.change.text}{against}, {found.change.verdict}"


def differences(rows: Sequence[Finding], title: str, axis: str) -> go.Figure:
    """A point with its 95% interval per row, hollow if not significant.

    An interval much longer than all others ends in an arrow at the edge, with its end as text.
    """
    least, most = axis_range(rows)
    found = [row.change for row in rows]
    means = [min(max(one.mean, least), most) for one in found]
    ends = [(max(low, least), min(high, most)) for low, high in (one.ends for one in found)]
    colours = [COLOUR_OF.get(one.verdict, UNCLEAR) for one in found]
    symbols = [
        "triangle-left" if one.mean < least else "triangle-right" if one.mean > most else "circle" for one in found
    ]
    fills = [colour if one.significant else "white" for one, colour in zip(found, colours, strict=True)]
    points = go.Scatter(
        x=means,
        y=list(range(len(rows))),
        error_x=error_bars(means, ends, INK),
        mode="markers",
        marker={"size": 11, "color": fills, "line": {"width": 2, "color": colours}, "symbol": symbols},
        text=[escape(in_words(row)) for row in rows],
        hovertemplate="%{text}<extra></extra>",
    )
    short = without_shared(row.name for row in rows)
    height = ROW_HEIGHT if len(rows) <= MOST_HIGH_ROWS else LOW_ROW_HEIGHT
    lift = {"x": 0, "xref": "paper", "xanchor": "left", "yshift": height / 3 + 3, "showarrow": False}
    lift |= {"bgcolor": "rgba(255,255,255,0.8)"}
    labels = [{**lift, "text": _label(row, short[row.name], least), "y": i} for i, row in enumerate(rows)]
    right = {**lift, "x": 1, "xanchor": "right", "bgcolor": "rgba(0,0,0,0)"}
    beyond = [(i, one) for i, one in enumerate(found) if one.ends[1] > most]
    labels += [{**right, "text": f"{_end(one, one.ends[1], one.mean > most)} \u25b6", "y": i} for i, one in beyond]
    figure = new_chart([points], title, axis, None, height=90 + height * max(len(rows), 2))
    figure.update_layout(annotations=labels)
    space = 0.06 * (most - least) or 0.1
    figure.update_xaxes(ZERO, range=[least - space, most + space], nticks=6)
    # From top to bottom, with space for the first label.
    figure.update_yaxes(BARE, range=[len(rows) - 0.5, -0.9])
    return figure


def _label(row: Finding, short: str, least: float) -> str:
    """The row's name and verdict, and its left end if that is beyond the edge.

    A long name is shortened; its end, which is usually distinctive, is never cut off.
    """
    name, found, tail = row.name, row.change, LABEL_LENGTH // 3
    if len(name) > LABEL_LENGTH:
        name = short
    if len(name) > LABEL_LENGTH:
        name = f"{name[: LABEL_LENGTH - tail - 1]}…{name[-tail:]}"
    end = f"\u25c0 {_end(found, found.ends[0], found.mean < least)} " if found.ends[0] < least else ""
    note = "" if found.significant else f" <span style='color:{UNCLEAR}'>{found.verdict}</span>"
    return f"{end}{escape(name)}{note}"


def _end(found: PairedDifference, end: float, is_all: bool) -> str:
    """The end of an interval beyond the edge, or mean and interval if the mean is beyond it, too."""
    return found.text if is_all else fmt.signed(end, fmt.decimals(*found.ends))


def axis_range(rows: Sequence[Finding]) -> tuple[float, float]:
    """The range of an axis that covers zero and all intervals but those that would squeeze the others."""
    ends = [end for row in rows for end in row.change.ends]
    sizes = sorted(max(map(abs, row.change.ends)) for row in rows)
    most = max(sizes, default=0.0)
    for n in range(max(2, math.ceil(len(sizes) / 2)), len(sizes)):  # at least half of the rows, and two, are covered
        if sizes[n] > SQUEEZED * sizes[n - 1] > 0:
            most = 1.25 * sizes[n - 1]
            break
    return max(min([0.0, *ends]), -most), min(max([0.0, *ends]), most)


def difference_curves(result: Result) -> go.Figure:
    """The differences over training, each with its simultaneous interval as a band."""
    styles, first = curve_styles(result), foremost_curves(result)
    traces = []
    for curve in result.difference_curves:
        points = [i for i, mean in enumerate(curve.mean) if math.isfinite(mean)]
        tested = [i for i in points if math.isfinite(curve.low[i])]
        if tested:
            traces.append(band(curve.name, styles[curve.name], curve, tested))
        shown = [fmt.with_interval(curve.mean[i], curve.low[i], curve.high[i], is_difference=True) for i in points]
        line = mean_line(curve.name, styles[curve.name], curve, points, "%{customdata} at %{x:.3s}")
        traces.append(line.update(customdata=shown))
    figure = new_chart(traces, "Difference over training", "tokens", change_axis(result), height=430)
    figure.update_xaxes(exponentformat="SI", nticks=7)
    # Covers lines and bands of the curves visible at first, and the lines of the others.
    bounds = [(curve.tokens, curve.mean) for curve in result.difference_curves]
    bounds += [(c.tokens, end) for c in result.difference_curves if c.name in first for end in (c.low, c.high)]
    late = late_range(bounds)
    figure.update_yaxes(ZERO, range=late)
    figure.layout.meta = {"choices": {"Show": {**LATE, "without the first fifth": {"yaxis.range": late}}}}
    return figure


def interactions(result: Result) -> go.Figure:
    """A panel for each of the shown interactions, with a line for each level of the second axis."""
    shown = shown_interactions(result)
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / 2)
    titles = [escape(term_name(found.axes)) for found in shown]
    gaps = {"vertical_spacing": 0.36 / max(rows, 2), "horizontal_spacing": 0.06}
    figure = make_subplots(rows, columns, shared_yaxes="all", subplot_titles=titles, **gaps)
    for i, found in enumerate(shown):
        place = {"row": i // columns + 1, "col": i % columns + 1}
        figure.add_traces(_interaction(found), rows=place["row"], cols=place["col"])
        figure.update_xaxes(AXIS, range=[-0.25, len(found.levels[0]) - 0.1], showgrid=False, **place)
        figure.update_yaxes(AXIS, title={"text": result.unit} if i % columns == 0 else None, **place)
    means = [mean for found in shown for row in found.means for mean in row]
    space = 0.15 * (max(means) - min(means)) or 0.1
    figure.update_yaxes(range=[min(means) - space, max(means) + space])
    figure.update_annotations(font={"size": 13})
    return dress(figure, "Interactions: mean loss at each combination", 70 + 200 * rows).update_layout(margin_t=76)


def shown_interactions(result: Result) -> list[Interaction]:
    """The largest interactions, at most MOST_PANELS, in the result's order."""
    largest = sorted(result.interactions, key=lambda found: -found.size)[:MOST_PANELS]
    return [found for found in result.interactions if found in largest]


def _interaction(found: Interaction) -> list[go.Scatter]:
    """A line for each level of the second axis over those of the first, labelled at its end."""
    ends = found.means[-1]
    highest = max(range(len(ends)), key=lambda j: (ends[j], j))
    styles = cycle_styles(found.levels[1])
    return [
        go.Scatter(
            x=[escape(level) for level in found.levels[0]],
            y=list(means),
            text=[*[""] * (len(means) - 1), escape(level)],
            mode="lines+markers+text",
            textposition="top right" if j == highest else "bottom right",
            cliponaxis=False,
            line={"color": styles[level].colour, "dash": styles[level].dash, "width": 2},
            marker={"symbol": styles[level].symbol, "size": 8},
            hovertemplate=f"%{{x}}, {escape(level)}: %{{y:.4f}}<extra></extra>",
        )
        for j, (level, means) in enumerate(zip(found.levels[1], zip(*found.means, strict=True), strict=True))
    ]
