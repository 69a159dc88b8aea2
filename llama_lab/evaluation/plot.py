"""Plot the results of an evaluation: eval.png."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llama_lab.runs.evaluation import Evaluation
from llama_lab.util.chart import BARS, COLOURS, Row, Spec, axis, log_axis, octaves, only, render, rows, rule
from llama_lab.util.files import replacing

from .printing import predicted, smallest_caches

LINE: Spec = {"mark": "line"}
DOTS: Spec = {"mark": {"type": "point", "filled": True}}


def plot_evaluation(found: Evaluation, folder: Path) -> None:
    """Write eval.png, or eval_ema.png, into a run's folder: a panel for each thing that was found."""
    panels = (by_position, by_length, cache_bytes, speeds)
    if drawn := [chart for draw in panels if (chart := draw(found))["data"]["values"]]:
        resolve = {"scale": {"color": "independent", "strokeDash": "independent"}}
        with replacing((folder / found.FILE).with_suffix(".png")) as fresh:
            render({"concat": drawn, "columns": 2, "spacing": 40, "resolve": resolve}, fresh)


def by_position(found: Evaluation) -> Spec:
    """Loss over the position in the context, a line for each context length."""
    lines = [entry for entry in found.lengths if entry.loss is not None]
    drawn = (
        rows({"x": [position + 1 for position in one.positions], "y": one.losses}, arm=f"{one.length:,} tokens")
        for one in lines
    )
    x = log_axis("x", "tokens that a prediction has before it", ",")
    return panel("Loss by position", drawn, [LINE, *trained(found)], x, axis("y", f"nats per {predicted(found)}"))


def by_length(found: Evaluation) -> Spec:
    """Loss over the context length."""
    tokens = [one.length for one in found.lengths]
    ends = [f"{one.length:,}" for one in found.lengths if one.loss is None]
    title = f"tokens; no loss at {', '.join(ends)}" if ends else "tokens"
    drawn = rows({"x": tokens, "y": [one.loss for one in found.lengths]})
    x, y = octaves("x", title, tokens, "{:,.0f}".format), axis("y", f"nats per {predicted(found)}")
    return panel("Loss by context length", [drawn], [LINE, DOTS, *trained(found)], x, y)


def cache_bytes(found: Evaluation) -> Spec:
    """Bytes of one sequence's KV cache over the context: lines by formula, dots as measured."""
    drawn = (
        [{"x": one.context, "y": bytes_ / one.batch_size / 1024, "arm": one.dtype, "measured": measured}]
        for one in smallest_caches(found)
        for measured, bytes_ in enumerate((one.formula_bytes, one.measured_bytes))
    )
    layers = [only("!datum.measured", LINE), only("datum.measured", DOTS)]
    x, y = (axis(*one, ",f", zero=True) for one in (("x", "tokens"), ("y", "KiB (lines: by formula; dots: measured)")))
    return panel("KV cache of one sequence", drawn, layers, x, y)


def speeds(found: Evaluation) -> Spec:
    """Tokens per second over the context, with the cache and without, a colour for each batch size."""
    drawn = []
    for one in found.speed:
        for kind, rounds in (("with the cache", one.decode), ("without", one.uncached)):
            high, middle, low = (one.batch_size / np.quantile(rounds or [np.nan], (0, 0.5, 1))).tolist()
            columns = {"x": [one.context], "y": [middle], "low": [low], "high": [high]}
            drawn.append(rows(columns, arm=f"batch {one.batch_size}", kind=kind))
    kinds = {"strokeDash": {"field": "kind", "scale": {"range": [[], [5, 3]]}}}
    layers = [{**LINE, "encoding": kinds}, BARS, DOTS]
    x, y = log_axis("x", "tokens in the context", ","), log_axis("y", "tokens per second", ",")
    return panel("Decoding: medians and ranges of rounds", drawn, layers, x, y)


def panel(title: str, drawn: Iterable[list[Row]], layers: list[Spec], x: Spec, y: Spec) -> Spec:
    """A chart of rows, with a colour and an entry in the legend for each `arm` that they have."""
    values = [row for some in drawn for row in some]
    names = [*dict.fromkeys(row["arm"] for row in values if "arm" in row)]
    colour = {"color": {"field": "arm", "scale": {"domain": names, "range": COLOURS}}} if names else {}
    encoding = {"x": x, "y": y, **colour}
    size = {"width": 400, "height": 260}
    return {"title": title, **size, "data": {"values": values}, "encoding": encoding, "layer": layers}


def trained(found: Evaluation) -> list[Spec]:
    """A line where the trained context ends."""
    return rule("x", [one.length for one in found.lengths[:1]], "dotted")
