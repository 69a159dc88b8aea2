"""Charts of costs: the loss against what it takes, and the speed and memory of generation."""

import math
from collections.abc import Callable, Iterable

from llama_lab.analysis.result import Result
from llama_lab.util import formatting as fmt
from llama_lab.util.chart import BARS, LINE, POINTS, Row, Spec, axis, octaves, ticked

from .base import SEEDS, Chart, axis_of, choose, mean_rows
from .style import arm_styles

KV_CACHE = {"used": "decode", "not used": "uncached"}  # parts of a Speed


def kv_cache_front(result: Result) -> Chart:
    """Loss against `cache_cost`; arms with 0 B are an octave left of the smallest other size."""
    cost, what = cache_cost(result)
    noun, bits = ("KV cache and state", "16-bit cache") if result.has_states else ("KV cache", "16-bit")
    sizes = [size for arm in result.arms if (size := arm.costs.get(cost, 0)) > 0]
    zero = 2.0 ** (math.floor(math.log2(min(sizes))) - 1) if sizes else 1.0

    def text(size: float) -> str:
        return fmt.in_bytes(size if size > zero else 0)

    def x(drawn: Iterable[float]) -> Spec:
        return octaves("x", f"{what}, {bits}", drawn, text)

    return _front(result, cost, f"Loss against {noun}", what, x, lambda size: f"{noun}: {text(size)}", zero=zero)


def cache_cost(result: Result) -> tuple[str, str]:
    """The cost by which arms' caches are compared, and what it is: of a full context where states are part of it."""
    if not result.has_states:
        return "kv_cache/bytes_per_token", "KV-cache size per token"
    contexts = sorted({arm.costs["seq_len"] for arm in result.arms if "seq_len" in arm.costs})
    return "kv_cache/bytes", f"size of KV cache and state at {' or '.join(map(fmt.number, contexts))} tokens"


def throughput_front(result: Result) -> Chart:
    """Loss against training speed."""
    x = axis("x", "training speed, tokens per second", ",.3~f")

    def text(speed: float) -> str:
        return f"{fmt.number(speed)} tokens per second"

    what = "training speed"
    return _front(result, "perf/tokens_per_second", "Loss against speed", what, lambda _: x, text, is_gain=True)


def _front(
    result: Result,
    cost: str,
    title: str,
    what: str,
    x: Callable[[Iterable[float]], Spec],
    text: Callable[[float], str],
    is_gain: bool = False,
    zero: float = 0.0,
) -> Chart:
    """The loss of each arm over a cost or a gain, and a staircase through the arms on the front up to the edges.

    what: the cost, in words. x: the axis of these costs. text: of a cost. zero: where to draw arms with a cost of 0;
    default: nowhere.
    """
    costs = {arm.name: arm.costs.get(cost, math.nan) or zero for arm in result.arms}
    means = ((arm.name, mean_rows([(costs[arm.name], arm.judged(result.metric))], arm=arm.name)) for arm in result.arms)
    drawn = {name: row for name, found in means for row in found if costs[name] > 0}
    for row in drawn.values():
        row["text"] = f"{text(row['x'])}\nloss {row['text']}"
    points = {name: (row["x"], row["y"]) for name, row in drawn.items()}
    corners = sorted(points[name] for name in result.front(cost) if name in points)
    if corners:
        (left, first), (right, last) = corners[0], corners[-1]
        xs, worst = [x for x, _ in points.values()], max(y for _, y in points.values())
        start, end = ((min(xs), first), (right, worst)) if is_gain else ((left, worst), (max(xs), last))
        corners = [start, *corners, end]
    front: Spec = {
        "data": {"values": [{"x": x, "y": y, "place": place} for place, (x, y) in enumerate(corners)]},
        "mark": {"type": "line", "interpolate": "step-before" if is_gain else "step-after", "style": "front"},
        "encoding": {"color": None, "order": {"field": "place"}},
    }
    axes = {"x": x(row["x"] for row in drawn.values()), "y": axis("y", axis_of(result, result.metric))}
    caption = (
        f"Dotted: the arms that no other one beats in both mean loss and {what}, regardless of their intervals, with "
        f"means over the seeds that all arms have finished. {SEEDS}"
    )
    return Chart(title, [*drawn.values()], [front, BARS, POINTS], axes, styles=arm_styles(result), caption=caption)


def decoding_speeds(result: Result) -> Chart:
    """Tokens per second over context length, for each batch size, with and without the KV cache."""
    found = list[Row]()
    for batch_size in sorted({speed.batch_size for arm in result.inference for speed in arm.speeds}):
        for use, part in KV_CACHE.items():
            for arm in result.inference:
                means = [(one.context, getattr(one, part)) for one in arm.speeds if one.batch_size == batch_size]
                found += mean_rows(means, arm=arm.arm, view=[fmt.count(batch_size, "sequence"), use])
    y = axis("y", "tokens per second", ",.3~f", zero=True, padding=0, nice=True)
    tip = "format(datum.y, ',.3~f') + ' tokens per second'"
    caption = "At the end of a context, over all sequences of a batch. Bars: from the lowest to the highest seed."
    return _over_context(result, found, "Decoding speed", y, tip, caption, "Batch", "KV cache")


def cache_sizes(result: Result) -> Chart:
    """The measured bytes of one sequence's KV cache over context length, for each element type."""
    found = list[Row]()
    for dtype in dict.fromkeys(cache.dtype for arm in result.inference for cache in arm.caches):
        for arm in result.inference:
            means = [(cache.context, cache.measured) for cache in arm.caches if cache.dtype == dtype]
            found += mean_rows(means, arm=arm.arm, view=[dtype])
    for row in found:
        row["text"] = fmt.in_bytes(row["y"])
    y = octaves("y", "measured size", (row["y"] for row in found), fmt.in_bytes)
    caption = "The size of the cache's tensors during generation; a sliding window's cache is at most its length."
    return _over_context(result, found, "KV cache of one sequence", y, "datum.text", caption, "Elements")


def _over_context(result: Result, found: list[Row], title: str, y: Spec, tip: str, caption: str, *groups: str) -> Chart:
    """The arms' means over context length."""
    axes = {"x": ticked("x", "context, tokens", (row["x"] for row in found), fmt.number), "y": y}
    tip, choices = f"{tip} + ' at ' + format(datum.x, ',')", choose(found, *groups)
    return Chart(title, found, [LINE, BARS, POINTS], axes, tip, arm_styles(result), choices, caption=caption)
