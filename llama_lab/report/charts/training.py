"""Charts of losses: over training, learning rates, context lengths and positions; and of layers over training."""

from collections.abc import Iterable

from llama_lab.analysis.depth_profiles import LINEAR, names
from llama_lab.analysis.result import Result
from llama_lab.util import formatting as fmt
from llama_lab.util.chart import (
    BAND,
    BARS,
    LINE,
    MARKS,
    POINTS,
    RING,
    Row,
    Spec,
    axis,
    log_axis,
    octaves,
    rows,
    rule,
    ticked,
)

from .base import LATE, LOSS, SEEDS, Chart, axis_of, choose, late_range, mean_rows
from .style import arm_styles

CROSS = "M-1-1L1 1M-1 1L1-1"
STRIP = 10  # pixels between the lines of diverged runs above a chart
CURVE = [BAND, LINE, MARKS]
MEANS = [LINE, BARS, POINTS]
OVER = {  # field and title of an axis
    "tokens": ("x", "tokens"),
    "training FLOPs": ("flops", "training FLOPs"),
    "seconds": ("seconds", "seconds of training"),
}


def curves(result: Result) -> Chart:
    """Loss over training: the mean of the seeds, and a band from the lowest to the highest."""
    found = list[Row]()
    for curve in result.curves:
        columns = {"x": curve.tokens, "flops": curve.flops, "seconds": curve.seconds, "y": curve.mean}
        if any(low < high for low, high in zip(curve.low, curve.high, strict=True)):  # seeds differ
            columns |= {"low": curve.low, "high": curve.high}
        found += rows(columns, arm=curve.arm, view=[LOSS[curve.metric]])
    lines = [(c.metric, c.tokens, line) for c in result.curves for line in (c.mean, c.low, c.high)]
    losses: dict[str, Spec] = {}
    for metric in dict.fromkeys(curve.metric for curve in result.curves):
        scale = late_range((tokens, line) for key, tokens, line in lines if key == metric)
        losses[LOSS[metric]] = {"y": {"title": axis_of(result, metric), "scale": scale}}
    over = {name: {"x": {"field": field, "title": title}} for name, (field, title) in OVER.items()}
    y = axis("y", None) | next(iter(losses.values()), {"y": {}})["y"]
    axes = {"x": axis("x", "tokens", "~s", padding=0), "y": y}
    tip = "format(datum.y, '.4f') + ' at ' + format(datum.x, '.3s') + ' tokens'"
    choices = {"Loss": losses, "Over": over, "Show": LATE}
    title, caption = "Loss over training", "Lines: mean over seeds. Bands: from the lowest to the highest seed."
    return Chart(title, found, CURVE, axes, tip, arm_styles(result), choices, height=350, caption=caption)


def telemetry(result: Result) -> Chart:
    """What was logged of every layer, over depth: a line for each of some steps, the stronger the later."""
    found = list[Row]()
    for arm in result.telemetry:
        for quantity, lines in arm.values.items():
            for i, (tokens, line) in enumerate(zip(arm.tokens, lines, strict=True)):
                common = {"view": names(quantity), "tokens": tokens, "share": (i + 1) / len(lines)}
                found += rows({"x": range(len(line)), "y": line}, arm=arm.arm, **common)
    titles = dict.fromkeys(row["view"][0] for row in found)
    scales = {one: axis("y", one) if one in LINEAR else log_axis("y", one, ".3~g") for one in titles}
    x = axis("x", "layer, from the input")
    axes = {
        "x": x | {"axis": {"tickMinStep": 1, "format": "d"}},
        "y": next(iter(scales.values()), {}),
        "opacity": {"field": "share", "type": "quantitative", "scale": None, "legend": None},
        "detail": {"field": "tokens"},
    }
    tip = "'layer ' + datum.x + ', ' + format(datum.tokens, ',.0f') + ' tokens: ' + format(datum.y, '.3~g')"
    parts = (row["view"][1] for row in found if len(row["view"]) > 1)
    choices = {"Show": {title: {"y": scale} for title, scale in scales.items()}, "Of": dict.fromkeys(parts, Spec())}
    title = "Layers over training"
    caption = (
        "Means over seeds; faint: the first logged step, strong: the last, two in between. Gradients are those before "
        "clipping, updates those of the optimizer step. Activations are what blocks (the residual stream), attention "
        "and feed-forwards return, without dropout."
    )
    return Chart(title, found, [LINE, MARKS], axes, tip, arm_styles(result), choices, height=350, caption=caption)


