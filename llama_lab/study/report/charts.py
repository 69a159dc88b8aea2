"""The report's charts, one function each: from a Result to a Plotly figure.

A figure has no legend: the page adds one of buttons, which wrap on a phone and can be reached by keyboard. For it, each
trace of an arm has `meta`: `arm`, its name; `view`, the options that must all be chosen for it to be visible, if the
figure has several; `x`, its x values for each choice of the axis. The layout's `meta["choices"]` holds the options by
group, each with its changes to the layout; the figure opens with the first option of each group.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import compress
from typing import Any, Literal

import pandas as pd
from plotly import graph_objects as go
from plotly.subplots import make_subplots

from llama_lab import formatting as fmt
from llama_lab.study.statistics import Estimate, PairedDifference, estimate, term_name

from .result import Curve, DifferenceCurve, Finding, Interaction, Result, Spread, unit_of
from .scaling import Line, iso_flop_lines, law_lines
from .telemetry import LINEAR, names

# Okabe and Ito's colours, which colour-blind readers can distinguish, without yellow, which is invisible on white.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
BETTER, WORSE, UNCLEAR, INK, GRID = "#0072B2", "#D55E00", "#767676", "#222222", "#E4E4E4"
COLOUR_OF = {"lower": BETTER, "higher": WORSE}  # by verdict

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
AXIS = {"gridcolor": GRID, "zeroline": False, "linecolor": "#999999", "ticks": "outside", "tickcolor": "#999999"}
AXIS |= {"automargin": True}
BARE = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False, "zeroline": False}
BARE |= {"fixedrange": True}
ZERO = {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1.5, "zerolinelayer": "below traces"}
LATE: dict[str, Any] = {  # ranges of the loss axis of curves
    "without the first fifth": {},
    "from the start": {"yaxis.range": None, "yaxis.autorange": True},
}
TITLE = {"font": {"size": 15}, "x": 0, "xref": "container", "y": 1, "yref": "container", "yanchor": "top"}
TITLE |= {"pad": {"t": 12}}

ROW_HEIGHT, LOW_ROW_HEIGHT, MOST_HIGH_ROWS = 44, 32, 8
SQUEEZED = 5.0  # an interval so many times longer than the next one is cut off at the axis's end
MOST_LINES = 6  # that a chart opens with
MOST_BANDS = 4
MOST_PANELS = 6
LABEL_LENGTH = 34  # characters, for the width of a phone
KV_CACHE = {"used": "decode", "not used": "uncached"}  # parts of a Speed
Points = Iterable[tuple[float, Estimate | Spread | None]]
Views = Mapping[tuple[str, ...], Mapping[str, Points]]  # the points of each arm, for each view of a chart
LOSS = {"val/loss": "validation loss", "val/bits_per_byte": "validation loss", "train/loss": "training loss"}


@dataclass(frozen=True)
class Style:
    """The style of an arm, the same in every chart."""

    colour: str
    dash: str
    symbol: str


def styles(result: Result) -> dict[str, Style]:
    """A style for each arm, solid black for the baseline; the cycles' lengths are coprime, so 210 are distinct."""
    return _styles(sorted((arm.name for arm in result.arms), key=lambda name: name != result.study.baseline))


def curve_styles(result: Result) -> dict[str, Style]:
    """The style of each curve of differences: its arm's, or one for each effect."""
    looks = styles(result)
    effects = _styles([curve.name for curve in result.difference_curves if not curve.against])
    return {curve.name: (looks if curve.against else effects)[curve.name] for curve in result.difference_curves}


def _styles(names: Sequence[str]) -> dict[str, Style]:
    cycles = (COLOURS, DASHES, SYMBOLS)
    return {name: Style(*(cycle[i % len(cycle)] for cycle in cycles)) for i, name in enumerate(names)}


def foremost(result: Result) -> set[str]:
    """The arms that a chart of lines opens with: all, or, of many, the baseline and those that differ most."""
    if len(result.arms) <= MOST_LINES + 2:
        return {arm.name for arm in result.arms}
    changes = pd.Series({arm.name: c.change.mean for arm in result.arms if (c := arm.comparison)}, dtype=float)
    return {result.study.baseline, *changes.abs().dropna().nlargest(MOST_LINES - 1).index}


