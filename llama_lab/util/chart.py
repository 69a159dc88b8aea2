"""Charts as Vega-Lite specifications: plain dictionaries, drawn into files here and in pages by Vega-Embed.

Rows of data have neutral names of fields, so that the names of arms are never read as code: x, y, the interval from low
to high, and arm, by which layers are coloured.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import vl_convert

Spec = dict[str, Any]
Row = dict[str, Any]

# Okabe and Ito's colours, which colour-blind readers can distinguish, without yellow, which is invisible on white.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
INK, GRID = "#222222", "#E4E4E4"
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MARKS_PER_LINE = 8
MOST_TICKS = 7
CLIP = re.compile(r'((?:id="|url\(#)clip)(\d+)')
SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')
ENTRIES = re.compile(rb"(?: */\w+ \d+ 0 R\n)+")  # of a PDF's dictionary of resources

# --- layers, which inherit what they do not name from the chart's encoding ---

INTERVAL: Spec = {
    "transform": [{"filter": "isValid(datum.low)"}],
    "encoding": {"y": {"field": "low"}, "y2": {"field": "high"}},
}
DASH: Spec = {"strokeDash": {"field": "arm", "legend": None}}
SHAPE: Spec = {"shape": {"field": "arm"}}
LINE: Spec = {"mark": {"type": "line", "clip": True}, "encoding": DASH}
BAND: Spec = {"mark": {"type": "area", "clip": True}, **INTERVAL}
BARS: Spec = {"mark": "rule", **INTERVAL}
POINTS: Spec = {"mark": {"type": "point", "filled": True}, "encoding": SHAPE}
RING: Spec = {"mark": {"type": "point", "style": "ring", "shape": "circle"}, "transform": [{"filter": "datum.ring"}]}
# A few on each line, which distinguish arms of equal colour and dash.
MARKS: Spec = {
    "encoding": SHAPE,
    "mark": {"type": "point", "filled": True, "clip": True},
    "transform": [
        {"joinaggregate": [{"op": "count", "as": "n"}], "groupby": ["arm", "tokens"]},
        {"window": [{"op": "row_number", "as": "i"}], "groupby": ["arm", "tokens"]},
        {"filter": f"(datum.i - 1) % ceil(datum.n / {MARKS_PER_LINE}) == 0"},
    ],
}
# The arm's name at the end of its line, moved down by the row's `lift`.
LABEL: Spec = {
    "mark": {"type": "text", "style": "label", "baseline": "middle", "dx": 6, "dy": {"expr": "datum.lift || 0"}},
    "transform": [
        {"joinaggregate": [{"op": "max", "field": "x", "as": "end"}], "groupby": ["arm"]},
        {"filter": "datum.x == datum.end"},
    ],
    "encoding": {"text": {"field": "arm"}, "color": None},
}


def only(condition: str, layer: Spec) -> Spec:
    """The layer of the rows for which an expression is true."""
    return {**layer, "transform": [{"filter": condition}, *layer.get("transform", [])]}


def rule(channel: str, values: Iterable[float], style: str = "zero", text: str = "") -> list[Spec]:
    """Lines across a chart at some values of x or y, with a text above."""
    data = {"values": [{channel: value} for value in values]}
    bare = {"x": None, "y": None, "color": None, channel: {"field": channel}}
    label = {"mark": {"type": "text", "style": "note", "text": text}, "encoding": {**bare, "y": {"value": -6}}}
    line = {"mark": {"type": "rule", "style": style, "clip": True}, "encoding": bare}
    return [{"data": data, **layer} for layer in ([line, label] if text else [line])]


def axis(field: str, title: str | None, form: str = "", ticks: Mapping[float, str] | None = None, **scale: Any) -> Spec:
    """A channel of numbers; zero is not included by default.

    form: of d3-format, for its ticks. ticks: default: at round numbers; else the text at each. scale: its settings.
    """
    settings: Spec = {"format": form} if form else {}
    if ticks:
        values, texts = [*map(rounded, ticks)], json.dumps([*ticks.values()])
        settings = {"values": values, "labelExpr": f"{texts}[indexof({json.dumps(values)}, datum.value)]"}
    scale = {"nice": False, "padding": 10} | ({} if scale.get("type") == "log" else {"zero": False}) | scale
    if "domain" in scale:
        scale["domain"] = [*map(rounded, scale["domain"])]
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": settings}


def log_axis(field: str, title: str, form: str = "~s", ticks: Mapping[float, str] | None = None) -> Spec:
    """A logarithmic axis."""
    return axis(field, title, form, ticks, type="log")


def ticked(field: str, title: str, values: Iterable[float], text: Callable[[float], str]) -> Spec:
    """A logarithmic axis with a tick at each of these values if they are few."""
    values = sorted({*values})
    return log_axis(field, title, ticks={one: text(one) for one in values} if len(values) <= MOST_TICKS else None)


def octaves(field: str, title: str, values: Iterable[float], text: Callable[[float], str]) -> Spec:
    """A logarithmic axis with ticks at powers of two around these values."""
    logs = [math.log2(value) for value in values] or [0.0]
    lowest, highest = math.floor(min(logs)), math.ceil(max(logs))
    powers = range(lowest, highest + 1, max(1, (highest - lowest) // 4))
    return log_axis(field, title, ticks={2.0**power: text(2.0**power) for power in powers})


def rounded(value: Any) -> Any:
    """A number with six significant digits, more than a screen resolves: smaller files, and equal ones on any CPU."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def rows(columns: Mapping[str, Iterable[Any]], **common: Any) -> list[Row]:
    """A row for each point with an x and a y, without its numbers that are not finite. common: the same in all."""
    points = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    found = [{key: rounded(one) for key, one in point.items() if _is_drawn(one)} for point in points]
    return [{**common, **row} for row in found if row.keys() >= {"x", "y"}]


