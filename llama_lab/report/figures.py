"""The report's charts as figures for a paper, one column wide."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from llama_lab.analysis.depth_profiles import PARTS, TITLES
from llama_lab.analysis.result import Result
from llama_lab.util import chart
from llama_lab.util.chart import SIZE, Spec
from llama_lab.util.formatting import break_name

from .charts import compute, costs, training
from .charts import differences as difference_charts
from .charts.base import ENDS, LOSS, Chart, change_axis, label_ends, without_shared
from .charts.style import MOST_BANDS, foremost_curves

WIDTH = 3.35  # inches, of a column in most two-column styles
DPI = 300
PIXELS = 362  # of the width, at which text of 12 pixels has 8 points
SUFFIXES = (".svg", ".pdf", ".png")
HEIGHT, LOW = 150, 105  # pixels, of a panel alone, and of one of several
CHARACTER, HANDLE = 5.4, 26  # pixels, width of a small character, and of a legend's handle with its spacing
LEGEND_LENGTH = 44  # characters per line
MOST_NAMES = 0.3  # of the width, for names beside panels


def write_figures(result: Result, folder: Path) -> None:
    """Write every figure that the result has data for, in each format, and captions.md."""
    captions = []
    for name, draw in FIGURES.items():
        drawn = draw(result)
        if spec := figure(drawn):
            texts = (drawn.title, drawn.caption) if isinstance(drawn, Chart) else (drawn[0].caption,)
            captions.append(f"**{name}** {'. '.join(filter(None, texts))}\n")
            chart.render(spec, *(folder / f"{name}{suffix}" for suffix in SUFFIXES), width=72 * WIDTH, ppi=DPI)
    (folder / "captions.md").write_text("\n".join(captions), encoding="utf-8")


def figure(drawn: Chart | list[Chart]) -> Spec | None:
    """A figure with a panel for each view of some charts, in one column or two; None without anything to draw."""
    charts = [one for one in (drawn if isinstance(drawn, list) else [drawn]) if one.is_drawn]
    n_panels = sum(len(one.views) for one in charts)
    columns, height = min(2, n_panels), LOW if n_panels > 1 else HEIGHT
    charts = [
        label_ends(replace(one, height=height), MOST_NAMES * PIXELS / columns, is_fixed=True) if one.styles else one
        for one in charts
    ]
    panels = [panel for one in charts for panel in _panels(one, one.title if len(charts) > 1 else "")]
    for i, panel in enumerate(panels):
        x, y = (panel["encoding"][channel] for channel in "xy")
        x["title"] = x["title"] if i + columns >= len(panels) else None  # the lowest in its column has it
        y["title"] = y["title"].split(", ") if y["title"] and i % columns == 0 else None
        beside = [row for other in panels[i - i % 2 :][:2] for row in other["data"]["values"]]
        ends = [row[end] for row in beside for end in ENDS & row.keys()]
        if columns > 1:
            y["scale"] = {"domain": [min(ends), max(ends)]} | y["scale"]  # the same for two side by side
    width, spec = PIXELS / max(columns, 1), None
    for _ in range(3 if panels else 0):  # what axes and legend leave for the panels is only known from a drawing
        spec = {"concat": [{**panel, "width": width} for panel in panels], "columns": columns, "spacing": 12}
        spec["params"] = [{"name": "width", "value": width}]
        size = SIZE.search(chart.svg(spec))
        width += (PIXELS - float(size[1])) / columns if size else 0
    return spec


def _panels(one: Chart, title: str) -> Iterator[Spec]:
    """Each view of a chart, titled by what not all views share, with a legend unless its lines are labelled."""
    labels = _labels(one.legend)
    longest = max((len(line) for lines in labels.values() for line in lines), default=1)
    columns = max(1, min(4, int(PIXELS / (HANDLE + CHARACTER * longest))))
    shared = set.intersection(*map(set, one.views))
    for view in one.views:
        named = [(group, option) for group, option in zip(one.choices, view, strict=False) if option not in shared]
        lines = [f"{group}: {option}" if i else option for i, (group, option) in enumerate(named)]
        spec = one.view(view) | {"title": lines or title, "height": one.height}
        if one.legend and not one.margin:
            texts = f"{json.dumps(labels)}[datum.label]"
            spec["encoding"]["color"]["legend"] = {"columns": columns, "labelExpr": texts}
        yield spec


def _labels(names: Iterable[str]) -> dict[str, list[str]]:
    """The lines of each name in a legend; long ones omit shared settings."""
    shown = {name: name if len(name) <= LEGEND_LENGTH else short for name, short in without_shared(names).items()}
    return {name: break_name(text, LEGEND_LENGTH) for name, text in shown.items()}


# --- charts of the page, as a figure shows them ---


def forest(against: difference_charts.Against, result: Result) -> Chart:
    """The difference of each arm to the step before, or to the baseline."""
    what = {
        "previous": "Change at each step: mean over seeds of the paired difference to the step before, or to the arm's "
        "reference.",
        "baseline": f"Mean over seeds of the paired difference to {result.study.baseline}.",
    }
    rows, caption = difference_charts.difference_rows(result, against), f"{what[against]} {difference_charts.INTERVALS}"
    return difference_charts.differences(rows, "", change_axis(result), caption)


def _difference_curves(result: Result) -> Chart:
    """With simultaneous intervals of those that end furthest from zero."""
    drawn, wide = difference_charts.difference_curves(result), foremost_curves(result)
    bare = [{key: row[key] for key in row if key not in ("low", "high") or row["arm"] in wide} for row in drawn.rows]
    caption = f"{drawn.caption} Shown are those of the {MOST_BANDS} that end furthest from zero."
    return replace(drawn, rows=bare, caption=caption)


def _curves(name: str, result: Result) -> Chart:
    """One loss over training; the steep first fifth may be cut off."""
    return replace(_only(training.curves(result), name), title=name.capitalize())


def _layer_gradients(result: Result) -> Chart:
    """Of attention and feed-forwards."""
    found = _only(training.telemetry(result), TITLES["grad_norm"])
    rows = [row for row in found.rows if PARTS["block"] not in row["view"]]
    caption = "Mean over seeds, at four logged steps, the first the faintest."
    return replace(found, rows=rows, title="Norm of the gradient over depth", caption=caption)


def _only(drawn: Chart, option: str) -> Chart:
    return replace(drawn, rows=[row for row in drawn.rows if option in row["view"]])


FIGURES: dict[str, Callable[[Result], Chart | list[Chart]]] = {
    "steps": partial(forest, "previous"),
    "differences": partial(forest, "baseline"),
    "effects": difference_charts.effects,
    "interactions": difference_charts.interactions,
    "difference_curves": _difference_curves,
    "validation_loss": partial(_curves, LOSS["val/loss"]),
    "training_loss": partial(_curves, LOSS["train/loss"]),
    "layer_gradients": _layer_gradients,
    "kv_cache_front": costs.kv_cache_front,
    "speed_front": costs.throughput_front,
    "scaling": compute.losses,
    "gains": compute.gains,
    "iso_flop": compute.iso_flop,
    "learning_rates": training.learning_rates,
    "context_lengths": training.context_lengths,
    "positions": training.positions,
    "decoding_speed": costs.decoding_speeds,
    "cache_sizes": costs.cache_sizes,
}
