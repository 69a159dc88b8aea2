"""The report's charts as figures for a paper, one column wide: Matplotlib writes PDF without a browser."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator
from plotly import graph_objects as go

from llama_lab.analysis.depth_profiles import PARTS, TITLES
from llama_lab.analysis.result import CurveMetric, Finding, Result
from llama_lab.analysis.statistics import term_name
from llama_lab.util import formatting as fmt

from .charts import axes as chart_axes
from .charts import compute, costs, style, training
from .charts import context_lengths as length_charts
from .charts import differences as difference_charts
from .charts.style import INK, Style, option_styles

WIDTH = 3.35  # inches, of a column in most two-column styles
DPI = 300
# By suffix, without dates, so that equal results give equal files.
METADATA: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
TEXT = 8  # points
SMALL = 7
LINE = 0.15  # inches, height of a line of text
CHARACTER, HANDLE = 0.058, 0.43  # inches, width of a small character, and of a legend's handle with its spacing
LABEL_LENGTH, LEGEND_LENGTH, LONG = 24, 46, 40  # characters per line

RC: Any = {
    "font.size": TEXT,
    "axes.labelsize": TEXT,
    "axes.titlesize": TEXT,
    "figure.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "text.color": INK,
    "text.parse_math": False,  # names of arms may contain dollar signs
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": style.GRID,
    "grid.linewidth": 0.5,
    "xtick.color": "#999999",
    "ytick.color": "#999999",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "errorbar.capsize": 1.5,
    "savefig.dpi": DPI,
    "svg.fonttype": "none",  # text remains text
    "svg.hashsalt": "llama-lab",
    "pdf.fonttype": 42,  # conferences refuse Type 3
}

LINES: dict[str, str | tuple[float, tuple[float, ...]]] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (8, 2)),
    "longdashdot": (0, (8, 2, 1.5, 2)),
}
MARKS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "x": "X"}
NUMBER = FuncFormatter(lambda value, _: fmt.number(value))
STEPS: Any = {"hv": "steps-post", "vh": "steps-pre"}

Axis = XAxis | YAxis
View = tuple[str, ...]  # what is chosen in each group of a chart's choices


def write_figures(result: Result, folder: Path) -> None:
    """Write every figure that the result has data for, in each format, and captions.md."""
    captions = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own style
        matplotlib.rcParams.update(RC)
        for draw, caption in FIGURES.items():
            if figure := draw(result):
                captions.append(f"**{draw.__name__}** {caption}\n")
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # the layout is computed once for all formats
                for suffix, metadata in METADATA.items():
                    figure.savefig(folder / f"{draw.__name__}{suffix}", metadata=metadata)
    (folder / "captions.md").write_text("\n".join(captions), encoding="utf-8")


# --- one function for each figure; None if there is nothing to draw ---


def steps(result: Result) -> Figure | None:
    """The change at each step."""
    return _forest(difference_charts.difference_rows(result, "previous"), result)


def differences(result: Result) -> Figure | None:
    """The differences to the baseline."""
    return _forest(difference_charts.difference_rows(result, "baseline"), result)


def effects(result: Result) -> Figure | None:
    """Main effects and interactions."""
    return _forest(difference_charts.effect_rows(result), result)


def interactions(result: Result) -> Figure | None:
    """The mean loss at each combination of two axes, with a line for each level of the second."""
    shown = difference_charts.shown_interactions(result)
    if not shown:
        return None
    rows = math.ceil(len(shown) / 2)
    figure, panels = _panels(
        [""] * len(shown), "", chart_axes.axis_of(result, result.metric), min(2, len(shown)), height=0.2 + 1.9 * rows
    )
    for panel, found in zip(panels, shown, strict=True):
        levels, names = found.levels
        for name, losses, colour, mark in zip(
            names, zip(*found.means, strict=True), cycle(style.COLOURS), cycle("osD^v"), strict=False
        ):
            panel.plot(range(len(levels)), losses, color=colour, marker=mark, label=name)
        panel.set_xticks(range(len(levels)), levels)
        panel.set_xlim(-0.3, len(levels) - 0.7)
        above: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
        panel.legend(title=term_name(found.axes), handlelength=1.2, **above)
    return figure


def difference_curves(result: Result) -> Figure | None:
    """Each difference over training, with simultaneous intervals of those that end furthest from zero."""
    chart, wide = difference_charts.difference_curves(result), style.foremost_curves(result)
    chart.data = [trace for trace in chart.data if not trace.fill or trace.meta["arm"] in wide]
    return _draw(result, chart, _tokens, looks=style.curve_styles(result))


def validation_loss(result: Result) -> Figure | None:
    """Validation loss over training."""
    return _curves(result, result.metric)


def training_loss(result: Result) -> Figure | None:
    """Training loss over training."""
    return _curves(result, "train/loss")


def kv_cache_front(result: Result) -> Figure | None:
    """Loss against the size of the KV cache per token."""
    sizes = partial(_octaves, text=costs.cache_size_text(result))
    return _draw(result, costs.kv_cache_front(result), sizes)


def speed_front(result: Result) -> Figure | None:
    """Loss against training speed."""
    return _draw(result, costs.throughput_front(result), _numbers)


def learning_rates(result: Result) -> Figure | None:
    """Final loss over learning rate, with a ring at the best one and crosses for diverged runs above."""
    sweeps = result.learning_rates
    tried = sorted({rate for sweep in sweeps for rate in sweep.rates if math.isfinite(rate)})

    def rates(axis: Axis) -> None:
        panel = axis.axes
        panel.set_xscale("log")
        if any(n for sweep in sweeps for n in sweep.diverged):
            panel.text(0, 1.05, "diverged", transform=panel.transAxes, fontsize=SMALL)
        _tick(axis, tried[:: math.ceil(len(tried) / 6)], fmt.learning_rate)

    is_known = any(loss for sweep in sweeps for loss in sweep.loss)
    return _draw(result, training.learning_rates(result), rates) if is_known else None


def context_lengths(result: Result) -> Figure | None:
    """Loss over context length, in multiples of the trained length."""
    ratios = partial(_octaves, text=lambda ratio: f"{ratio:g}{fmt.TIMES}")
    return _draw(result, length_charts.context_lengths(result), ratios)


def positions(result: Result) -> Figure | None:
    """Loss by position for each evaluated context length, with a dotted line at the end of the trained context."""
    chart = length_charts.positions(result)
    return _draw(result, chart, partial(_octaves, text=fmt.number, most=4), views=_views(chart)[::-1])


def scaling(result: Result) -> Figure | None:
    """Loss over training FLOPs, with each option's law along the sizes of every budget."""
    return _draw(result, compute.losses(result), _powers, _logarithmic, looks=option_styles(result))


