"""The report's charts as figures for a paper, one column wide, with the same styles and order of arms."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from llama_lab import formatting as fmt
from llama_lab.study.statistics import Estimate, PairedDifference, term_name

from . import charts
from .charts import Row, Style
from .result import Curve, CurveMetric, DifferenceCurve, Result, Spread

WIDTH = 3.35  # inches, of a column in most two-column styles
DPI = 300
# By suffix, without dates, so that equal results give equal files.
METADATA: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}
TEXT = 8  # points
SMALL = 7
LINE = 0.15  # inches, height of a line of text
CHARACTER, HANDLE = 0.058, 0.43  # inches, width of a small character, and of a legend's handle with its spacing
LABEL_LENGTH, LEGEND_LENGTH = 24, 46  # characters per line

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
    "text.color": charts.INK,
    "text.parse_math": False,  # names of arms may contain dollar signs
    "axes.labelcolor": charts.INK,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": charts.GRID,
    "grid.linewidth": 0.5,
    "xtick.color": "#999999",
    "ytick.color": "#999999",
    "xtick.labelcolor": charts.INK,
    "ytick.labelcolor": charts.INK,
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

Found = tuple[float, Estimate | Spread]


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
    return _forest(charts.difference_rows(result, "previous"), result)


def differences(result: Result) -> Figure | None:
    """The differences to the baseline."""
    return _forest(charts.difference_rows(result, "baseline"), result)


def effects(result: Result) -> Figure | None:
    """Main effects and interactions."""
    return _forest(charts.effect_rows(result), result)


def interactions(result: Result) -> Figure | None:
    """The mean loss at each combination of two axes, with a line for each level of the second."""
    shown = charts.shown_interactions(result)
    if not shown:
        return None
    rows = math.ceil(len(shown) / 2)
    figure, panels = _panels(
        [""] * len(shown), "", charts.axis_of(result.metric), min(2, len(shown)), height=0.2 + 1.9 * rows
    )
    for panel, found in zip(panels, shown, strict=True):
        levels, names = found.levels
        for name, losses, colour, mark in zip(
            names, zip(*found.means, strict=True), (charts.INK, charts.WORSE), "os", strict=True
        ):
            panel.plot((0, 1), losses, color=colour, marker=mark, label=name)
        panel.set_xticks((0, 1), levels)
        panel.set_xlim(-0.3, 1.3)
        above: Any = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.2}
        panel.legend(title=term_name(found.axes), handlelength=1.2, **above)
    return figure


def difference_curves(result: Result) -> Figure | None:
    """Each difference over training, with simultaneous intervals of those that end furthest from zero."""
    found = [curve for curve in result.difference_curves if any(map(math.isfinite, curve.mean))]
    if not found:
        return None
    looks, wide = charts.curve_styles(result), charts.foremost_curves(result)
    y = charts.change_axis(result.metric).replace(", ", ",\n")
    figure, (panel,) = _panels([""], "tokens", y, looks={curve.name: looks[curve.name] for curve in found})
    for curve in found:
        if curve.name in wide:
            _band(panel, looks[curve.name], curve)
        _line(panel, looks[curve.name], curve.tokens, curve.mean)
    panel.axhline(0, color=charts.INK, linewidth=0.8, zorder=0.5)
    bands = [(c.tokens, [c.mean, *((c.low, c.high) if c.name in wide else ())]) for c in found]
    return _over_tokens(figure, panel, bands)


def validation_loss(result: Result) -> Figure | None:
    """Validation loss over training."""
    return _curves(result, result.metric)


def training_loss(result: Result) -> Figure | None:
    """Training loss over training."""
    return _curves(result, "train/loss")


def kv_cache_front(result: Result) -> Figure | None:
    """Loss against the size of the KV cache per token."""
    cost = "kv_cache/bytes_per_token"
    return _front(result, cost, result.front.kv_cache, False, "KV-cache size per token, 16-bit")


def speed_front(result: Result) -> Figure | None:
    """Loss against training speed."""
    cost = "perf/tokens_per_second"
    return _front(result, cost, result.front.throughput, True, "training speed, tokens per second")


def learning_rates(result: Result) -> Figure | None:
    """Final loss over learning rate, with a ring at the best one and crosses for diverged runs above."""
    sweeps = result.learning_rates
    found = {
        sweep.arm: _known((rate, loss) for rate, loss in zip(sweep.rates, sweep.loss, strict=True) if loss)
        for sweep in sweeps
    }
    if not any(found.values()):
        return None
    looks = charts.styles(result)
    y = charts.axis_of(result.metric)
    figure, (panel,) = _panels([""], "learning rate", y, looks=_looks_of(result, found))
    panel.set_xscale("log")
    for sweep in sweeps:
        look = looks[sweep.arm]
        _means(panel, look, found[sweep.arm])
        best = [(rate, loss.mean) for rate, loss in found[sweep.arm] if rate == sweep.best]
        for at in best:
            panel.plot(*at, marker="o", markersize=8, markerfacecolor="none", color=look.colour, linestyle="")
    diverged = [sweep for sweep in sweeps if any(sweep.diverged)]
    for line, sweep in enumerate(diverged):
        rates = [rate for rate, n in zip(sweep.rates, sweep.diverged, strict=True) if n]
        height = [1.06 + 0.06 * line] * len(rates)
        transform = panel.get_xaxis_transform()
        crosses: Any = {"marker": "x", "color": looks[sweep.arm].colour, "linestyle": "", "clip_on": False}
        panel.plot(rates, height, transform=transform, **crosses)
    if diverged:
        panel.text(0, 1.05, "diverged", transform=panel.transAxes, fontsize=SMALL)
    tried = sorted({rate for sweep in sweeps for rate in sweep.rates if math.isfinite(rate)})
    _tick(panel.xaxis, tried[:: math.ceil(len(tried) / 6)], fmt.learning_rate)
    return figure


def context_lengths(result: Result) -> Figure | None:
    """Loss over context length, in multiples of the trained length."""
    found = {
        arm.arm: _known((n / arm.trained, loss) for n, loss in zip(arm.lengths, arm.loss, strict=True) if loss)
        for arm in result.lengths
    }
    if not any(found.values()):
        return None
    x, y = "context length / trained length", charts.axis_of("val/loss")
    looks = _looks_of(result, found)
    figure, (panel,) = _panels([""], x, y, looks=looks)
    for arm, points in found.items():
        _means(panel, looks[arm], points)
    _octaves(panel, "x", [x for points in found.values() for x, _ in points], lambda ratio: f"{ratio:g}{fmt.TIMES}")
    panel.axvline(1, color=charts.INK, linestyle=":", linewidth=0.8)
    return figure


def positions(result: Result) -> Figure | None:
    """Loss by position for each evaluated context length, with a dotted line at the end of the trained context."""
    found = {
        length: {arm.arm: arm.by_position[length] for arm in result.lengths if length in arm.by_position}
        for length in sorted({length for arm in result.lengths for length in arm.by_position})
    }
    drawn = {arm for arms in found.values() for arm, (_, losses) in arms.items() if any(map(math.isfinite, losses))}
    if not drawn:
        return None
    titles = [f"{length:,} tokens" for length in found]
    looks = _looks_of(result, drawn)
    y = charts.axis_of("val/loss")
    figure, panels = _panels(titles, "position in the context", y, 2, looks=looks)
    trained = {arm.trained for arm in result.lengths}
    for panel, arms in zip(panels, found.values(), strict=True):
        for arm, (x, losses) in arms.items():
            _line(panel, looks[arm], x, losses)
        _octaves(panel, "x", [x for places, _ in arms.values() for x in places], fmt.number, most=4)
        for length in trained:
            panel.axvline(length, color=charts.INK, linestyle=":", linewidth=0.8)
    return figure


def decoding_speed(result: Result) -> Figure | None:
    """Tokens per second over context length, for each batch size, with and without the KV cache."""
    found: dict[str, dict[str, list[Found]]] = {}
    for batch_size in sorted({speed.batch_size for arm in result.inference for speed in arm.speeds}):
        for use, spread_of in charts.KV_CACHE.items():
            arms = {
                arm.arm: _known((s.context, spread_of(s)) for s in arm.speeds if s.batch_size == batch_size)
                for arm in result.inference
            }
            found[f"{fmt.count(batch_size, 'sequence')}\ncache {use}"] = arms
    return _over_context(result, found, "tokens per second", _from_zero)


def cache_sizes(result: Result) -> Figure | None:
    """The measured bytes of one sequence's KV cache over context length, for each element type."""
    dtypes = dict.fromkeys(cache.dtype for arm in result.inference for cache in arm.caches)
    found = {
        dtype: {
            arm.arm: _known((c.context, c.measured) for c in arm.caches if c.dtype == dtype) for arm in result.inference
        }
        for dtype in dtypes
    }
    sizes = [size.mean for arms in found.values() for points in arms.values() for _, size in points]
    return _over_context(
        result, found, "KV cache of one sequence", lambda panel: _octaves(panel, "y", sizes, fmt.in_bytes)
    )


