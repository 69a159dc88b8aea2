"""Charts of costs: the loss against what it takes, and the speed and memory of generation."""

import math
from collections.abc import Mapping

from plotly import graph_objects as go

from llama_lab.analysis.result import Result
from llama_lab.util import formatting as fmt

from .axes import axis_of, choose, new_chart, set_octaves, set_ticks
from .style import arm_styles
from .traces import Points, mean_points

KV_CACHE = {"used": "decode", "not used": "uncached"}  # parts of a Speed
Views = Mapping[tuple[str, ...], Mapping[str, Points]]  # the points of each arm, for each view of a chart


def kv_cache_front(result: Result) -> go.Figure:
    """Loss against the size of the KV cache per token; arms with 0 B are an octave left of the smallest other size."""
    sizes = [size for arm in result.arms if (size := arm.costs.get("kv_cache/bytes_per_token", 0)) > 0]
    zero = 2.0 ** (math.floor(math.log2(min(sizes))) - 1) if sizes else 1.0
    figure = _front(result, "kv_cache/bytes_per_token", False, "KV cache: %{customdata}", zero)
    figure.update_layout(title_text="Loss against KV cache", xaxis_title_text="KV-cache size per token, 16-bit")
    return set_octaves(figure, lambda size: fmt.in_bytes(size if size > zero else 0))


def throughput_front(result: Result) -> go.Figure:
    """Loss against training speed."""
    figure = _front(result, "perf/tokens_per_second", True, "%{x:,.0f} tokens per second")
    figure.update_layout(title_text="Loss against speed", xaxis_title_text="training speed, tokens per second")
    return figure.update_xaxes(nticks=6)


def _front(result: Result, cost: str, is_gain: bool, hover: str, zero: float = 0.0) -> go.Figure:
    """The loss of each arm over a cost or a gain, and a staircase through the arms on the front up to the edges.

    zero: where to draw arms with a cost of 0; default: nowhere.
    """
    styles, costs = arm_styles(result), {arm.name: arm.costs.get(cost, math.nan) for arm in result.arms}
    points = {
        arm.name: (costs[arm.name] or zero, loss)
        for arm in result.arms
        if (loss := arm.judged(result.metric)) and math.isfinite(loss.mean) and (costs[arm.name] or zero) > 0
    }
    corners = sorted((points[name][0], points[name][1].mean) for name in result.front(cost) if name in points)
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
        mean_points(name, styles[name], [point], f"{hover}<br>loss %{{text}}").update(
            mode="markers", customdata=[fmt.in_bytes(costs[name])]
        )
        for name, point in points.items()
    ]
    return new_chart([line, *arms], "", "", axis_of(result, result.metric), height=380)


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
    hover = "%{y:,.3~f} tokens per second at %{x:,}"
    figure = _over_context(result, found, "Decoding speed", "tokens per second", hover)
    figure.update_yaxes(rangemode="tozero", tickformat=",")
    return choose(figure, "Batch", "KV cache")


def cache_sizes(result: Result) -> go.Figure:
    """The measured bytes of one sequence's KV cache over context length, for each element type."""
    found: Views = {
        (dtype,): {
            arm.arm: [(cache.context, cache.measured) for cache in arm.caches if cache.dtype == dtype]
            for arm in result.inference
        }
        for dtype in dict.fromkeys(cache.dtype for arm in result.inference for cache in arm.caches)
    }
    hover = "%{customdata} at %{x:,} tokens"
    figure = _over_context(result, found, "KV cache of one sequence", "measured size", hover)
    for trace in figure.data:
        trace.customdata = [fmt.in_bytes(y) for y in trace.y]
    return choose(set_octaves(figure, fmt.in_bytes, "y"), "Elements")


def _over_context(result: Result, found: Views, title: str, y: str, hover: str) -> go.Figure:
    """The arms' means over context length, for each view."""
    styles = arm_styles(result)
    traces = [
        mean_points(arm, styles[arm], points, hover).update(meta={"arm": arm, "view": list(view)})
        for view, arms in found.items()
        for arm, points in arms.items()
    ]
    drawn = [trace for trace in traces if trace.x]
    figure = new_chart(drawn, title, "context, tokens", y, height=380)
    return set_ticks(figure, sorted({x for trace in drawn for x in trace.x}), fmt.number)
