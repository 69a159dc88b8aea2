"""The report's charts as figures for a paper, one column wide: Matplotlib writes PDF without a browser."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator
from plotly import graph_objects as go

from llama_lab.analysis.depth_profiles import PARTS, TITLES
from llama_lab.analysis.result import Finding, Result
from llama_lab.analysis.statistics import term_name
from llama_lab.util import formatting as fmt

from .charts import axes as chart_axes
from .charts import compute, costs, training
from .charts import differences as difference_charts
from .charts import style as chart_style
from .charts.style import INK, Style, arm_styles, curve_styles, cycle_styles, option_styles

WIDTH = 3.35  # inches, of a column in most two-column styles
DPI = 300
# By suffix, without dates, so that equal results give equal files.
METADATA: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
TEXT = 8  # points
SMALL = 7
LINE = 0.15  # inches, height of a line of text
CHARACTER, HANDLE = 0.058, 0.43  # inches, width of a small character, and of a legend's handle with its spacing
LABEL_LENGTH, LEGEND_LENGTH, LONG = 24, 46, 40  # characters per line
MOST_TICKS = 6  # along the width of the figure

RC: Any = {
    **dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize", "figure.labelsize"), TEXT),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize", "legend.title_fontsize"), SMALL),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#999999"),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "text.parse_math": False,  # names of arms may contain dollar signs
    "legend.handlelength": 2.4,
    "axes.linewidth": 0.6,
    "grid.color": chart_style.GRID,
    "grid.linewidth": 0.5,
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
STEPS: Any = {"hv": "steps-post", "vh": "steps-pre"}

View = tuple[str, ...]  # what is chosen in each group of a chart's choices


def write_figures(result: Result, folder: Path) -> None:
    """Write every figure that the result has data for, in each format, and captions.md."""
    captions = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own style
        matplotlib.rcParams.update(RC)
        for name, (draw, caption) in FIGURES.items():
            if figure := draw(result):
                captions.append(f"**{name}** {caption}\n")
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # the layout is computed once for all formats
                for suffix, metadata in METADATA.items():
                    figure.savefig(folder / f"{name}{suffix}", metadata=metadata)
    (folder / "captions.md").write_text("\n".join(captions), encoding="utf-8")


# --- the figures of which the page has no chart that can be drawn as it is ---


def _forest(find: Callable[[Result], Sequence[Finding]], result: Result) -> Figure | None:
    """A point with its 95% interval per row, from top to bottom; hollow if not significant."""
    rows = find(result)
    if not rows:
        return None
    labels = list(_labels([row.name for row in rows], LABEL_LENGTH).values())
    lines = [1 + label.count("\n") for label in labels]
    places = [sum(lines[:i]) + (own - 1) / 2 for i, own in enumerate(lines)]
    x = chart_axes.change_axis(result).replace(", ", ",\n")
    figure, (panel,) = _panels([""], x, "", height=0.5 + 1.1 * LINE * max(sum(lines), 3))
    least, most = difference_charts.axis_range(rows)
    for y, found in zip(places, (row.change for row in rows), strict=True):
        colour = chart_style.COLOUR_OF.get(found.verdict, chart_style.UNCLEAR)
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


def _interactions(result: Result) -> Figure | None:
    """The mean loss at each combination of two axes, with a line for each level of the second."""
    shown = difference_charts.shown_interactions(result)
    if not shown:
        return None
    y, columns = chart_axes.axis_of(result, result.metric), min(2, len(shown))
    figure, panels = _panels([""] * len(shown), "", y, columns, height=0.2 + 1.9 * math.ceil(len(shown) / 2))
    for panel, found in zip(panels, shown, strict=True):
        levels, names = found.levels
        styles = cycle_styles(names)
        for name, losses in zip(names, zip(*found.means, strict=True), strict=True):
            panel.plot(range(len(levels)), losses, label=name, **_matplotlib(styles[name]) | {"linestyle": "-"})
        panel.set_xticks(range(len(levels)), levels)
        panel.set_xlim(-0.3, len(levels) - 0.7)
        above: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
        panel.legend(title=term_name(found.axes), handlelength=1.2, **above)
    return figure


# --- charts of the page, as a figure shows them ---


def _difference_curves(result: Result) -> go.Figure:
    """With simultaneous intervals of those that end furthest from zero."""
    chart, wide = difference_charts.difference_curves(result), chart_style.foremost_curves(result)
    chart.data = [trace for trace in chart.data if not trace.fill or trace.meta["arm"] in wide]
    return chart


def _curves(name: str, result: Result) -> go.Figure:
    """One loss over training; the steep first fifth may be cut off."""
    chart = training.curves(result)
    chart.update_layout(chart.layout.meta["choices"]["Loss"].get(name, {}))
    return _only(chart, name)


def _layer_gradients(result: Result) -> go.Figure:
    """Of attention and feed-forwards."""
    chart = _only(training.telemetry(result), TITLES["grad_norm"])
    chart.data = [trace for trace in chart.data if PARTS["block"] not in trace.meta["view"]]
    return chart


def _only(chart: go.Figure, option: str) -> go.Figure:
    """The chart with one option of its first choice, which its views then do not name."""
    chart.data = [trace for trace in chart.data if trace.meta["view"][0] == option]
    for trace in chart.data:
        trace.meta = {**trace.meta, "view": trace.meta["view"][1:]}
    return chart


def _cache_sizes(result: Result) -> go.Figure:
    return costs.cache_sizes(result).update_yaxes(title_text="KV cache of one sequence")


# --- how a chart is drawn ---


def _draw(
    make: Callable[[Result], go.Figure],
    result: Result,
    title: Callable[[View], str] = "\n".join,
    styles: Callable[[Result], Mapping[str, Style]] = arm_styles,
) -> Figure | None:
    """Draw a chart of the page, with a panel for each of its views; None without points. styles: of its lines."""
    chart = make(result)
    found: dict[View, list[go.Scatter]] = {tuple(t.meta.get("view", ())): [] for t in chart.data if t.meta}
    for trace, (view, shown) in product(chart.data, found.items()):
        if any(map(fmt.known, trace.y)) and (not trace.meta or tuple(trace.meta.get("view", ())) == view):
            shown.append(trace)
    named = [trace for shown in found.values() for trace in shown if trace.meta]
    if not named:
        return None
    layout, names = chart.layout, {trace.meta["arm"] for trace in named}
    drawn_styles = {name: style for name, style in styles(result).items() if name in names}
    bare = {} if any("lines" in trace.mode for trace in named) else {"linestyle": ""}
    legend = {name: _matplotlib(style) | bare for name, style in drawn_styles.items()}
    labels, columns = (layout.xaxis.title.text, layout.yaxis.title.text), min(2, len(found))
    figure, panels = _panels([*map(title, found)], *labels, columns, legend=legend)
    for panel, shown in zip(panels, found.values(), strict=True):
        for trace in shown:
            _trace(panel, trace, drawn_styles[trace.meta["arm"]] if trace.meta else None)
        xs = sorted({x for trace in shown if trace.meta and not trace.fill for x in trace.x})
        _scale(panel, "x", layout.xaxis, xs, MOST_TICKS // columns + (columns > 1))
        _scale(panel, "y", layout.yaxis, [], MOST_TICKS)
        if layout.yaxis.rangemode == "tozero":
            panel.set_ylim(bottom=0)
        if layout.yaxis.type != "log" and layout.yaxis.range:
            panel.set_ylim(*layout.yaxis.range)
        if layout.yaxis.zeroline:
            panel.axhline(0, color=INK, linewidth=0.8, zorder=0.5)
        if "yaxis2" in layout:  # the strip of diverged runs
            panel.text(0, 1.05, layout.yaxis2.title.text, transform=panel.transAxes, fontsize=SMALL)
        for line in (shape for shape in layout.shapes if shape.x0 == shape.x1):
            panel.axvline(line.x0, color=INK, linestyle=":", linewidth=0.8)
    return figure


def _scale(panel: Axes, name: str, wanted: Any, values: Sequence[float], most: int) -> None:
    """Scale an axis as the page's, with its ticks, at most `most` of them.

    wanted: the axis in the page's layout. values: those to tick where a logarithmic x axis has no ticks of its own.
    """
    axis = panel.xaxis if name == "x" else panel.yaxis
    if wanted.type != "log":
        if name == "x" or wanted.tickformat:
            is_si = wanted.exponentformat == "SI"
            axis.set_major_formatter(EngFormatter(sep="") if is_si else lambda value, _: fmt.number(value))
            axis.set_major_locator(MaxNLocator(5 if is_si else most, integer=not is_si))
        return
    panel.set(**{f"{name}scale": "log"})
    axis.set_minor_formatter(lambda *_: "")
    if wanted.exponentformat == "power":
        axis.set_major_formatter(lambda value, _: fmt.short(value))
    elif name == "y" and not wanted.tickvals:
        low, high = axis.get_view_interval()
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]) if high < 10 * low else LogLocator(subs=(1, 3)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(LogLocator(subs=()))
    else:
        texts = dict(zip(wanted.tickvals or values, wanted.ticktext or map(fmt.short, values), strict=True))
        ticks = [*texts][:: math.ceil(len(texts) / most)]
        axis.set_ticks(ticks, [texts[tick] for tick in ticks])
        axis.set_ticks([], minor=True)


def _trace(panel: Axes, trace: go.Scatter, style: Style | None) -> None:
    """Draw a trace as the page does; without a style it is a front."""
    if style is None:
        panel.plot(trace.x, trace.y, ":", color="#888888", drawstyle=STEPS[trace.line.shape])
    elif trace.fill:
        panel.fill(trace.x, trace.y, color=style.colour, alpha=0.18, linewidth=0)
    elif trace.yaxis == "y2":  # the diverged runs, above the panel
        heights = [1.06 + 0.06 * line for line in trace.y]
        panel.plot(trace.x, heights, "x", color=style.colour, clip_on=False, transform=panel.get_xaxis_transform())
    elif trace.error_y.array is not None:
        drawn = _matplotlib(style) | ({"linestyle": "", "markersize": 5} if trace.mode == "markers" else {})
        panel.errorbar(trace.x, trace.y, [trace.error_y.arrayminus, trace.error_y.array], elinewidth=0.8, **drawn)
    elif trace.mode == "markers":  # a ring
        panel.plot(trace.x, trace.y, "o", markersize=8, markerfacecolor="none", color=style.colour)
    elif trace.mode == "lines":  # of a law
        panel.plot(trace.x, trace.y, **_matplotlib(style) | {"marker": ""})
    else:  # a line with a few marks that distinguish arms of equal colour and dash
        panel.plot(trace.x, trace.y, **_matplotlib(style), alpha=trace.opacity, markevery=max(1, len(trace.x) // 8))


def _panels(
    titles: Sequence[str], x: str, y: str, columns: int = 1, height: float = 0, legend: Mapping[str, Any] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, and below them a legend of lines, by name."""
    rows = math.ceil(len(titles) / columns)
    names = list(_labels(legend or {}, LEGEND_LENGTH).values())
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
    if legend:
        handles = [Line2D([], [], **style) for style in legend.values()]
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