INTERVALS = (
    "Bars: simultaneous 95% intervals. Filled: significant at 5% (max-t). Hollow: not. Arrow: the interval continues."
)
SEEDS = "Bars: 95% intervals over seeds."

# Each figure with its caption.
FIGURES: dict[Callable[[Result], Figure | None], str] = {
    steps: f"Change at each step: mean over seeds of the paired difference to the step before. {INTERVALS}",
    differences: f"Mean over seeds of the paired difference to the baseline. {INTERVALS}",
    effects: "Main effects, the change from one level of an axis to the other, averaged over all settings of the other "
    f"axes, and interactions, half the change of one effect when the other axis changes. {INTERVALS}",
    interactions: "Mean loss at each combination of the levels of two axes, averaged over the others.",
    difference_curves: "Difference over training, mean over seeds. Bands: simultaneous 95% intervals at each "
    f"evaluation, of the {charts.MOST_BANDS} that end furthest from zero.",
    validation_loss: "Validation loss, mean over seeds. Bands: from the lowest to the highest seed.",
    training_loss: "Training loss, mean over seeds. Bands: from the lowest to the highest seed.",
    kv_cache_front: f"Loss against KV-cache size. Dotted: the arms that no other one beats in both. {SEEDS}",
    speed_front: f"Loss against training speed. Dotted: the arms that no other one beats in both. {SEEDS}",
    learning_rates: f"Loss over learning rate. Rings: each arm's best. Crosses: rates at which runs diverged. {SEEDS}",
    context_lengths: f"Loss over context length. A line ends where the position encoding ends. {SEEDS}",
    positions: "Loss by position in the context, mean over seeds. Dotted: the end of the trained context.",
    decoding_speed: "Decoding speed at the end of a context, over all sequences of a batch. Bars: from the lowest to "
    "the highest seed.",
    cache_sizes: "Measured KV cache of one sequence over context length.",
}