def learning_rates(result: Result) -> Chart:
    """Final loss over learning rate, with a ring at the best one and crosses for diverged runs in a strip above."""
    found = list[Row]()
    for sweep in result.learning_rates:
        means = mean_rows(zip(sweep.rates, sweep.loss, strict=True), arm=sweep.arm)
        found += [{**row, "ring": row["x"] == sweep.best} for row in means]
    diverged = [sweep for sweep in result.learning_rates if any(sweep.diverged)]
    crosses = [
        {"arm": sweep.arm, "x": rate, "strip": line, "text": f"{fmt.count(n, 'run')} diverged"}
        for line, sweep in enumerate(diverged)
        for rate, n in zip(sweep.rates, sweep.diverged, strict=True)
        if n
    ]
    above = {"value": {"expr": f"-{STRIP} * (datum.strip + 1)"}}
    cross: Spec = {
        "mark": {"type": "point", "style": "cross", "shape": CROSS},
        "transform": [{"filter": "isValid(datum.strip)"}],
        "encoding": {"y": above, "tooltip": {"value": {"expr": "datum.text"}}},
    }
    note: Spec = {
        "data": {"values": [{}]},
        "mark": {"type": "text", "style": "note", "align": "left", "text": "diverged:"},
        "encoding": {"x": {"value": 0}, "y": {"value": -STRIP * (len(diverged) + 0.8)}, "color": None},
    }
    x = ticked("x", "learning rate", (row["x"] for row in found + crosses), fmt.learning_rate)
    axes = {"x": x, "y": axis("y", axis_of(result, "val/loss"))}
    layers = [*MEANS, RING, *([cross, note] if diverged else [])]
    tip = "'learning rate ' + datum.x + ': ' + datum.text"
    title, caption = "Loss over learning rate", f"Rings: each arm's best. Crosses above: runs that diverged. {SEEDS}"
    return Chart(title, found + crosses, layers, axes, tip, arm_styles(result), caption=caption)


def context_lengths(result: Result) -> Chart:
    """Loss over context length, in multiples of the trained length."""
    found = list[Row]()
    for arm in result.lengths:
        found += mean_rows(((length / arm.trained, loss) for length, loss in arm.loss.items()), arm=arm.arm)

    def text(ratio: float) -> str:
        return f"{ratio:.3g}{fmt.TIMES}"

    x = ticked("x", "context length / trained length", (row["x"] for row in found), text)
    axes = {"x": x, "y": axis("y", axis_of(result, "val/loss"))}
    tip = f"format(datum.x, '.3~g') + '{fmt.TIMES} the trained length: ' + datum.text"
    title, layers = "Loss over context length", [*MEANS, *_trained({1})]
    caption = f"A line ends where the arm's position encoding ends. {SEEDS}"
    return Chart(title, found, layers, axes, tip, arm_styles(result), caption=caption)


def positions(result: Result) -> Chart:
    """Loss by position in the context, for each evaluated context length."""
    found = list[Row]()
    for length in sorted({length for arm in result.lengths for length in arm.by_position}, reverse=True):
        for arm in result.lengths:
            if length in arm.by_position:
                columns = dict(zip("xy", arm.by_position[length], strict=True))
                drawn = rows(columns, arm=arm.arm, view=[f"{length:,} tokens"])
                found += [row for row in drawn if row["x"] > 0]  # the axis is logarithmic
    x = octaves("x", "position in the context", (row["x"] for row in found), fmt.number)
    axes = {"x": x, "y": axis("y", axis_of(result, "val/loss"))}
    layers = [LINE, MARKS, *_trained({arm.trained for arm in result.lengths})]
    tip = "'position ' + format(datum.x, '.0f') + ': ' + format(datum.y, '.4f')"
    choices = choose(found, "Context")
    caption = (
        "Mean over seeds. Dotted: the end of the trained context. An arm is missing if its position encoding ends "
        "before a context."
    )
    return Chart("Loss by position", found, layers, axes, tip, arm_styles(result), choices, caption=caption)


def _trained(lengths: Iterable[float]) -> list[Spec]:
    """Vertical lines at the ends of the trained contexts."""
    return rule("x", sorted(lengths), "dotted", "trained")
