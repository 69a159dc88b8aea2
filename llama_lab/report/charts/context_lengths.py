"""Charts of the loss over context lengths and positions."""

import math

from plotly import graph_objects as go

from llama_lab.analysis.result import Result
from llama_lab.util import formatting as fmt

from .axes import axis_of, choose, new_chart, set_octaves, set_ticks
from .style import INK, styles
from .traces import arm_line, mean_points


def context_lengths(result: Result) -> go.Figure:
    """Loss over context length, in multiples of the trained length."""
    looks = styles(result)
    traces = []
    for arm in result.lengths:
        found = [(length / arm.trained, loss) for length, loss in zip(arm.lengths, arm.loss, strict=True)]
        hover = f"%{{x:.3g}}{fmt.TIMES} the trained length: %{{text}}"
        traces.append(mean_points(arm.arm, looks[arm.arm], found, hover))
    axis = "context length / trained length"
    figure = new_chart(traces, "Loss over context length", axis, axis_of(result, "val/loss"), height=380)
    ratios = sorted({length / arm.trained for arm in result.lengths for length in arm.lengths})
    return _mark_trained(set_ticks(figure, ratios, lambda ratio: f"{ratio:.3g}{fmt.TIMES}"), {1})


def positions(result: Result) -> go.Figure:
    """Loss by position in the context, for each evaluated context length."""
    looks = styles(result)
    lengths = sorted({length for arm in result.lengths for length in arm.by_position}, reverse=True)
    traces = [
        arm_line(arm.arm, looks[arm.arm], *arm.by_position[length], "position %{x:.0f}: %{y:.4f}").update(
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