def _matplotlib(style: Style) -> dict[str, Any]:
    return {"color": style.colour, "linestyle": LINES[style.dash], "marker": MARKS[style.symbol]}


INTERVALS = "Bars: simultaneous 95% intervals. Filled: significant at 5%. Hollow: not. Arrow: the interval continues."
SEEDS = "Bars: 95% intervals over seeds."
BEATEN = f"Dotted: the arms that no other one beats in both. {SEEDS}"
RANGE = "mean over seeds. Bands: from the lowest to the highest seed."

# Each figure, None without anything to draw, and its caption.
FIGURES: dict[str, tuple[Callable[[Result], Figure | None], str]] = {
    "steps": (
        partial(_forest, partial(difference_charts.difference_rows, against="previous")),
        f"Change at each step: mean over seeds of the paired difference to the step before, or to the arm's reference. "
        f"{INTERVALS}",
    ),
    "differences": (
        partial(_forest, partial(difference_charts.difference_rows, against="baseline")),
        f"Mean over seeds of the paired difference to the baseline. {INTERVALS}",
    ),
    "effects": (
        partial(_forest, difference_charts.effect_rows),
        "Main effects, the change from the first level of an axis to another, averaged over all settings of the other "
        f"axes, and interactions, half the change of one effect when the other axis changes. {INTERVALS}",
    ),
    "interactions": (
        _interactions,
        "Mean loss at each combination of the levels of two axes, averaged over the others.",
    ),
    "difference_curves": (
        partial(_draw, _difference_curves, styles=curve_styles),
        "Difference over training, mean over seeds. Bands: simultaneous 95% intervals at each evaluation, of the "
        f"{chart_style.MOST_BANDS} that end furthest from zero.",
    ),
    "validation_loss": (partial(_draw, partial(_curves, chart_axes.LOSS["val/loss"])), f"Validation loss, {RANGE}"),
    "training_loss": (partial(_draw, partial(_curves, chart_axes.LOSS["train/loss"])), f"Training loss, {RANGE}"),
    "layer_gradients": (
        partial(_draw, _layer_gradients),
        "Norm of the gradient over depth, mean over seeds, at four logged steps, the first the faintest.",
    ),
    "kv_cache_front": (partial(_draw, costs.kv_cache_front), f"Loss against KV-cache size. {BEATEN}"),
    "speed_front": (partial(_draw, costs.throughput_front), f"Loss against training speed. {BEATEN}"),
    "scaling": (
        partial(_draw, compute.losses, styles=option_styles),
        "Loss over compute. Points: mean over seeds, with 95% intervals. Lines and bands: the law along the sizes of "
        "each budget, with its 95% interval.",
    ),
    "gains": (
        partial(_draw, compute.gains, styles=option_styles),
        "Compute-equivalent gain over the reference. Points: by the differences at one size and budget. Line: the laws "
        "of both. With 95% intervals.",
    ),
    "iso_flop": (
        partial(_draw, compute.iso_flop, styles=option_styles),
        "Loss at equal compute, by the law, with 95% intervals. Rings: the best size.",
    ),
    "learning_rates": (
        partial(_draw, training.learning_rates),
        f"Loss over learning rate. Rings: each arm's best. Crosses: rates at which runs diverged. {SEEDS}",
    ),
    "context_lengths": (
        partial(_draw, training.context_lengths),
        f"Loss over context length. A line ends where the position encoding ends. {SEEDS}",
    ),
    "positions": (
        partial(_draw, training.positions),
        "Loss by position in the context, mean over seeds. Dotted: the end of the trained context.",
    ),
    "decoding_speed": (
        partial(_draw, costs.decoding_speeds, title="\ncache ".join),
        "Decoding speed at the end of a context, over all sequences of a batch. Bars: from the lowest to the highest "
        "seed.",
    ),
    "cache_sizes": (partial(_draw, _cache_sizes), "Measured KV cache of one sequence over context length."),
}