def foremost_curves(result: Result) -> set[str]:
    """The curves of differences that are visible at first: those that end furthest from zero."""
    ends = pd.Series({curve.name: curve.mean[-1] for curve in result.difference_curves}, dtype=float)
    return set(ends.abs().dropna().nlargest(MOST_BANDS).index)


def axis_of(result: Result, metric: str) -> str:
    """The title of a loss's axis."""
    return f"{LOSS[metric]}, {unit_of(result.arms, metric)}"


def change_axis(result: Result) -> str:
    """The title of an axis of differences."""
    return f"change of validation loss, {result.unit}"


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
        error_x=_bars(means, ends, INK),
        mode="markers",
        marker={"size": 11, "color": fills, "line": {"width": 2, "color": colours}, "symbol": symbols},
        text=[escape(in_words(row)) for row in rows],
        hovertemplate="%{text}<extra></extra>",
    )
    shared = set.intersection(*(set(row.name.split(",")) for row in rows)) if rows else set()
    height = ROW_HEIGHT if len(rows) <= MOST_HIGH_ROWS else LOW_ROW_HEIGHT
    lift = {"x": 0, "xref": "paper", "xanchor": "left", "yshift": height / 3 + 3, "showarrow": False}
    lift |= {"bgcolor": "rgba(255,255,255,0.8)"}
    labels = [{**lift, "text": _label(row, shared, least), "y": i} for i, row in enumerate(rows)]
    right = {**lift, "x": 1, "xanchor": "right", "bgcolor": "rgba(0,0,0,0)"}
    beyond = [(i, one) for i, one in enumerate(found) if one.ends[1] > most]
    labels += [{**right, "text": f"{_end(one, one.ends[1], one.mean > most)} \u25b6", "y": i} for i, one in beyond]
    figure = _figure([points], title, axis, None, height=90 + height * max(len(rows), 2))
    figure.update_layout(annotations=labels)
    space = 0.06 * (most - least) or 0.1
    figure.update_xaxes(ZERO, range=[least - space, most + space], nticks=6)
    # From top to bottom, with space for the first label.
    figure.update_yaxes(BARE, range=[len(rows) - 0.5, -0.9])
    return figure


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
    looks, first = curve_styles(result), foremost_curves(result)
    traces = []
    for curve in result.difference_curves:
        points = [i for i, mean in enumerate(curve.mean) if math.isfinite(mean)]
        tested = [i for i in points if math.isfinite(curve.low[i])]
        if tested:
            traces.append(_band(curve.name, looks[curve.name], curve, tested))
        traces.append(_mean(curve.name, looks[curve.name], curve, points))
        shown = [fmt.with_interval(curve.mean[i], curve.low[i], curve.high[i], is_difference=True) for i in points]
        hover = "%{fullData.name}<br>%{customdata} at %{x:.3s}<extra></extra>"
        traces[-1].update(customdata=shown, hovertemplate=hover)
    figure = _figure(traces, "Difference over training", "tokens", change_axis(result), height=430)
    figure.update_xaxes(exponentformat="SI", nticks=7)
    # Covers lines and bands of the curves visible at first, and the lines of the others.
    bounds = [(curve.tokens, curve.mean) for curve in result.difference_curves]
    bounds += [(c.tokens, end) for c in result.difference_curves if c.name in first for end in (c.low, c.high)]
    figure.update_yaxes(ZERO, range=_late_range(bounds))
    figure.layout.meta = {"choices": {"Show": LATE}}
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
    return _dress(figure, "Interactions: mean loss at each combination", 70 + 200 * rows).update_layout(margin_t=76)


def shown_interactions(result: Result) -> list[Interaction]:
    """The largest interactions, at most MOST_PANELS, in the result's order."""
    largest = sorted(result.interactions, key=lambda found: -found.size)[:MOST_PANELS]
    return [found for found in result.interactions if found in largest]


