"""Scaling laws and compute-equivalent gains of a study over sizes and budgets, from its arms, and in sentences."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llama_lab.runs.record import finished
from llama_lab.runs.study import Arm
from llama_lab.util.formatting import TIMES, known, number, p_value, short

from .power import LEVEL
from .result import ArmResult, Loss
from .scaling_law import HOLDS, Floats, Gains, Point, Scaled, Scaling, logs, scale
from .statistics import Estimate

BUDGET = "tokens_per_parameter"


def scaled(arms: Sequence[ArmResult], metric: Loss, is_timed: bool = True) -> Scaling:
    """The laws and gains of the options of a scaling study, whose arms these are.

    is_timed: whether the speeds of all were measured side by side; those that runs logged give no gain in time. An arm
    with a run that diverged gives no point: its survivors are not the arm.
    """
    points: dict[str, list[Point]] = {}
    for arm in arms:
        option, size, budget = place_of(arm.arm)
        own = points.setdefault(option, [])
        done = finished(arm.records)
        if done and not any(record.status == "diverged" for record in arm.records):
            costs, tokens = done[0].costs, done[0].summary["tokens"]
            own.append(
                Point(
                    size=size,
                    budget=budget,
                    params=costs["params"],
                    tokens=tokens,
                    flops=tokens * costs["train_flops_per_token"],
                    losses={record.seed: record.summary[metric] for record in done},
                    flops_per_second=(arm.costs.get("perf/tokens_per_second", math.nan) if is_timed else math.nan)
                    * costs["train_flops_per_token"],
                )
            )
    return scale(points)


def place_of(arm: Arm) -> tuple[str, str, float]:
    """The option, the size and the tokens per parameter of an arm of a scaling study."""
    option = next(level for axis, level in arm.axes.items() if axis not in ("size", BUDGET))
    return option, arm.axes["size"], float(arm.axes[BUDGET])


def gain_of(scaling: Scaling, arm: Arm) -> Estimate | None:
    """The gain at an arm's size and budget, by the laws of both; None where the reference did not reach its loss."""
    name, size, budget = place_of(arm)
    gains = next((option.gains for option in scaling.options if option.option == name), None)
    gain = gains.at((size, budget)) if gains else None
    return gain.line if gain else None


class Line(NamedTuple):
    """A fitted curve with its 95% band."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def law_lines(option: Scaled) -> Iterator[Line]:
    """The loss by the option's law over training FLOPs, along the sizes of each budget."""
    for budget in sorted({point.budget for point in option.points}) if option.law else ():
        line = sorted((point for point in option.points if point.budget == budget), key=lambda point: point.flops)
        flops, params, tokens = logs(line, "flops", "params", "tokens")
        at = np.linspace(flops[0], flops[-1], 30)
        yield _line(option, np.exp(at), np.interp(at, flops, params), np.interp(at, flops, tokens))


def iso_flop_lines(option: Scaled, reference: Scaled) -> Iterator[tuple[float, Line]]:
    """The loss by the option's law over parameters, at the quartiles of the reference's training FLOPs.

    For numbers of tokens that the option was trained for.
    """
    points = sorted(option.points, key=lambda point: point.params)
    params, compute, spent = logs(points, "params", "flops", "tokens")
    per_token = compute - spent
    trained = [point.tokens for point in points]
    for flops in np.quantile([point.flops for point in reference.points], (0.25, 0.5, 0.75)) if option.law else ():
        at = np.linspace(params[0], params[-1], 60)
        tokens = math.log(flops) - np.interp(at, params, per_token)
        inside = (math.log(min(trained)) <= tokens) & (tokens <= math.log(max(trained)))
        if inside.sum() > 1:
            yield float(flops), _line(option, np.exp(at[inside]), at[inside], tokens[inside])


def _line(option: Scaled, x: Floats, log_params: Floats, log_tokens: Floats) -> Line:
    assert option.law is not None
    found = option.law.losses(np.exp(log_params), np.exp(log_tokens))
    return Line(x.tolist(), *(ends.tolist() for ends in found))


def scaling_sentences(scaling: Scaling) -> list[str]:
    """What the study says, the verdict first."""
    reference, *others = scaling.options
    if scaling.not_fittable:
        return [f"No power law is fitted: {scaling.not_fittable}. The losses are shown as points."]
    if scaling.loose:
        return [f"Worth in compute is unknown: the law of {reference.option} is not identified ({scaling.loose})."]
    found = []
    fitted = [(option.option, option.gains) for option in others if option.gains]
    for name, gains in fitted:
        if gain := gains.central:
            timed = f"; with measured training speeds, {number(gain.line.mean * gain.speed, 2)} times the time"
            found.append(
                f"{name} is worth {gain.line.text} times the compute of {reference.option} at "
                f"{short(gain.point.flops)}FLOPs{timed if known(gain.speed) else ''}; {trend(gains)}."
            )
        else:
            found.append(
                f"What {name} is worth in compute is unknown: none of its losses is one that {reference.option} "
                f"reached with as many tokens per parameter."
            )
    together = f", {100 * (1 - LEVEL / len(fitted)):.3g}% each" if len(fitted) > 1 else ""
    return [
        *found,
        *(
            f"No power law is fitted to {option.option}, which has {option.not_fittable}: its losses are shown as "
            "points."
            for option in others
            if option.not_fittable
        ),
        f"A gain is the training FLOPs that {reference.option} would need for the same loss at as many tokens per "
        f"parameter, over those spent, by the laws of both; 95% intervals by bootstrap{together}.",
    ]


def trend(gains: Gains) -> str:
    """Whether the gain grows, holds or shrinks with compute; or why no trend is stated."""
    by = f"{TIMES}{gains.growth.text} with every tenfold of compute"
    if gains.lack_of_fit < LEVEL:
        return (
            f"no trend is stated, because log gain over log compute does not follow a straight line (lack of fit: "
            f"{p_value(gains.lack_of_fit)}; by such a line {by})"
        )
    if not gains.trend:
        return f"whether the gain grows or shrinks cannot be told ({by})"
    within = f" within {number(100 * (HOLDS - 1))}%" if gains.trend == "holds" else ""
    return f"the gain {gains.trend}{within} ({by})"
