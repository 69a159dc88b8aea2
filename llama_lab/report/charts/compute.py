"""Charts of a scaling study: losses with their laws, at equal compute, and compute-equivalent gains."""

from typing import Any

from llama_lab.analysis.result import Result
from llama_lab.analysis.scaling_gains import Line, iso_flop_lines, law_lines
from llama_lab.analysis.statistics import estimate
from llama_lab.util import formatting as fmt
from llama_lab.util.chart import BAND, BARS, LINE, POINTS, RING, Row, Spec, log_axis, only, rows, rule

from .base import Chart, axis_of, choose, mean_rows
from .style import option_styles

LAW = [only("datum.law", layer) for layer in (BAND, LINE)]
MEASURED = [only("!datum.law", layer) for layer in (BARS, POINTS)]
TIP = "datum.law ? null : datum.text + ' at ' + format(datum.x, '.3s') + 'FLOPs'"


def losses(result: Result) -> Chart:
    """Loss over training FLOPs, with each option's law along the sizes of every budget."""
    found = list[Row]()
    for option in result.scaling.options if result.scaling else ():
        for budget, line in enumerate(law_lines(option)):
            found += _law(line, arm=option.option, part=budget)
        means = ((point.flops, estimate(list(point.losses.values()))) for point in option.points)
        found += mean_rows(means, arm=option.option)
    lines = " Lines: the law along the sizes of each budget, with its pointwise 95% interval."
    caption = f"Points: mean over seeds, with its 95% interval.{lines if any('law' in row for row in found) else ''}"
    return _over_flops(result, found, "Loss over compute", axis_of(result, result.metric), [], caption)


def gains(result: Result) -> Chart:
    """The compute-equivalent gain of each option over the reference, over training FLOPs, with that by their laws."""
    options = result.scaling.options if result.scaling else ()
    found = list[Row]()
    for option in options:
        reached = option.gains.reached if option.gains else ()
        flops = [gain.point.flops for gain in reached]
        ends = ([getattr(gain.line, end) for gain in reached] for end in ("mean", "low", "high"))
        found += _law(Line(flops, *ends), arm=option.option)
        found += mean_rows(zip(flops, (gain.alone for gain in reached), strict=True), arm=option.option)
    reference = options[0].option if options else ""
    caption = (
        f"The training FLOPs that {reference} would need for the same loss over those spent; above 1 is better. "
        "Points: by the differences at one size and budget. Line: by the laws of both. With pointwise 95% intervals, "
        "where the reference reached such a loss."
    )
    return _over_flops(result, found, "Compute-equivalent gain", f"gain over {reference}", rule("y", [1]), caption)


def iso_flop(result: Result) -> Chart:
    """The loss by each option's law over parameters, at some amounts of compute, with a ring where it is lowest."""
    options = result.scaling.options if result.scaling else ()
    found = list[Row]()
    for option in options:
        for flops, line in iso_flop_lines(option, options[0]):
            law = _law(line, arm=option.option, view=[f"{fmt.short(flops)}FLOPs"])
            best = min(law, key=lambda row: float(row["y"]))
            best["ring"] = best not in (law[0], law[-1])
            found += law
    tip = "(datum.ring ? 'lowest at ' : '') + format(datum.x, '.3s') + ' parameters: ' + format(datum.y, '.4f')"
    axes = {"x": log_axis("x", "parameters"), "y": log_axis("y", axis_of(result, result.metric))}
    choices = choose(found, "Compute")
    caption = (
        "By the law, within the tokens of the study. Rings: the best size for that compute. Pointwise 95% intervals."
    )
    return Chart(
        "Loss at equal compute", found, [*LAW, RING], axes, tip, option_styles(result), choices, caption=caption
    )


def _over_flops(result: Result, found: list[Row], title: str, y: str, below: list[Spec], caption: str) -> Chart:
    axes = {"x": log_axis("x", "training FLOPs"), "y": log_axis("y", y), "detail": {"field": "part"}}
    layers, styles = [*below, *LAW, *MEASURED], option_styles(result)
    return Chart(title, found, layers, axes, TIP, styles, height=360, caption=caption)


def _law(line: Line, **common: Any) -> list[Row]:
    """The rows of a fitted line with its band."""
    return rows({"x": line.x, "y": line.mean, "low": line.low, "high": line.high}, **common, law=True)