def curves(result: Result) -> go.Figure:
    """Loss over training: the mean of the seeds, and a band from the lowest to the highest."""
    looks = styles(result)
    present = {metric: name for metric, name in LOSS.items() if any(c.metric == metric for c in result.curves)}
    first = next(iter(present), "val/loss")
    traces = []
    for curve in result.curves:
        points = [i for i, mean in enumerate(curve.mean) if math.isfinite(mean)]
        if any(curve.low[i] < curve.high[i] for i in points):  # seeds differ
            traces.append(_band(curve.arm, looks[curve.arm], curve, points))
            traces[-1].update(meta=_over(curve, points + points[::-1]), visible=curve.metric == first)
        traces.append(_mean(curve.arm, looks[curve.arm], curve, points))
        hover = "%{fullData.name}<br>%{y:.4f} at %{x:.3s}<extra></extra>"
        traces[-1].update(meta=_over(curve, points), hovertemplate=hover, visible=curve.metric == first)
    figure = _figure(traces, "Loss over training", "tokens", axis_of(result, first), height=430)
    lines = [(c.metric, c.tokens, line) for c in result.curves for line in (c.mean, c.low, c.high)]
    late = {metric: _late_range((tokens, line) for key, tokens, line in lines if key == metric) for metric in present}
    figure.update_xaxes(exponentformat="SI", nticks=7)
    figure.update_yaxes(range=late.get(first))
    losses = {
        name: {"yaxis.range": late[metric], "yaxis.title.text": axis_of(result, metric)}
        for metric, name in present.items()
    }
    axes = {"tokens": "tokens", "training FLOPs": "training FLOPs", "seconds": "seconds of training"}
    figure.layout.meta = {
        "choices": {
            "Loss": losses,
            "Over": {name: {"xaxis.title.text": title} for name, title in axes.items()},
            "Show": LATE,
        }
    }
    return figure


def kv_cache_front(result: Result) -> go.Figure:
    """Loss against the size of the KV cache per token; arms with 0 B are at the left edge."""
    front, zero = result.front.kv_cache, _zero_bytes(result)
    figure = _front(result, "kv_cache/bytes_per_token", front, False, "KV cache: %{customdata}", zero)
    figure.update_layout(title_text="Loss against KV cache", xaxis_title_text="KV-cache size per token, 16-bit")
    return _octaves(figure, cache_size_text(result))


def _zero_bytes(result: Result) -> float:
    """Where the logarithmic axis of KV-cache sizes has 0 B: an octave below the smallest other size."""
    sizes = [size for arm in result.arms if (size := arm.costs.get("kv_cache/bytes_per_token", 0)) > 0]
    return 2.0 ** (math.floor(math.log2(min(sizes))) - 1) if sizes else 1.0


def cache_size_text(result: Result) -> Callable[[float], str]:
    """The text of a tick of the axis of KV-cache sizes."""
    zero = _zero_bytes(result)
    return lambda size: fmt.in_bytes(size if size > zero else 0)


def throughput_front(result: Result) -> go.Figure:
    """Loss against training speed."""
    figure = _front(result, "perf/tokens_per_second", result.front.throughput, True, "%{x:,.0f} tokens per second")
    figure.update_layout(title_text="Loss against speed", xaxis_title_text="training speed, tokens per second")
    return figure.update_xaxes(nticks=6)


def decoding_speeds(result: Result) -> go.Figure:
    """Tokens per second over context length, for each batch size, with and without the KV cache."""
    batch_sizes = sorted({speed.batch_size for arm in result.inference for speed in arm.speeds})
    found: Views = {
        (fmt.count(batch_size, "sequence"), use): {
            arm.arm: [(speed.context, getattr(speed, part)) for speed in arm.speeds if speed.batch_size == batch_size]
            for arm in result.inference
        }
        for batch_size in batch_sizes
        for use, part in KV_CACHE.items()
    }
    figure = _over_context(result, found, "Decoding speed", "tokens per second")
    figure.update_traces(hovertemplate="%{fullData.name}<br>%{y:,.3~f} tokens per second at %{x:,}<extra></extra>")
    figure.update_yaxes(rangemode="tozero", tickformat=",")
    return _choose(figure, "Batch", "KV cache")