def gains(result: Result) -> Figure | None:
    """The compute-equivalent gain of each option over the reference."""
    return _draw(result, compute.gains(result), _powers, _logarithmic, looks=option_styles(result))


def iso_flop(result: Result) -> Figure | None:
    """The loss by each option's law over parameters, at some amounts of compute."""
    return _draw(result, compute.iso_flop(result), _powers, looks=option_styles(result))


def decoding_speed(result: Result) -> Figure | None:
    """Tokens per second over context length, for each batch size, with and without the KV cache."""
    contexts, chart = partial(_octaves, text=fmt.number), costs.decoding_speeds(result)
    return _draw(result, chart, contexts, lambda axis: axis.set_major_formatter(NUMBER), title="\ncache ".join)


def cache_sizes(result: Result) -> Figure | None:
    """The measured bytes of one sequence's KV cache over context length, for each element type."""
    chart = costs.cache_sizes(result).update_yaxes(title_text="KV cache of one sequence")
    sizes = [size for trace in chart.data for size in trace.y]
    contexts, in_bytes = partial(_octaves, text=fmt.number), partial(_octaves, text=fmt.in_bytes, values=sizes)
    return _draw(result, chart, contexts, in_bytes)


def layer_gradients(result: Result) -> Figure | None:
    """The norms of the gradients of attention and feed-forwards over depth, at some steps."""
    chart = training.telemetry(result)
    views = [view for view in _views(chart) if view[0] == TITLES["grad_norm"] and view[1] != PARTS["block"]]

    def layers(axis: Axis) -> None:
        axis.set_major_locator(MaxNLocator(6, integer=True))

    sizes = partial(_logarithmic, ticks=LogLocator(subs=(1, 3)))
    return _draw(result, chart, layers, sizes, views, title=lambda view: view[1]) if views else None