# --- shared by figures ---


def _forest(rows: Sequence[Row], result: Result) -> Figure | None:
    """A point with its 95% interval per row, from top to bottom; hollow if not significant."""
    if not rows:
        return None
    labels = list(_labels([row.label for row in rows], LABEL_LENGTH).values())
    lines = [1 + label.count("\n") for label in labels]
    places = [sum(lines[:i]) + (own - 1) / 2 for i, own in enumerate(lines)]
    x = charts.change_axis(result.metric).replace(", ", ",\n")
    figure, (panel,) = _panels([""], x, "", height=0.5 + 1.1 * LINE * max(sum(lines), 3))
    least, most = charts.axis_range(rows)
    for y, row in zip(places, rows, strict=True):
        colour = charts.COLOUR_OF.get(row.found.verdict, charts.UNCLEAR)
        fill = colour if row.found.significant else "white"
        point = [row.found.mean], y
        panel.errorbar(*point, xerr=_bars([row.found]), fmt="o", color=colour, markerfacecolor=fill, markersize=4.5)
        for edge, mark, is_beyond in ((least, "<", row.ends[0] < least), (most, ">", row.ends[1] > most)):
            if is_beyond:
                panel.plot(edge, y, mark, color=colour, clip_on=False)
    space = 0.06 * (most - least) or 0.1
    panel.set_xlim(least - space, most + space)
    panel.axvline(0, color=charts.INK, linewidth=0.8, zorder=0.5)
    panel.set_yticks(places, labels)
    panel.set_ylim(sum(lines) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    return figure


def _curves(result: Result, metric: CurveMetric) -> Figure | None:
    """The mean over seeds, and a band from the lowest to the highest; the steep first fifth may be cut off."""
    found = [c for c in result.curves if c.metric == metric and any(map(math.isfinite, c.mean))]
    if not found:
        return None
    looks = _looks_of(result, {curve.arm for curve in found})
    figure, (panel,) = _panels([""], "tokens", charts.axis_of(metric), looks=looks)
    for curve in found:
        _band(panel, looks[curve.arm], curve)
        _line(panel, looks[curve.arm], curve.tokens, curve.mean)
    return _over_tokens(figure, panel, [(curve.tokens, [curve.mean, curve.low, curve.high]) for curve in found])


def _band(panel: Axes, look: Style, curve: Curve | DifferenceCurve) -> None:
    panel.fill_between(curve.tokens, curve.low, curve.high, color=look.colour, alpha=0.18, linewidth=0)


def _over_tokens(figure: Figure, panel: Axes, found: Sequence[tuple[list[float], list[list[float]]]]) -> Figure:
    """The figure with an axis of tokens, and a range of losses that covers all but the first fifth of training."""
    if late := charts.late_range(found):
        panel.set_ylim(*late)
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.xaxis.set_major_locator(MaxNLocator(5))
    return figure


def _front(result: Result, cost: str, front: Sequence[str], is_gain: bool, x: str) -> Figure | None:
    """The loss of each arm over a cost or a gain, and the front."""
    points = charts.front_points(result, cost)
    if not points:
        return None
    looks = _looks_of(result, points)
    figure, (panel,) = _panels([""], x, charts.axis_of(result.metric), looks=looks, with_lines=False)
    corners = charts.front_corners(points, front, is_gain)
    ends: Any = {"drawstyle": "steps-pre" if is_gain else "steps-post", "linestyle": ":", "color": "#888888"}
    panel.plot([x for x, _ in corners], [y for _, y in corners], **ends)
    for arm, point in points.items():
        _means(panel, looks[arm], [point], marks_only=True)
    if is_gain:
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.xaxis.set_major_formatter(lambda value, _: fmt.number(value))
    else:
        _octaves(panel, "x", [x for x, _ in points.values()], fmt.in_bytes)
    return figure


def _over_context(
    result: Result, found: Mapping[str, Mapping[str, list[Found]]], y: str, finish: Callable[[Axes], object]
) -> Figure | None:
    """A panel for each title, with each arm's means over context length."""
    found = {title: arms for title, arms in found.items() if any(arms.values())}
    drawn = {arm for arms in found.values() for arm, points in arms.items() if points}
    if not drawn:
        return None
    looks = _looks_of(result, drawn)
    figure, panels = _panels(list(found), "context, tokens", y, 2 if len(found) > 1 else 1, looks=looks)
    for panel, arms in zip(panels, found.values(), strict=True):
        for arm, points in arms.items():
            _means(panel, looks[arm], points)
        _octaves(panel, "x", [x for points in arms.values() for x, _ in points], fmt.number)
        finish(panel)
    return figure


def _from_zero(panel: Axes) -> None:
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(lambda value, _: fmt.number(value))


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
        panel.set_ylabel("" if i % columns else y if rows == 1 else y.replace(", ", ",\n"))
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


def _looks_of(result: Result, arms: Iterable[str]) -> dict[str, Style]:
    """The styles of these arms, in the report's order."""
    drawn, looks = set(arms), charts.styles(result)
    return {arm.name: looks[arm.name] for arm in result.arms if arm.name in drawn}


def _labels(names: Iterable[str], length: int) -> dict[str, str]:
    """The label of each name; long ones omit shared settings and are broken into lines."""
    names = list(names)
    shared = set.intersection(*(set(name.split(",")) for name in names)) if len(names) > 1 else set()
    labels = {}
    for name in names:
        short = ",".join(setting for setting in name.split(",") if setting not in shared) or name
        lines = [""]
        for part in re.findall(rf"[^,+\s]{{1,{length}}}[,+\s]*|[,+\s]+", name if len(name) <= length else short):
            if lines[-1] and len(lines[-1] + part.rstrip()) > length:
                lines.append("")
            lines[-1] += part
        labels[name] = "\n".join(line.rstrip() for line in lines)
    return labels


def _known(found: Iterable[tuple[float, Estimate | Spread | None]]) -> list[Found]:
    """The finite points, from left to right."""
    known = [(x, one) for x, one in found if one and math.isfinite(one.mean) and math.isfinite(x)]
    return sorted(known, key=lambda point: point[0])


def _style(look: Style) -> dict[str, Any]:
    return {"color": look.colour, "linestyle": LINES[look.dash], "marker": MARKS[look.symbol]}


def _line(panel: Axes, look: Style, x: Sequence[float], y: Sequence[float]) -> None:
    """An arm's line, with a few marks that distinguish arms of equal colour and dash."""
    panel.plot(x, y, **_style(look), markevery=max(1, len(x) // 8))


def _means(panel: Axes, look: Style, found: Sequence[Found], marks_only: bool = False) -> None:
    """An arm's means, each with a bar from low to high."""
    means = [one for _, one in found]
    style = _style(look) | ({"linestyle": "", "markersize": 5} if marks_only else {})
    panel.errorbar([x for x, _ in found], [one.mean for one in means], _bars(means), elinewidth=0.8, **style)


def _bars(found: Sequence[PairedDifference | Estimate | Spread]) -> list[list[float]]:
    """The lengths of error bars below and above each mean, zero without an interval."""
    down = [one.mean - one.low if math.isfinite(one.low) else 0.0 for one in found]
    up = [one.high - one.mean if math.isfinite(one.high) else 0.0 for one in found]
    return [down, up]


def _octaves(
    panel: Axes, which: Literal["x", "y"], values: Sequence[float], text: Callable[[float], str], most: int = 8
) -> None:
    """Make an axis logarithmic, with at most `most` ticks at powers of two."""
    panel.set(**{f"{which}scale": "log"})
    ticks = charts.octaves(values)
    _tick(panel.xaxis if which == "x" else panel.yaxis, ticks[:: math.ceil(len(ticks) / most)], text)


def _tick(axis: Axis, values: Sequence[float], text: Callable[[float], str]) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_locator(NullLocator())