def cache_sizes(result: Result) -> go.Figure:
    """The measured bytes of one sequence's KV cache over context length, for each element type."""
    found: Views = {
        (dtype,): {
            arm.arm: [(cache.context, cache.measured) for cache in arm.caches if cache.dtype == dtype]
            for arm in result.inference
        }
        for dtype in dict.fromkeys(cache.dtype for arm in result.inference for cache in arm.caches)
    }
    figure = _over_context(result, found, "KV cache of one sequence", "measured size")
    figure.update_traces(hovertemplate="%{fullData.name}<br>%{customdata} at %{x:,} tokens<extra></extra>")
    for trace in figure.data:
        trace.customdata = [fmt.in_bytes(y) for y in trace.y]
    return _choose(_octaves(figure, fmt.in_bytes, "y"), "Elements")


def learning_rates(result: Result) -> go.Figure:
    """Final loss over learning rate, with a ring at the best one and crosses for diverged runs in a strip above."""
    looks = styles(result)
    traces = []
    for sweep in result.learning_rates:
        found = [(rate, loss) for rate, loss in zip(sweep.rates, sweep.loss, strict=True) if loss]
        traces.append(_means(sweep.arm, looks[sweep.arm], found))
        traces[-1].update(hovertemplate="%{fullData.name}<br>learning rate %{x:.3g}: %{text}<extra></extra>")
        best = [loss.mean for rate, loss in found if rate == sweep.best]
        ring = {"symbol": "circle-open", "size": 19, "color": looks[sweep.arm].colour, "line": {"width": 2}}
        traces.append(_marks(sweep.arm, [sweep.best] * len(best), best, ring, "the best of %{fullData.name}"))
    diverged = [sweep for sweep in result.learning_rates if any(sweep.diverged)]
    for line, sweep in enumerate(diverged):
        bad = [(rate, n) for rate, n in zip(sweep.rates, sweep.diverged, strict=True) if n]
        cross = {"symbol": "x-thin", "size": 8, "line": {"width": 2.5, "color": looks[sweep.arm].colour}}
        marks = _marks(sweep.arm, [rate for rate, _ in bad], [line] * len(bad), cross, "%{fullData.name}: %{text}")
        traces.append(marks.update(text=[f"{fmt.count(n, 'run')} diverged" for _, n in bad], yaxis="y2"))
    figure = _figure(traces, "Loss over learning rate", "learning rate", axis_of(result, result.metric), height=400)
    strip = min(0.4, 0.05 * (len(diverged) + 1)) if diverged else 0
    figure.update_layout(yaxis_domain=[0, 1 - strip])
    if diverged:
        title = {"text": "diverged", "font": {"size": 11}}
        lines = {"domain": [1 - strip + 0.02, 1], "range": [-0.8, len(diverged) - 0.2]}
        figure.update_layout(yaxis2={**BARE, **lines, "title": title})
    rates = sorted({rate for sweep in result.learning_rates for rate in sweep.rates if math.isfinite(rate)})
    return _ticks(figure, rates, fmt.learning_rate)


def context_lengths(result: Result) -> go.Figure:
    """Loss over context length, in multiples of the trained length."""
    looks = styles(result)
    traces = []
    for arm in result.lengths:
        found = [(length / arm.trained, loss) for length, loss in zip(arm.lengths, arm.loss, strict=True)]
        hover = f"%{{fullData.name}}<br>%{{x:.3g}}{fmt.TIMES} the trained length: %{{text}}<extra></extra>"
        traces.append(_means(arm.arm, looks[arm.arm], found).update(hovertemplate=hover))
    axis = "context length / trained length"
    figure = _figure(traces, "Loss over context length", axis, axis_of(result, "val/loss"), height=380)
    ratios = sorted({length / arm.trained for arm in result.lengths for length in arm.lengths})
    return _mark_trained(_ticks(figure, ratios, lambda ratio: f"{ratio:.3g}{fmt.TIMES}"), {1})