INTERVALS = "Bars: simultaneous 95% intervals. Filled: significant at 5%. Hollow: not. Arrow: the interval continues."
SEEDS = "Bars: 95% intervals over seeds."

# Each figure with its caption.
FIGURES: dict[Callable[[Result], Figure | None], str] = {
    steps: "Change at each step: mean over seeds of the paired difference to the step before, or to the arm's "
    f"reference. {INTERVALS}",
    differences: f"Mean over seeds of the paired difference to the baseline. {INTERVALS}",
    effects: "Main effects, the change from the first level of an axis to another, averaged over all settings of the "
    f"other axes, and interactions, half the change of one effect when the other axis changes. {INTERVALS}",
    interactions: "Mean loss at each combination of the levels of two axes, averaged over the others.",
    difference_curves: "Difference over training, mean over seeds. Bands: simultaneous 95% intervals at each "
    f"evaluation, of the {style.MOST_BANDS} that end furthest from zero.",
    validation_loss: "Validation loss, mean over seeds. Bands: from the lowest to the highest seed.",
    training_loss: "Training loss, mean over seeds. Bands: from the lowest to the highest seed.",
    layer_gradients: "Norm of the gradient over depth, mean over seeds, at four logged steps, the first the faintest.",
    kv_cache_front: f"Loss against KV-cache size. Dotted: the arms that no other one beats in both. {SEEDS}",
    speed_front: f"Loss against training speed. Dotted: the arms that no other one beats in both. {SEEDS}",
    scaling: "Loss over compute. Points: mean over seeds, with 95% intervals. Lines and bands: the law along the sizes "
    "of each budget, with its 95% interval.",
    gains: "Compute-equivalent gain over the reference. Points: by the differences at one size and budget. Line: the "
    "laws of both. With 95% intervals.",
    iso_flop: "Loss at equal compute, by the law, with 95% intervals. Rings: the best size.",
    learning_rates: f"Loss over learning rate. Rings: each arm's best. Crosses: rates at which runs diverged. {SEEDS}",
    context_lengths: f"Loss over context length. A line ends where the position encoding ends. {SEEDS}",
    positions: "Loss by position in the context, mean over seeds. Dotted: the end of the trained context.",
    decoding_speed: "Decoding speed at the end of a context, over all sequences of a batch. Bars: from the lowest to "
    "the highest seed.",
    cache_sizes: "Measured KV cache of one sequence over context length.",
}


# --- shared by figures ---


