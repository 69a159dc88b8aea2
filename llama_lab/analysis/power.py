"""The power of a study's tests."""

import math

from scipy.optimize import brentq
from scipy.special import nctdtr, stdtrit  # scipy.stats has more of them, and takes twice as long to import

LEVEL = 0.05
POWER = 0.8


def smallest_difference(arms: int, seeds: int, comparisons: float) -> float:
    """The difference that a study of equally noisy arms detects with 80% power, in standard deviations of a run.

    For one of so many comparisons, by a t-test with a comparison's own degrees of freedom and up to as many again: that
    is what the others are worth in simulated studies (docs/statistics.md). Needs two arms and seeds. comparisons: over
    the share of the 5% level that they are tested at.
    """
    return in_errors(arms, seeds, comparisons)[1] * math.sqrt(2 / seeds)


def in_errors(arms: int, seeds: int, comparisons: float) -> tuple[float, float]:
    """Half of that test's interval, and the difference that it detects, in standard errors of a difference."""
    df = (seeds - 1) * (2 - 1 / (arms - 1))
    half = float(-stdtrit(df, LEVEL / 2 / comparisons))
    return half, brentq(lambda shift: power_of(shift, df, LEVEL / comparisons) - POWER, half / 2, 4 * half)


def power_of(shift: float, df: float, level: float) -> float:
    """The power of a two-sided t-test for an effect of so many standard errors; the other tail is negligible."""
    return float(1 - nctdtr(df, shift, -stdtrit(df, level / 2)))