def positions(result: Result) -> go.Figure:
    """Loss by position in the context, for each evaluated context length."""
    looks = styles(result)
    lengths = sorted({length for arm in result.lengths for length in arm.by_position}, reverse=True)
    traces = [
        _line(arm.arm, looks[arm.arm], *arm.by_position[length]).update(
            meta={"arm": arm.arm, "view": [f"{length:,} tokens"]},
            hovertemplate="%{fullData.name}<br>position %{x:.0f}: %{y:.4f}<extra></extra>",
        )
        for length in lengths
        for arm in result.lengths
        if length in arm.by_position
    ]
    figure = _figure(traces, "Loss by position", "position in the context", axis_of(result, "val/loss"), 380)
    _choose(figure, "Context")
    return _mark_trained(_octaves(figure, fmt.number), {arm.trained for arm in result.lengths})


def scaling_losses(result: Result) -> go.Figure:
    """Loss over training FLOPs, with each option's law along the sizes of every budget."""
    looks = option_styles(result)
    traces = []
    for option in result.scaling.options if result.scaling else ():
        for line in law_lines(option):
            traces += _law(option.option, looks[option.option], line)
        points = ((point.flops, estimate(list(point.losses.values()))) for point in option.points)
        hover = "%{fullData.name}<br>%{text} at %{x:.3s}FLOPs<extra></extra>"
        traces.append(_means(option.option, looks[option.option], points).update(mode="markers", hovertemplate=hover))
    figure = _figure(traces, "Loss over compute", "training FLOPs", axis_of(result, result.metric), height=460)
    figure.update_xaxes(type="log", exponentformat="power")
    return figure.update_yaxes(type="log", nticks=8)


def iso_flop(result: Result) -> go.Figure:
    """The loss by each option's law over parameters, at some amounts of compute, with a ring where it is lowest."""
    looks, options = option_styles(result), result.scaling.options if result.scaling else ()
    traces = []
    for option in options:
        for flops, line in iso_flop_lines(option, options[0]):
            best = min(range(len(line.mean)), key=line.mean.__getitem__)
            ring = {"symbol": "circle-open", "size": 19, "color": looks[option.option].colour, "line": {"width": 2}}
            hover = "%{fullData.name}<br>lowest at %{x:.3s} parameters: %{y:.4f}"
            own = _law(option.option, looks[option.option], line)
            if 0 < best < len(line.mean) - 1:
                own.append(_marks(option.option, [line.x[best]], [line.mean[best]], ring, hover))
            traces += [one.update(meta={"arm": option.option, "view": [f"{fmt.short(flops)}FLOPs"]}) for one in own]
    figure = _figure(traces, "Loss at equal compute", "parameters", axis_of(result, result.metric), height=400)
    figure.update_xaxes(type="log", exponentformat="power")
    return _choose(figure, "Compute")


def gains(result: Result) -> go.Figure:
    """The compute-equivalent gain of each option over the reference, over training FLOPs, with the joint fit."""
    scaling, looks = result.scaling, option_styles(result)
    traces = []
    for option in scaling.options if scaling else ():
        if option.gains:
            at = sorted(
                compress(range(len(option.gains.cells)), option.gains.inside), key=option.gains.flops.__getitem__
            )
            flops = [option.gains.flops[i] for i in at]
            ends = ([getattr(option.gains.line[i], end) for i in at] for end in ("mean", "low", "high"))
            own = _law(option.option, looks[option.option], Line(flops, *ends))
            found = ((option.gains.flops[i], option.gains.points[i]) for i in at)
            points = _means(option.option, looks[option.option], found)
            hover = "%{fullData.name}<br>%{text} at %{x:.3s}FLOPs<extra></extra>"
            traces += [*own, points.update(mode="markers", hovertemplate=hover)]
    title = f"gain over {scaling.options[0].option}" if scaling else ""
    figure = _figure(traces, "Compute-equivalent gain", "training FLOPs", title, height=400)
    figure.add_hline(y=1, line={"color": INK, "width": 1.5}, layer="below")
    figure.update_xaxes(type="log", exponentformat="power")
    return figure.update_yaxes(type="log", nticks=8)


def option_styles(result: Result) -> dict[str, Style]:
    """A style for each option of a scaling study."""
    return _styles([option.option for option in result.scaling.options] if result.scaling else [])