def _forest(rows: Sequence[Finding], result: Result) -> Figure | None:
    """A point with its 95% interval per row, from top to bottom; hollow if not significant."""
    if not rows:
        return None
    labels = list(_labels([row.name for row in rows], LABEL_LENGTH).values())
    lines = [1 + label.count("\n") for label in labels]
    places = [sum(lines[:i]) + (own - 1) / 2 for i, own in enumerate(lines)]
    x = chart_axes.change_axis(result).replace(", ", ",\n")
    figure, (panel,) = _panels([""], x, "", height=0.5 + 1.1 * LINE * max(sum(lines), 3))
    least, most = difference_charts.axis_range(rows)
    for y, found in zip(places, (row.change for row in rows), strict=True):
        colour = style.COLOUR_OF.get(found.verdict, style.UNCLEAR)
        fill = colour if found.significant else "white"
        (low, high), mean = found.ends, found.mean
        bars = [[mean - low], [high - mean]]
        panel.errorbar([mean], y, xerr=bars, fmt="o", color=colour, markerfacecolor=fill, markersize=4.5)
        for edge, mark, is_beyond in ((least, "<", low < least), (most, ">", high > most)):
            if is_beyond:
                panel.plot(edge, y, mark, color=colour, clip_on=False)
    space = 0.06 * (most - least) or 0.1
    panel.set_xlim(least - space, most + space)
    panel.axvline(0, color=INK, linewidth=0.8, zorder=0.5)
    panel.set_yticks(places, labels)
    panel.set_ylim(sum(lines) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    return figure


def _curves(result: Result, metric: CurveMetric) -> Figure | None:
    """The mean over seeds, and a band from the lowest to the highest; the steep first fifth may be cut off."""
    chart, name = training.curves(result), chart_axes.LOSS[metric]
    chart.update_layout(chart.layout.meta["choices"]["Loss"].get(name, {}))
    return _draw(result, chart, _tokens, views=[(name,)], title=lambda _: "")


def _draw(
    result: Result,
    chart: go.Figure,
    x: Callable[[Axis], object],
    y: Callable[[Axis], object] = lambda _: None,
    views: Sequence[View] | None = None,
    title: Callable[[View], str] = "\n".join,
    looks: Mapping[str, Style] | None = None,
) -> Figure | None:
    """Draw a chart of the page, with a panel for each of these views (default: all); None without points.

    x, y: set the scale and the ticks of the axes. looks: of the lines; default: those of the arms.
    """
    found: dict[View, list[go.Scatter]] = {view: [] for view in views or _views(chart)}
    for trace, (view, shown) in product(chart.data, found.items()):
        if any(map(fmt.known, trace.y)) and (not trace.meta or tuple(trace.meta.get("view", ())) == view):
            shown.append(trace)
    named = [trace for shown in found.values() for trace in shown if trace.meta]
    if not named:
        return None
    styles, names = style.styles(result), {trace.meta["arm"] for trace in named}
    looks = looks or {arm.name: styles[arm.name] for arm in result.arms}
    looks = {name: look for name, look in looks.items() if name in names}
    has_lines = any("lines" in trace.mode for trace in named)
    titles, layout = [title(view) for view in found], chart.layout
    labels = layout.xaxis.title.text, layout.yaxis.title.text
    figure, panels = _panels(titles, *labels, min(2, len(found)), looks=looks, with_lines=has_lines)
    for panel, shown in zip(panels, found.values(), strict=True):
        for trace in shown:
            _trace(panel, trace, looks[trace.meta["arm"]] if trace.meta else None)
        x(panel.xaxis)
        y(panel.yaxis)
        if layout.yaxis.rangemode == "tozero":
            panel.set_ylim(bottom=0)
        if layout.yaxis.type != "log" and layout.yaxis.range:
            panel.set_ylim(*layout.yaxis.range)
        if layout.yaxis.zeroline:
            panel.axhline(0, color=INK, linewidth=0.8, zorder=0.5)
        for line in layout.shapes:
            panel.axvline(line.x0, color=INK, linestyle=":", linewidth=0.8)
    return figure


def _views(chart: go.Figure) -> list[View]:
    """The views of a chart's traces; a single empty one without choices."""
    return list(dict.fromkeys(tuple(trace.meta.get("view", ())) for trace in chart.data if trace.meta))


def _trace(panel: Axes, trace: go.Scatter, look: Style | None) -> None:
    """Draw a trace as the page does; without a look it is a front."""
    if look is None:
        panel.plot(trace.x, trace.y, ":", color="#888888", drawstyle=STEPS[trace.line.shape])
    elif trace.fill:
        panel.fill(trace.x, trace.y, color=look.colour, alpha=0.18, linewidth=0)
    elif trace.yaxis == "y2":  # the diverged runs, above the panel
        heights = [1.06 + 0.06 * line for line in trace.y]
        panel.plot(trace.x, heights, "x", color=look.colour, clip_on=False, transform=panel.get_xaxis_transform())
    elif trace.error_y.array is not None:
        style = _style(look) | ({"linestyle": "", "markersize": 5} if trace.mode == "markers" else {})
        panel.errorbar(trace.x, trace.y, [trace.error_y.arrayminus, trace.error_y.array], elinewidth=0.8, **style)
    elif trace.mode == "markers":  # a ring
        panel.plot(trace.x, trace.y, "o", markersize=8, markerfacecolor="none", color=look.colour)
    elif trace.mode == "lines":  # of a law
        panel.plot(trace.x, trace.y, **_style(look) | {"marker": ""})
    else:  # a line with a few marks that distinguish arms of equal colour and dash
        panel.plot(trace.x, trace.y, **_style(look), alpha=trace.opacity, markevery=max(1, len(trace.x) // 8))


def _panels(
    titles: Sequence[str],
    x: str,
    y: str,
    columns: int = 1,
    height: float | None = None,
    looks: Mapping[str, Style] | None = None,
    with_lines: bool = True,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, and a legend below them."""
    rows = math.ceil(len(titles) / columns)
    names = list(_labels(looks or {}, LEGEND_LENGTH).values())
    across, lines = _legend_shape(names)
    height = height or (2.35 if rows == 1 else 0.2 + 1.5 * rows)
    figure = Figure(figsize=(WIDTH, height + LINE * lines), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if columns > 1 else False)
    panels = list(grid.flat)
    for panel in panels[len(titles) :]:
        panel.remove()
    for i, (panel, title) in enumerate(zip(panels, titles, strict=False)):
        panel.set_title(title)
        panel.set_xlabel(x if i + columns >= len(titles) else "")  # of the lowest in its column
        panel.set_ylabel("" if i % columns else y if rows == 1 and len(y) < LONG else y.replace(", ", ",\n"))
    if looks:
        style = {} if with_lines else {"linestyle": ""}
        handles = [Line2D([], [], **(_style(look) | style)) for look in looks.values()]
        figure.legend(handles, names, loc="outside lower center", ncols=across, columnspacing=1.2)
    return figure, panels[: len(titles)]


def _legend_shape(names: Sequence[str]) -> tuple[int, int]:
    """The columns of a legend that fit into the width, and its lines of text."""
    for across in range(min(len(names), 4), 0, -1):
        columns = [part.tolist() for part in np.array_split(np.array(names, dtype=object), across)]
        widths = [max(len(line) for name in column for line in name.split("\n")) for column in columns]
        if across == 1 or sum(CHARACTER * width + HANDLE for width in widths) <= WIDTH:
            return across, max(sum(1 + name.count("\n") for name in column) for column in columns)
    return 1, 0


def _labels(names: Iterable[str], length: int) -> dict[str, str]:
    """The label of each name; long ones omit shared settings and are broken into lines."""
    labels = {}
    for name, short in chart_axes.without_shared(names).items():
        lines = [""]
        for part in re.findall(rf"[^,+\s]{{1,{length}}}[,+\s]*|[,+\s]+", name if len(name) <= length else short):
            if lines[-1] and len(lines[-1] + part.rstrip()) > length:
                lines.append("")
            lines[-1] += part
        labels[name] = "\n".join(line.rstrip() for line in lines)
    return labels


def _style(look: Style) -> dict[str, Any]:
    return {"color": look.colour, "linestyle": LINES[look.dash], "marker": MARKS[look.symbol]}


def _tokens(axis: Axis) -> None:
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_major_locator(MaxNLocator(5))


def _powers(axis: Axis) -> None:
    axis.axes.set_xscale("log")
    axis.set_major_formatter(lambda value, _: fmt.short(value))
    axis.set_minor_formatter(lambda *_: "")


def _logarithmic(axis: Axis, ticks: Locator | None = None) -> None:
    axis.axes.set_yscale("log")
    axis.set_major_locator(ticks or MaxNLocator(5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _numbers(axis: Axis) -> None:
    axis.set_major_formatter(NUMBER)
    axis.set_major_locator(MaxNLocator(5))


def _octaves(axis: Axis, text: Callable[[float], str], values: Sequence[float] | None = None, most: int = 8) -> None:
    """Make an axis logarithmic, with at most `most` ticks at powers of two. values: to cover; default: the lines'."""
    name = axis.axis_name
    if values is None:
        values = np.concatenate([line.get_data()[name == "y"] for line in axis.axes.get_lines()]).tolist()
    ticks = chart_axes.octaves(values)
    axis.axes.set(**{f"{name}scale": "log"})
    _tick(axis, ticks[:: math.ceil(len(ticks) / most)], text)


def _tick(axis: Axis, values: Sequence[float], text: Callable[[float], str]) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())
