"""Charts of differences and effects: with their intervals, over training, and as interactions."""

import math
from collections.abc import Sequence
from typing import Literal

from llama_lab.analysis.result import Finding, Interaction, Result
from llama_lab.analysis.statistics import PairedDifference
from llama_lab.util import formatting as fmt
from llama_lab.util.chart import LINE, POINTS, Row, Spec, axis, rounded, rows, rule

from .base import LATE, Chart, axis_of, change_axis, late_range, without_shared
from .style import COLOUR_OF, UNCLEAR, curve_styles, cycle_styles, foremost_curves
from .training import CURVE

ROW_HEIGHT, LOW_ROW_HEIGHT, MOST_HIGH_ROWS = 44, 32, 8
SQUEEZED = 5.0  # an interval so many times longer than the next one is cut off at the axis's end
LABEL_LENGTH = 34  # characters, for the width of a phone
MOST_PANELS = 6
INTERVALS = (
    "Bars: simultaneous 95% intervals. Filled: significant at 5%, the interval excludes zero. Arrow: it continues. "
    "Left is better."
)
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


def effects(result: Result) -> Chart:
    """The main effects and interactions."""
    caption = (
        "Main effect: the change of the loss from the baseline's option of one axis to another option, averaged over "
        "all settings of the other axes. Interaction: half the change of one axis's effect when the other axis "
        f"changes. {INTERVALS}"
    )
    return differences(effect_rows(result), "Main effects and interactions", change_axis(result), caption)


def differences(found: Sequence[Finding], title: str, axis_title: str, caption: str = "") -> Chart:
    """A point with its 95% interval per finding, hollow if not significant.

    An interval much longer than all others ends in an arrow at the edge, with its end as text.
    """
    least, most = axis_range(found)
    space = 0.06 * (most - least) or 0.1
    short = without_shared(one.name for one in found)
    drawn = [_row(place, one, short[one.name], least, most) for place, one in enumerate(found)]
    label: Spec = {"type": "text", "style": "label", "dy": -7}
    halo = {**label, "stroke": {"expr": "paper"}, "strokeWidth": 3, "aria": False}  # of a label across the line at 0
    name = {"x": {"value": 4}, "text": {"field": "label"}, "color": None}
    end = {"x": {"value": {"expr": "width"}}, "text": {"field": "end"}, "color": None}
    fill = {"condition": {"test": "datum.hollow", "value": {"expr": "paper"}}, "field": "colour", "scale": None}
    layers: list[Spec] = [
        *rule("x", [0]),
        {"mark": "rule", "encoding": {"x": {"field": "low"}, "x2": {"field": "high"}}},
        {"mark": "point", "transform": [{"filter": "!datum.outside"}], "encoding": {"fill": fill}},
        _arrow("left", "low"),
        _arrow("right", "high"),
        {"mark": halo, "encoding": name},
        {"mark": label, "encoding": name},
        {"mark": {**label, "align": "right"}, "encoding": end},
    ]
    # From top to bottom, with space for the first label.
    y = axis("y", None, domain=[-0.8, len(found) - 0.5], reverse=True, padding=0) | {"axis": None}
    x = axis("x", axis_title, domain=[least - space, most + space], padding=0)
    axes = {"x": x, "y": y, "color": {"field": "colour", "type": "nominal", "scale": None}}
    height = ROW_HEIGHT if len(found) <= MOST_HIGH_ROWS else LOW_ROW_HEIGHT
    return Chart(title, drawn, layers, axes, height=height * max(len(found), 2), caption=caption)


def _row(place: int, found: Finding, short: str, least: float, most: float) -> Row:
    change = found.change
    low, high = change.ends
    mean, left, right = (rounded(min(max(value, least), most)) for value in (change.mean, low, high))
    return {
        "x": mean,
        "y": place,
        "low": left,
        "high": right,
        "beyond_low": low < least,
        "beyond_high": high > most,
        "outside": not least <= change.mean <= most,
        "hollow": not change.significant,
        "colour": COLOUR_OF.get(change.verdict, UNCLEAR),
        "label": _label(found, short, least),
        "end": f"{_end(change, high, change.mean > most)} \u25ba" if high > most else "",
        "text": in_words(found),
    }


def _arrow(side: str, end: str) -> Spec:
    """Where an interval goes on beyond the edge."""
    mark = {"type": "point", "filled": True, "shape": f"triangle-{side}"}
    return {"mark": mark, "transform": [{"filter": f"datum.beyond_{end}"}], "encoding": {"x": {"field": end}}}