def _law(name: str, style: Style, line: Line) -> list[go.Scatter]:
    """A fitted line with its band."""
    band = _area(name, style, line.x, line.low, line.high, opacity=0.15)
    return [band, _line(name, style, line.x, map(_round, line.mean)).update(mode="lines", line={"width": 1.5})]


def telemetry(result: Result) -> go.Figure:
    """What was logged of every layer, over depth: a line for each of some steps, the stronger the later."""
    looks = styles(result)
    quantities = list(dict.fromkeys(quantity for arm in result.telemetry for quantity in arm.values))
    views = {quantity: names(quantity) for quantity in quantities}
    traces = [
        _line(arm.arm, looks[arm.arm], range(len(row)), map(_round, row)).update(
            meta={"arm": arm.arm, "view": views[quantity]},
            visible=views[quantity] == views[quantities[0]],
            opacity=(i + 1) / len(rows),
            hovertemplate=f"%{{fullData.name}}<br>layer %{{x}}, {tokens:,.0f} tokens: %{{y:.3~g}}<extra></extra>",
        )
        for arm in result.telemetry
        for quantity, rows in arm.values.items()
        for i, (tokens, row) in enumerate(zip(arm.tokens, rows, strict=True))
    ]
    titles, parts = (list(dict.fromkeys(view[i] for view in views.values() if len(view) > i)) for i in (0, 1))
    axes = {
        title: {"yaxis.title.text": title, "yaxis.type": "linear" if title in LINEAR else "log"} for title in titles
    }
    figure = _figure(traces, "Layers over training", "layer, from the input", titles[0] if titles else "", height=430)
    figure.update_yaxes(type="log", nticks=8)
    figure.layout.meta = {"choices": {"Show": axes, "Of": {part: {} for part in parts}}}
    return figure


def _figure(traces: list[Any], title: str, x: str, y: str | None, height: int) -> go.Figure:
    return _dress(go.Figure(traces), title, height).update_layout(
        xaxis={**AXIS, "title": {"text": x, "standoff": 8}},
        yaxis={**AXIS, "title": {"text": y, "standoff": 8}},
    )


def _dress(figure: go.Figure, title: str, height: int) -> go.Figure:
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


def _label(row: Finding, shared: set[str], least: float) -> str:
    """The row's name and verdict, and its left end if that is beyond the edge.

    A long name omits the shared settings; its end, which is usually distinctive, is never cut off.
    """
    name, found, tail = row.name, row.change, LABEL_LENGTH // 3
    if len(name) > LABEL_LENGTH:
        name = ",".join(setting for setting in name.split(",") if setting not in shared) or name
    if len(name) > LABEL_LENGTH:
        name = f"{name[: LABEL_LENGTH - tail - 1]}…{name[-tail:]}"
    end = f"\u25c0 {_end(found, found.ends[0], found.mean < least)} " if found.ends[0] < least else ""
    note = "" if found.significant else f" <span style='color:{UNCLEAR}'>{found.verdict}</span>"
    return f"{end}{escape(name)}{note}"


def _end(found: PairedDifference, end: float, is_all: bool) -> str:
    """The end of an interval beyond the edge, or mean and interval if the mean is beyond it, too."""
    return found.text if is_all else fmt.signed(end, fmt.decimals(*found.ends))


def _interaction(found: Interaction) -> list[go.Scatter]:
    """A line for each level of the second axis over those of the first, labelled at its end."""
    ends = found.means[-1]
    highest = max(range(len(ends)), key=lambda j: (ends[j], j))
    looks = _styles(found.levels[1])
    return [
        go.Scatter(
            x=[escape(level) for level in found.levels[0]],
            y=list(means),
            text=[*[""] * (len(means) - 1), escape(level)],
            mode="lines+markers+text",
            textposition="top right" if j == highest else "bottom right",
            cliponaxis=False,
            line={"color": looks[level].colour, "dash": looks[level].dash, "width": 2},
            marker={"symbol": looks[level].symbol, "size": 8},
            hovertemplate=f"%{{x}}, {escape(level)}: %{{y:.4f}}<extra></extra>",
        )
        for j, (level, means) in enumerate(zip(found.levels[1], zip(*found.means, strict=True), strict=True))
    ]


