"""What a chart is, and what charts share: titles of axes, ranges, and rows of means."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
from scipy.optimize import isotonic_regression

from llama_lab.analysis.result import Loss, Result, Spread, unit_of
from llama_lab.analysis.statistics import Estimate
from llama_lab.util import formatting as fmt
from llama_lab.util.chart import LABEL, LINE, Row, Spec, axis, rounded, rows

from .style import Style

LOSS = {**dict.fromkeys(get_args(Loss), "validation loss"), "train/loss": "training loss"}
WHOLE = {"scale": axis("y", "")["scale"]}
LATE: dict[str, Spec] = {"without the first fifth": {}, "from the start": {"y": WHOLE}}  # see late_range
ENDS = {"y", "low", "high"}  # what a y axis covers
CHARACTER, LABEL_HEIGHT = 7, 13  # pixels of a label
MOST_LIFT = 10  # pixels between the end of a line and its label
SEEDS = "Bars: 95% intervals over seeds."
Choices = Mapping[str, Mapping[str, Spec]]


@dataclass(frozen=True)
class Chart:
    """A chart with its texts: the page shows one of its views at a time, a paper all of them.

    rows: what is drawn; `view` of a row: the options that must all be chosen for it to be visible. layers, encoding: of
    Vega-Lite, without the channels of arms. tip: an expression over a row, for its text under the pointer. styles: of
    the arms. choices: the options by group, each with its changes to the encoding; a chart opens with the first ones.
    alt: the alternative text. caption: how to read it, on the page and in a paper. shown: the arms that are visible at
    first; None for all. margin: pixels at the right for the names of arms, see `label_ends`; 0: they have a legend.
    """

    title: str
    rows: list[Row]
    layers: list[Spec]
    encoding: Spec
    tip: str = "datum.text"
    styles: Mapping[str, Style] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    height: int = 330
    alt: str = ""
    caption: str = ""
    shown: Collection[str] | None = None
    wide: bool = False
    margin: int = 0

    @cached_property
    def legend(self) -> dict[str, Style]:
        """The drawn arms, with their styles."""
        drawn = {row.get("arm") for row in self.rows}
        return {name: style for name, style in self.styles.items() if name in drawn}

    @cached_property
    def has_lines(self) -> bool:
        """Whether arms are drawn as lines, not only as points."""
        return any(layer["mark"] == LINE["mark"] for layer in self.layers)

    @cached_property
    def views(self) -> dict[tuple[str, ...], list[Row]]:
        """The rows by the options that they are visible with."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault(tuple(row.get("view", ())), []).append(row)
        return found

    @property
    def is_drawn(self) -> bool:
        """Whether there is anything to see: of lines, more than one point on their axis."""
        return len({row["x"] for row in self.rows}) > self.has_lines

    @property
    def hidden(self) -> set[str]:
        """The arms that are switched off at first."""
        return set() if self.shown is None or not self.has_lines else set(self.legend) - set(self.shown)

    @property
    def full_caption(self) -> str:
        """The caption, with a note on hidden arms."""
        shown = len(self.legend) - len(self.hidden)
        note = f" Of {len(self.legend)} the {shown} that differ most are shown; press a name to show another."
        return self.caption + (note if self.hidden else "")

    @cached_property
    def spec(self) -> Spec:
        """The encoding and the layers, whose channels of arms have the arms' looks; without data."""
        names, legend = [*self.legend], {"legend": None} if self.margin else {}
        ranges = {"color": "colour", "strokeDash": "dash", "shape": "symbol"} if self.styles else {}
        looks: dict[str, Spec] = {
            channel: {"scale": {"domain": names, "range": [getattr(self.styles[name], part) for name in names]}}
            | legend
            for channel, part in ranges.items()
        }
        if looks:  # with a domain of its own: of one domain, Vega-Lite dashes the outlines of the legend's symbols
            looks["strokeDash"]["scale"]["domain"] = [*names, ""]
        layers = [
            {**layer, "encoding": {key: value and value | looks.get(key, {}) for key, value in encoding.items()}}
            for layer, encoding in ((layer, layer.get("encoding", {})) for layer in self.layers)
        ]
        colour = {"color": {"field": "arm", **looks["color"]}} if looks else {}
        x = self.encoding["x"]
        if self.margin:
            x = {**x, "scale": {**x["scale"], "range": [0, {"expr": f"width - {self.margin}"}]}}
        return {"layer": layers, "encoding": self.encoding | {"x": x} | colour}

    def view(self, options: Collection[str]) -> Spec:
        """What is visible with these options chosen."""
        encoding = {channel: {**settings} for channel, settings in self.spec["encoding"].items()}
        for choices in self.choices.values():
            for option in choices.keys() & options:
                for channel, change in choices[option].items():
                    encoding[channel] |= change
        visible = [row for row in self.rows if set(options).issuperset(row.get("view", ()))]
        return {**self.spec, "encoding": encoding, "data": {"values": visible}}


