"""Charts of losses: over training, learning rates, context lengths and positions; and of layers over training."""

import math
from typing import Any

from plotly import graph_objects as go

from llama_lab.analysis.depth_profiles import LINEAR, names
from llama_lab.analysis.result import Curve, Result
from llama_lab.util import formatting as fmt

from .axes import BARE, LATE, LOSS, axis_of, choose, late_range, new_chart, set_octaves, set_ticks
from .style import INK, arm_styles
from .traces import arm_line, band, marks, mean_line, mean_points, ring, rounded


def curves(result: Result) -> go.Figure:
    """Loss over training: the mean of the seeds, and a band from the lowest to the highest."""
    styles = arm_styles(result)
    present = {metric: name for metric, name in LOSS.items() if any(c.metric == metric for c in result.curves)}
    first = next(iter(present), "val/loss")
    traces = []
    for curve in result.curves:
        points = [i for i, mean in enumerate(curve.mean) if math.isfinite(mean)]
        if any(curve.low[i] < curve.high[i] for i in points):  # seeds differ
            traces.append(band(curve.arm, styles[curve.arm], curve, points))
            traces[-1].update(meta=_over(curve, points + points[::-1]), visible=curve.metric == first)
        traces.append(mean_line(curve.arm, styles[curve.arm], curve, points, "%{y:.4f} at %{x:.3s}"))
        traces[-1].update(meta=_over(curve, points), visible=curve.metric == first)
    figure = new_chart(traces, "Loss over training", "tokens", axis_of(result, first), height=430)
    lines = [(c.metric, c.tokens, line) for c in result.curves for line in (c.mean, c.low, c.high)]
    late = {metric: late_range((tokens, line) for key, tokens, line in lines if key == metric) for metric in present}
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


def _over(curve: Curve, points: list[int]) -> dict[str, Any]:
    axes = {"tokens": curve.tokens, "training FLOPs": curve.flops, "seconds": curve.seconds}
    x = {name: [rounded(values[i]) for i in points] for name, values in axes.items()}
    return {"arm": curve.arm, "view": [LOSS[curve.metric]], "x": x}


def telemetry(result: Result) -> go.Figure:
    """What was logged of every layer, over depth: a line for each of some steps, the stronger the later."""
    styles = arm_styles(result)
    quantities = list(dict.fromkeys(quantity for arm in result.telemetry for quantity in arm.values))
    views = {quantity: names(quantity) for quantity in quantities}
    hover = "layer %{{x}}, {:,.0f} tokens: %{{y:.3~g}}"
    traces = [
        arm_line(arm.arm, styles[arm.arm], range(len(row)), map(rounded, row), hover.format(tokens)).update(
            meta={"arm": arm.arm, "view": views[quantity]},
            visible=views[quantity] == views[quantities[0]],
            opacity=(i + 1) / len(rows),
        )
        for arm in result.telemetry
        for quantity, rows in arm.values.items()
        for i, (tokens, row) in enumerate(zip(arm.tokens, rows, strict=True))
    ]
    titles, parts = (list(dict.fromkeys(view[i] for view in views.values() if len(view) > i)) for i in (0, 1))
    axes = {
        title: {"yaxis.title.text": title, "yaxis.type": "linear" if title in LINEAR else "log"} for title in titles
    }
    figure = new_chart(traces, "Layers over training", "layer, from the input", titles[0] if titles else "", height=430)
    figure.update_yaxes(type="log", nticks=8)
    figure.layout.meta = {"choices": {"Show": axes, "Of": {part: {} for part in parts}}}
    return figure


def learning_rates(result: Result) -> go.Figure:
    """Final loss over learning rate, with a ring at the best one and crosses for diverged runs in a strip above."""
    styles = arm_styles(result)
    traces = []
    for sweep in result.learning_rates:
        found = [(rate, loss) for rate, loss in zip(sweep.rates, sweep.loss, strict=True) if loss]
        traces.append(mean_points(sweep.arm, styles[sweep.arm], found, "learning rate %{x:.3g}: %{text}"))
        best = [loss.mean for rate, loss in found if rate == sweep.best]
        hover = "the best of %{fullData.name}"
        traces.append(ring(sweep.arm, styles[sweep.arm], [sweep.best] * len(best), best, hover))
    diverged = [sweep for sweep in result.learning_rates if any(sweep.diverged)]
    for line, sweep in enumerate(diverged):
        bad = [(rate, n) for rate, n in zip(sweep.rates, sweep.diverged, strict=True) if n]
        cross = {"symbol": "x-thin", "size": 8, "line": {"width": 2.5, "color": styles[sweep.arm].colour}}
        crosses = marks(sweep.arm, [rate for rate, _ in bad], [line] * len(bad), cross, "%{fullData.name}: %{text}")
        traces.append(crosses.update(text=[f"{fmt.count(n, 'run')} diverged" for _, n in bad], yaxis="y2"))
    figure = new_chart(traces, "Loss over learning rate", "learning rate", axis_of(result, result.metric), height=400)
    strip = min(0.4, 0.05 * (len(diverged) + 1)) if diverged else 0
    figure.update_layout(yaxis_domain=[0, 1 - strip])
    if diverged:
        title = {"text": "diverged", "font": {"size": 11}}
        lines = {"domain": [1 - strip + 0.02, 1], "range": [-0.8, len(diverged) - 0.2]}
        figure.update_layout(yaxis2={**BARE, **lines, "title": title})
    rates = sorted({rate for sweep in result.learning_rates for rate in sweep.rates if math.isfinite(rate)})
    return set_ticks(figure, rates, fmt.learning_rate)


def context_lengths(result: Result) -> go.Figure:
    """Loss over context length, in multiples of the trained length."""
    styles = arm_styles(result)
    traces = []
    for arm in result.lengths:
        found = [(length / arm.trained, loss) for length, loss in arm.loss.items()]
        hover = f"%{{x:.3g}}{fmt.TIMES} the trained length: %{{text}}"
        traces.append(mean_points(arm.arm, styles[arm.arm], found, hover))
    axis = "context length / trained length"
    figure = new_chart(traces, "Loss over context length", axis, axis_of(result, "val/loss"), height=380)
    ratios = sorted({length / arm.trained for arm in result.lengths for length in arm.loss})
    return _mark_trained(set_ticks(figure, ratios, lambda ratio: f"{ratio:.3g}{fmt.TIMES}"), {1})


def positions(result: Result) -> go.Figure:
    """Loss by position in the context, for each evaluated context length."""
    styles = arm_styles(result)
    lengths = sorted({length for arm in result.lengths for length in arm.by_position}, reverse=True)
    traces = [
        arm_line(arm.arm, styles[arm.arm], *arm.by_position[length], "position %{x:.0f}: %{y:.4f}").update(
            meta={"arm": arm.arm, "view": [f"{length:,} tokens"]}
        )
        for length in lengths
        for arm in result.lengths
        if length in arm.by_position
    ]
    figure = new_chart(traces, "Loss by position", "position in the context", axis_of(result, "val/loss"), 380)
    choose(figure, "Context")
    return _mark_trained(set_octaves(figure, fmt.number), {arm.trained for arm in result.lengths})


def _mark_trained(figure: go.Figure, lengths: set[int]) -> go.Figure:
    """Mark the ends of the trained contexts by vertical lines."""
    for length in sorted(lengths):
        figure.add_vline(x=length, line={"color": INK, "width": 1, "dash": "dot"})
        above = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
        figure.add_annotation(above, x=math.log10(length), xref="x", text="trained")
    return figure