def _mean(arm: str, style: Style, curve: Curve | DifferenceCurve, points: list[int]) -> go.Scatter:
    return _line(arm, style, [curve.tokens[i] for i in points], [_round(curve.mean[i]) for i in points])


def _band(arm: str, style: Style, curve: Curve | DifferenceCurve, points: list[int]) -> go.Scatter:
    x, low, high = ([values[i] for i in points] for values in (curve.tokens, curve.low, curve.high))
    return _area(arm, style, x, low, high, opacity=0.18)


def _area(
    name: str, style: Style, x: Sequence[float], low: Sequence[float], high: Sequence[float], opacity: float
) -> go.Scatter:
    """The area between two lines over `x`."""
    return go.Scatter(
        x=[*x, *reversed(x)],
        y=[_round(y) for y in (*low, *reversed(high))],
        fill="toself",
        fillcolor=style.colour,
        opacity=opacity,
        mode="none",
        hoverinfo="skip",
        meta={"arm": name},
    )


def _over(curve: Curve, points: list[int]) -> dict[str, Any]:
    axes = {"tokens": curve.tokens, "training FLOPs": curve.flops, "seconds": curve.seconds}
    x = {name: [_round(values[i]) for i in points] for name, values in axes.items()}
    return {"arm": curve.arm, "view": [LOSS[curve.metric]], "x": x}


def _late_range(found: Iterable[tuple[list[float], list[float]]]) -> list[float] | None:
    """The range of the values after the first fifth of training, which would flatten the rest; None without any.

    found: the tokens and the values of each line.
    """
    points = [(at / max(tokens), value) for tokens, line in found for at, value in zip(tokens, line, strict=True)]
    late = [value for share, value in points if share >= 0.2 and math.isfinite(value)]
    if not late:
        return None
    space = 0.05 * (max(late) - min(late)) or 0.1
    return [min(late) - space, max(late) + space]


def _front(
    result: Result, cost: str, front: tuple[str, ...], is_gain: bool, hover: str, zero: float = 0.0
) -> go.Figure:
    """The loss of each arm over a cost or a gain, and a staircase through the arms on the front up to the edges.

    zero: where to draw arms with a cost of 0; default: nowhere.
    """
    looks, costs = styles(result), {arm.name: arm.costs.get(cost, math.nan) for arm in result.arms}
    points = {
        arm.name: (costs[arm.name] or zero, loss)
        for arm in result.arms
        if (loss := arm.judged(result.metric)) and math.isfinite(loss.mean) and (costs[arm.name] or zero) > 0
    }
    corners = sorted((points[name][0], points[name][1].mean) for name in front if name in points)
    if corners:
        (left, first), (right, last) = corners[0], corners[-1]
        worst = max(loss.mean for _, loss in points.values())
        least, most = min(x for x, _ in points.values()), max(x for x, _ in points.values())
        start, end = ((least, first), (right, worst)) if is_gain else ((left, worst), (most, last))
        corners = [start, *corners, end]
    line = go.Scatter(
        x=[x for x, _ in corners],
        y=[y for _, y in corners],
        mode="lines",
        line={"color": "#888888", "width": 1.5, "dash": "dot", "shape": "vh" if is_gain else "hv"},
        hoverinfo="skip",
    )
    arms = [
        _means(name, looks[name], [point]).update(
            mode="markers",
            customdata=[fmt.in_bytes(costs[name])],
            hovertemplate=f"%{{fullData.name}}<br>{hover}<br>loss %{{text}}<extra></extra>",
        )
        for name, point in points.items()
    ]
    return _figure([line, *arms], "", "", axis_of(result, result.metric), height=380)


def _line(arm: str, style: Style, x: Iterable[float], y: Iterable[float]) -> go.Scatter:
    """An arm's line, with a few markers that distinguish arms of equal colour and dash."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        name=escape(arm),
        mode="lines+markers",
        line={"color": style.colour, "dash": style.dash, "width": 2},
        marker={"symbol": style.symbol, "color": style.colour, "size": 7, "maxdisplayed": 8},
        meta={"arm": arm},
    )


def _over_context(result: Result, found: Views, title: str, y: str) -> go.Figure:
    """The arms' means over context length, for each view."""
    looks = styles(result)
    traces = [
        _means(arm, looks[arm], points).update(meta={"arm": arm, "view": list(view)})
        for view, arms in found.items()
        for arm, points in arms.items()
    ]
    drawn = [trace for trace in traces if trace.x]
    figure = _figure(drawn, title, "context, tokens", y, height=380)
    return _ticks(figure, sorted({x for trace in drawn for x in trace.x}), fmt.number)