def _label(row: Finding, short: str, least: float) -> str:
    """The row's name and verdict, and its left end if that is beyond the edge.

    A long name is shortened; its end, which is usually distinctive, is never cut off.
    """
    name, found, tail = row.name, row.change, LABEL_LENGTH // 3
    if len(name) > LABEL_LENGTH:
        name = short
    if len(name) > LABEL_LENGTH:
        name = f"{name[: LABEL_LENGTH - tail - 1]}…{name[-tail:]}"
    end = f"\u25c4 {_end(found, found.ends[0], found.mean < least)} " if found.ends[0] < least else ""
    return f"{end}{name}{'' if found.significant else f' ({found.verdict})'}"


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


def difference_curves(result: Result) -> Chart:
    """The differences over training, each with its simultaneous interval as a band."""
    found, first = list[Row](), foremost_curves(result)
    for curve in result.difference_curves:
        columns = {"x": curve.tokens, "y": curve.mean, "low": curve.low, "high": curve.high}
        found += rows(columns, arm=curve.name)
    for row in found:
        row["text"] = fmt.with_interval(row["y"], row.get("low", math.nan), row.get("high", math.nan), True)
    # Covers lines and bands of the curves visible at first, and the lines of the others.
    bounds = [(curve.tokens, curve.mean) for curve in result.difference_curves]
    bounds += [(c.tokens, end) for c in result.difference_curves if c.name in first for end in (c.low, c.high)]
    y = axis("y", change_axis(result)) | {"scale": late_range(bounds)}
    axes = {"x": axis("x", "tokens", "~s", padding=0), "y": y}
    layers, tip = [*rule("y", [0]), *CURVE], "datum.text + ' at ' + format(datum.x, '.3s') + ' tokens'"
    title, styles = "Difference over training", curve_styles(result)
    caption = (
        "Mean of the paired differences at every evaluation that all runs share. Bands: the simultaneous 95% "
        "intervals of the same test at that evaluation; the last one is the reported interval. A band that "
        "excludes zero before the end is not a finding: each evaluation is one more look."
    )
    return Chart(title, found, layers, axes, tip, styles, {"Show": LATE}, height=350, caption=caption)


def interactions(result: Result) -> list[Chart]:
    """A chart for each of the shown interactions, with a line for each level of the second axis."""
    shown = shown_interactions(result)
    means = [mean for found in shown for row in found.means for mean in row] or [0.0, 1.0]
    space = 0.15 * (max(means) - min(means)) or 0.1
    y = axis("y", axis_of(result, result.metric), domain=[min(means) - space, max(means) + space], padding=0)
    return [_interaction(found, y) for found in shown]


def shown_interactions(result: Result) -> list[Interaction]:
    """The largest interactions, at most MOST_PANELS, in the result's order."""
    largest = sorted(result.interactions, key=lambda found: -abs(found.largest.mean) if found.largest else 0)
    return [found for found in result.interactions if found in largest[:MOST_PANELS]]


def _interaction(found: Interaction, y: Spec) -> Chart:
    """A line for each level of the second axis over those of the first."""
    (levels, names), drawn = found.levels, list[Row]()
    columns = zip(names, zip(*found.means, strict=True), zip(*found.changes, strict=True), strict=True)
    for name, means, changes in columns:
        texts = [f"{level}, {name}: {mean:.4f}" for level, mean in zip(levels, means, strict=True)]
        tested = (f", interaction {one.text}, {one.verdict}" if one else "" for one in changes)
        texts = [text + more for text, more in zip(texts, tested, strict=True)]
        drawn += rows({"x": range(len(levels)), "y": means, "text": texts}, arm=name)
    which = "largest: " if len(levels) > 2 or len(names) > 2 else ""
    size: Spec = {
        "data": {"values": [{"text": which + found.largest.text}] if found.largest else []},
        "mark": {"type": "text", "style": "note", "align": "left"},
        "encoding": {"x": {"value": 0}, "y": {"value": -6}, "text": {"field": "text"}, "color": None},
    }
    x = axis("x", None, ticks=dict(enumerate(levels)), domain=[-0.15, len(levels) - 0.85], padding=0)
    title, axes = f"Interaction of {fmt.conjoin(found.axes)}", {"x": x, "y": y}
    caption = (
        "Lines that are not parallel show an interaction, half the change of one axis's effect when the other axis "
        "changes; its size stands above with its simultaneous 95% interval. Means over the other axes, and the seeds "
        "that all arms have finished."
    )
    return Chart(title, drawn, [LINE, POINTS, size], axes, styles=cycle_styles(names), height=220, caption=caption)
