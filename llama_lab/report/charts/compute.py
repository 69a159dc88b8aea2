"""Charts of a scaling study: losses with their laws, at equal compute, and compute-equivalent gains."""

from plotly import graph_objects as go

from llama_lab.analysis.result import Result
from llama_lab.analysis.scaling_gains import Line, iso_flop_lines, law_lines
from llama_lab.analysis.statistics import estimate
from llama_lab.util import formatting as fmt

from .axes import axis_of, choose, new_chart
from .style import INK, Style, option_styles
from .traces import Points, area, arm_line, mean_points, ring, rounded


def losses(result: Result) -> go.Figure:
    """Loss over training FLOPs, with each option's law along the sizes of every budget."""
    styles = option_styles(result)
    traces = []
    for option in result.scaling.options if result.scaling else ():
        for line in law_lines(option):
            traces += _law(option.option, styles[option.option], line)
        points = ((point.flops, estimate(list(point.losses.values()))) for point in option.points)
        traces.append(_at_flops(option.option, styles[option.option], points))
    return _over_flops(traces, "Loss over compute", axis_of(result, result.metric), height=460)


def iso_flop(result: Result) -> go.Figure:
    """The loss by each option's law over parameters, at some amounts of compute, with a ring where it is lowest."""
    styles, options = option_styles(result), result.scaling.options if result.scaling else ()
    traces = []
    for option in options:
        for flops, line in iso_flop_lines(option, options[0]):
            best = min(range(len(line.mean)), key=line.mean.__getitem__)
            hover = "%{fullData.name}<br>lowest at %{x:.3s} parameters: %{y:.4f}"
            own = _law(option.option, styles[option.option], line)
            if 0 < best < len(line.mean) - 1:
                own.append(ring(option.option, styles[option.option], [line.x[best]], [line.mean[best]], hover))
            traces += [one.update(meta={"arm": option.option, "view": [f"{fmt.short(flops)}FLOPs"]}) for one in own]
    figure = new_chart(traces, "Loss at equal compute", "parameters", axis_of(result, result.metric), height=400)
    figure.update_xaxes(type="log", exponentformat="power")
    return choose(figure, "Compute")


def gains(result: Result) -> go.Figure:
    """The compute-equivalent gain of each option over the reference, over training FLOPs, with that by their laws."""
    scaling, styles = result.scaling, option_styles(result)
    traces = []
    for option in scaling.options if scaling else ():
        if option.gains:
            found = option.gains.reached
            ends = ([getattr(gain.line, end) for gain in found] for end in ("mean", "low", "high"))
            traces += _law(option.option, styles[option.option], Line([gain.point.flops for gain in found], *ends))
            points = ((gain.point.flops, gain.alone) for gain in found)
            traces.append(_at_flops(option.option, styles[option.option], points))
    title = f"gain over {scaling.options[0].option}" if scaling else ""
    figure = _over_flops(traces, "Compute-equivalent gain", title, height=400)
    return figure.add_hline(y=1, line={"color": INK, "width": 1.5}, layer="below")


def _at_flops(name: str, style: Style, points: Points) -> go.Scatter:
    return mean_points(name, style, points, "%{text} at %{x:.3s}FLOPs").update(mode="markers")


def _over_flops(traces: list[go.Scatter], title: str, y: str, height: int) -> go.Figure:
    figure = new_chart(traces, title, "training FLOPs", y, height)
    figure.update_xaxes(type="log", exponentformat="power")
    return figure.update_yaxes(type="log", nticks=8)


def _law(name: str, style: Style, line: Line) -> list[go.Scatter]:
    """A fitted line with its band."""
    around = area(name, style, line.x, line.low, line.high, opacity=0.15)
    return [around, arm_line(name, style, line.x, map(rounded, line.mean)).update(mode="lines", line={"width": 1.5})]
