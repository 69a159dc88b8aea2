"""The style of an arm, the same in every chart, and which arms a chart opens with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import pandas as pd

from llama_lab.analysis.result import Result
from llama_lab.util.chart import COLOURS

DASHES = ((1, 0), (6, 4), (2, 3), (6, 3, 2, 3), (10, 4), (10, 3, 2, 3))
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
BETTER, WORSE, UNCLEAR = "#0072B2", "#D55E00", "#767676"
COLOUR_OF = {"lower": BETTER, "higher": WORSE}  # by verdict
MOST_LINES = 6  # that a chart opens with
MOST_BANDS = 4


@dataclass(frozen=True)
class Style:
    """The style of an arm, the same in every chart."""

    colour: str
    dash: tuple[int, ...]  # pixels drawn, left out, drawn...
    symbol: str


def arm_styles(result: Result) -> dict[str, Style]:
    """A style for each arm, solid black for the baseline; the cycles' lengths are coprime, so 210 are distinct."""
    return cycle_styles(sorted((arm.name for arm in result.arms), key=lambda name: name != result.study.baseline))


def curve_styles(result: Result) -> dict[str, Style]:
    """The style of each curve of differences: its arm's, or one for each effect."""
    styles = arm_styles(result)
    effects = cycle_styles([curve.name for curve in result.difference_curves if not curve.against])
    return {curve.name: (styles if curve.against else effects)[curve.name] for curve in result.difference_curves}


def option_styles(result: Result) -> dict[str, Style]:
    """A style for each option of a scaling study."""
    return cycle_styles([option.option for option in result.scaling.options] if result.scaling else [])


def cycle_styles(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name."""
    looks = zip(names, cycle(COLOURS), cycle(DASHES), cycle(SYMBOLS), strict=False)
    return {name: Style(colour, dash, symbol) for name, colour, dash, symbol in looks}


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