def _is_drawn(value: Any) -> bool:
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


# --- drawing ---


def config(ink: str = INK, grid: str = GRID, font: str = FONT, paper: str = "white") -> Spec:
    """How charts look: colours, sizes and widths, in pixels."""
    colours = {"labelColor": ink, "titleColor": ink}
    text = {**colours, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12}
    lines = {"gridColor": grid, "domainColor": "#999999", "tickColor": "#999999"}
    legend = {"title": None, "orient": "bottom", "labelLimit": 0, "symbolStrokeWidth": 0, "rowPadding": 4}
    return {
        "background": paper,
        "font": font,
        "params": [{"name": "paper", "value": paper}],
        "view": {"stroke": None},
        "title": {"fontSize": 12, "fontWeight": "normal", "anchor": "start", "color": ink},
        "axis": {**text, **lines, "labelOverlap": True, "labelSeparation": 4, "tickCount": 6},
        "legend": {**text, **legend},
        "line": {"strokeWidth": 1.75},
        "area": {"opacity": 0.18},
        "rule": {"strokeWidth": 1.5},
        "point": {"size": 50, "opacity": 1},
        "text": {"color": ink, "fontSize": 11},
        "style": {
            "zero": {"color": ink},
            "dotted": {"color": ink, "strokeDash": [2, 3], "strokeWidth": 1},
            "note": {"baseline": "bottom"},
            "ring": {"size": 260, "strokeWidth": 1.75},
            "cross": {"size": 60, "strokeWidth": 2},
            "front": {"color": "#888888", "strokeDash": [2, 3], "strokeWidth": 1.5},
            "label": {"align": "left", "baseline": "bottom"},
            "hover": {"size": 250, "opacity": 0},
        },
    }


def svg(spec: Spec) -> str:
    """The drawn chart as SVG, whose text remains text."""
    drawn, clips = str(vl_convert.vegalite_to_svg({"config": config(), **spec})), dict[str, int]()
    # Vega goes on counting from one drawing to the next.
    return CLIP.sub(lambda found: f"{found[1]}{clips.setdefault(found[2], len(clips))}", drawn)


def render(spec: Spec, *paths: Path, width: float = 0, ppi: int = 150) -> None:
    """Write a chart as SVG, PDF or PNG, by each path's suffix, which needs no browser. Equal charts give equal files.

    width: of the file in points; default: a point for each pixel of the specification. ppi: pixels per inch of a PNG.
    """
    drawn = svg(spec)
    if width:
        size = SIZE.search(drawn)
        assert size  # of every drawing
        height = width * float(size[2]) / float(size[1])
        drawn = drawn.replace(size[0], f'width="{width:.6g}" height="{height:.6g}"', 1)
    for path in paths:
        if path.suffix == ".svg":
            path.write_text(drawn, encoding="utf-8")
        elif path.suffix == ".pdf":
            # The order of a dictionary's entries differs from one call to the next.
            pdf = ENTRIES.sub(lambda found: b"".join(sorted(found[0].splitlines(True))), vl_convert.svg_to_pdf(drawn))
            path.write_bytes(pdf)
        else:
            path.write_bytes(vl_convert.svg_to_png(drawn, ppi=ppi))