def label_ends(chart: Chart, most: float, is_fixed: bool) -> Chart:
    """The chart with the arms' names at the ends of their lines; as it is if they are too long, or would overlap.

    most: pixels for the names. is_fixed: whether the chart stays as it opens.
    """
    margin = 6 + CHARACTER * max(map(len, chart.legend), default=0)
    if not chart.has_lines or chart.hidden or margin > most:
        return chart
    is_whole = not is_fixed and any({"y": WHOLE} in options.values() for options in chart.choices.values())
    extent = [row[end] for row in chart.rows for end in ENDS & row.keys()]
    labelled = list[Row]()
    for view, drawn in chart.views.items():
        last = max(row["x"] for row in drawn)
        ends = sorted((row for row in drawn if row["x"] == last and "y" in row), key=lambda row: -row["y"])
        if Counter(row["arm"] for row in ends) != Counter({row["arm"] for row in drawn}):
            return chart  # a line ends elsewhere, or an arm has several
        scale = {} if is_whole else chart.view(view)["encoding"]["y"]["scale"]
        lifts = _lifts([row["y"] for row in ends], scale, extent, chart.height)
        if max(map(abs, lifts)) > MOST_LIFT:
            return chart
        lift_of = {row["arm"]: lift for row, lift in zip(ends, lifts, strict=True)}
        labelled += [{**row, "lift": lift_of[row["arm"]]} if row["x"] == last else row for row in drawn]
    return replace(chart, rows=labelled, layers=[*chart.layers, LABEL], margin=margin)


def _lifts(values: Sequence[float], scale: Spec, extent: Sequence[float], height: float) -> list[float]:
    """By how many pixels the labels of falling values are moved down to be apart.

    extent: what the axis covers without a domain of its own.
    """
    domain = scale.get("domain", [min(extent), max(extent)])
    measure = np.log if scale.get("type") == "log" else np.asarray
    low, high = measure(domain)
    at, slots = height * (high - measure(values)) / (high - low or 1.0), LABEL_HEIGHT * np.arange(len(values))
    lifts: list[float] = np.round(isotonic_regression(at - slots).x + slots - at, 1).tolist()
    return lifts


def choose(rows: Iterable[Row], *groups: str) -> Choices:
    """Choices among the views of rows, with an option per group."""
    options = zip(*(row["view"] for row in rows), strict=True)
    return {group: dict.fromkeys(found, Spec()) for group, found in zip(groups, options, strict=False)}


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


def mean_rows(means: Iterable[tuple[float, Estimate | Spread | None]], **common: Any) -> list[Row]:
    """A row for each mean, with its interval if it has one. common: fields of all."""
    known = [(float(x), one) for x, one in means if one]
    ends = {"y": "mean", "low": "low", "high": "high"}
    columns = {name: [getattr(one, end) for _, one in known] for name, end in ends.items()}
    texts = [fmt.with_interval(one.mean, one.low, one.high) for _, one in known]
    return rows({"x": [x for x, _ in known], **columns, "text": texts}, **common)


def late_range(found: Iterable[tuple[list[float], list[float]]]) -> Spec:
    """A scale of the values after the first fifth of training, which would flatten the rest.

    found: the tokens and the values of each line.
    """
    points = [(at / max(tokens), value) for tokens, line in found for at, value in zip(tokens, line, strict=True)]
    late = [rounded(value) for share, value in points if share >= 0.2 and math.isfinite(value)] or [0.0, 1.0]
    space = 0.05 * (max(late) - min(late)) or 0.1
    return {**WHOLE["scale"], "domain": [min(late) - space, max(late) + space]}
