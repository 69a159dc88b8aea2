"""What charts are drawn with: lines, bands, bars and marks of an arm, in its style."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from plotly import graph_objects as go

from llama_lab.analysis.result import Curve, DifferenceCurve, Spread
from llama_lab.analysis.statistics import Estimate
from llama_lab.util import formatting as fmt

from .style import Style

Points = Iterable[tuple[float, Estimate | Spread | None]]


def arm_line(arm: str, style: Style, x: Iterable[float], y: Iterable[float], hover: str = "") -> go.Scatter:
    """An arm's line, with a few markers that distinguish arms of equal colour and dash. hover: below the arm's name."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        name=escape(arm),
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": 2},
        marker={"symbol": style.symbol, "color": style.colour, "size": 7, "maxdisplayed": 8},
        meta={"arm": arm},
        hovertemplate=f"%{{fullData.name}}<br>{hover}<extra></extra>" if hover else None,
    )


def mean_line(arm: str, style: Style, curve: Curve | DifferenceCurve, points: list[int], hover: str) -> go.Scatter:
    """A curve's mean at these of its points."""
    return arm_line(arm, style, [curve.tokens[i] for i in points], [rounded(curve.mean[i]) for i in points], hover)


def band(arm: str, style: Style, curve: Curve | DifferenceCurve, points: list[int]) -> go.Scatter:
    """A curve's band at these of its points."""
    x, low, high = ([values[i] for i in points] for values in (curve.tokens, curve.low, curve.high))
    return area(arm, style, x, low, high, opacity=0.18)


def area(
    name: str, style: Style, x: Sequence[float], low: Sequence[float], high: Sequence[float], opacity: float
) -> go.Scatter:
    """The area between two lines over `x`."""
    return go.Scatter(
        x=[*x, *reversed(x)],
        y=[rounded(y) for y in (*low, *reversed(high))],
        fill="toself",
        fillcolor=style.colour,
        opacity=opacity,
        mode="none",
        hoverinfo="skip",
        meta={"arm": name},
    )


def mean_points(arm: str, style: Style, found: Points, hover: str = "") -> go.Scatter:
    """An arm's means, each with a bar from low to high, which has no length without an interval."""
    points = sorted(((x, one) for x, one in found if one and math.isfinite(one.mean)), key=lambda point: point[0])
    means = [one.mean for _, one in points]
    ends = [(one.low, one.high) if math.isfinite(one.high - one.low) else (one.mean, one.mean) for _, one in points]
    return arm_line(arm, style, [x for x, _ in points], means, hover).update(
        error_y=error_bars(means, ends, style.colour),
        marker={"size": 9, "maxdisplayed": 0},
        text=[fmt.with_interval(one.mean, one.low, one.high) for _, one in points],
    )


def error_bars(means: list[float], ends: list[tuple[float, float]], colour: str) -> dict[str, Any]:
    """Bars from low to high around means."""
    up = [high - mean for (_, high), mean in zip(ends, means, strict=True)]
    down = [mean - low for (low, _), mean in zip(ends, means, strict=True)]
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5, "width": 4}
    return {**bars, "color": colour}


def marks(arm: str, x: list[float], y: list[float], marker: dict[str, Any], hover: str) -> go.Scatter:
    """Single points of an arm. hover: the whole text."""
    hover = f"{hover}<extra></extra>"
    return go.Scatter(x=x, y=y, name=escape(arm), mode="markers", marker=marker, meta={"arm": arm}, hovertemplate=hover)


def ring(arm: str, style: Style, x: list[float], y: list[float], hover: str) -> go.Scatter:
    """A ring around points of an arm."""
    return marks(arm, x, y, {"symbol": "circle-open", "size": 19, "color": style.colour, "line": {"width": 2}}, hover)


def rounded(value: float) -> float:
    """Six significant digits, more than a screen resolves, make the file three times smaller."""
    return float(f"{value:.6g}")