def _means(arm: str, style: Style, found: Points) -> go.Scatter:
    """An arm's means, each with a bar from low to high, which has no length without an interval."""
    points = sorted(((x, one) for x, one in found if one and math.isfinite(one.mean)), key=lambda point: point[0])
    means = [one.mean for _, one in points]
    ends = [(one.low, one.high) if math.isfinite(one.high - one.low) else (one.mean, one.mean) for _, one in points]
    return _line(arm, style, [x for x, _ in points], means).update(
        error_y=_bars(means, ends, style.colour),
        marker={"size": 9, "maxdisplayed": 0},
        text=[fmt.with_interval(one.mean, one.low, one.high) for _, one in points],
    )


def _bars(means: list[float], ends: list[tuple[float, float]], colour: str) -> dict[str, Any]:
    up = [high - mean for (_, high), mean in zip(ends, means, strict=True)]
    down = [mean - low for (low, _), mean in zip(ends, means, strict=True)]
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5, "width": 4}
    return {**bars, "color": colour}


def _marks(arm: str, x: list[float], y: list[float], marker: dict[str, Any], hover: str) -> go.Scatter:
    trace = go.Scatter(x=x, y=y, name=escape(arm), mode="markers", marker=marker, meta={"arm": arm})
    return trace.update(hovertemplate=f"{hover}<extra></extra>")


def _choose(figure: go.Figure, *groups: str) -> go.Figure:
    """Add choices among the views of the traces, with an option per group; the first trace's view is shown first."""
    views = [trace.meta["view"] for trace in figure.data]
    for trace, view in zip(figure.data, views, strict=True):
        trace.visible = view == views[0]
    options = zip(groups, zip(*views, strict=True), strict=False)  # without a trace, there are no options
    figure.layout.meta = {"choices": {group: {option: {} for option in found} for group, found in options}}
    return figure


def _ticks(figure: go.Figure, values: list[float], text: Callable[[float], str], axis: str = "x") -> go.Figure:
    """Make an axis logarithmic, with a tick at each of these values if they are few."""
    figure.layout[f"{axis}axis"].type = "log"
    if values and len(values) <= 7:
        figure.layout[f"{axis}axis"].update(tickvals=values, ticktext=[text(value) for value in values])
    return figure


def octaves(values: Iterable[float]) -> list[float]:
    """At most eight powers of two, evenly spaced from the lowest of these values to the highest."""
    logs = [math.log2(value) for value in values]
    lowest, highest = math.floor(min(logs)), math.ceil(max(logs))
    return [2.0**power for power in range(lowest, highest + 1, max(1, (highest - lowest) // 4))]


def _octaves(figure: go.Figure, text: Callable[[float], str], axis: str = "x") -> go.Figure:
    """Make an axis logarithmic, with ticks at powers of two."""
    found = [value for trace in figure.data for value in trace[axis] or () if math.isfinite(value) and value > 0]
    if not found:
        return figure
    figure = _ticks(figure, octaves(found), text, axis)
    figure.layout[f"{axis}axis"].range = [math.log10(min(found)) - 0.15, math.log10(max(found)) + 0.15]
    return figure


def _mark_trained(figure: go.Figure, lengths: set[int]) -> go.Figure:
    """Mark the ends of the trained contexts by vertical lines."""
    for length in sorted(lengths):
        figure.add_vline(x=length, line={"color": INK, "width": 1, "dash": "dot"})
        above = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
        figure.add_annotation(above, x=math.log10(length), xref="x", text="trained")
    return figure


def _round(value: float) -> float:
    """Six significant digits, more than a screen resolves, make the file three times smaller."""
    return float(f"{value:.6g}")
