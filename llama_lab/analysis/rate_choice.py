"""The learning rate of each judged run, from runs at several rates on a tuning seed of its own, which is not judged.

A rate chosen on the runs that are compared favours the noisiest arm, and a single tuning seed gives all judged runs the
same error; docs/statistics.md says how often.
"""

import math
from collections.abc import Mapping

Losses = Mapping[float, float]
"""The final loss at each learning rate; infinite where the run diverged."""

USEFUL = 0.97  # of the entropy of token frequencies, below which a loss is useful


def with_collapsed(losses: Losses, entropy: float | None) -> Losses:
    """The losses, infinite also where a run has collapsed: it ended nearer to `entropy` than to the best of them.

    Above some rate, a model loses what it has learnt but the frequencies of tokens, and its loss stays finite. A
    parabola through such a cliff has its optimum far from the best rate. entropy: of the frequencies, in nats per
    token; None: not known. Nothing has collapsed where the best has learnt hardly more than these.
    """
    best = min(losses.values(), default=math.inf)
    if entropy is None or best > USEFUL * entropy:
        return losses
    return {rate: math.inf if entropy - loss < loss - best else loss for rate, loss in losses.items()}


def best_rate(losses: Losses) -> float:
    """The learning rate with the lowest loss; the lowest such rate if several tie, as when all diverged."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def is_on_edge(losses: Losses) -> bool:
    """Whether the best rate is at an end of the grid, so that a better one may lie beyond."""
    return best_rate(losses) in (min(losses), max(losses))


def rate_beyond(losses: Losses) -> float | None:
    """The next rate beyond the edge, at the ratio of the best rate to its neighbour; None unless the best is there."""
    return rounded(best_rate(losses) ** 2 / neighbours(losses)[0]) if is_on_edge(losses) else None


def is_beside_cliff(losses: Losses) -> bool:
    """Whether a run at a rate next to the best one diverged, so that no parabola goes through it."""
    return math.isfinite(min(losses.values())) and any(math.isinf(losses[rate]) for rate in neighbours(losses))


def rates_between(losses: Losses) -> list[float]:
    """The rates halfway from the best one to its neighbours, in log rate; none where all runs diverged."""
    best, around = best_rate(losses), neighbours(losses)
    halfway = [rounded(math.sqrt(best * rate)) for rate in around] if math.isfinite(losses[best]) else []
    return [rate for rate in halfway if rate not in losses]


def chosen_rate(losses: Losses) -> float:
    """The rate to judge at: the optimum of a parabola, or the best rate where there is none; see `fitted_optimum`."""
    optimum = fitted_optimum(losses)
    return best_rate(losses) if optimum is None else rounded(math.exp(optimum[0]))


def fitted_optimum(losses: Losses) -> tuple[float, float] | None:
    """Log rate x* and curvature c of the parabola l* + c (x - x*)^2 through the best rate and its neighbours.

    None at an end of the grid, beside a run that diverged, and where all three losses are equal.
    """
    best, around = best_rate(losses), neighbours(losses)
    if len(around) < 2 or not all(math.isfinite(losses[rate]) for rate in (best, *around)):
        return None
    low, high = ((losses[rate] - losses[best]) / abs(math.log(rate / best)) for rate in around)
    if low + high == 0:
        return None
    below, above = (math.log(rate * best) / 2 for rate in around)  # where the parabola falls by `low`, rises by `high`
    return below + (above - below) * low / (low + high), (low + high) / (above - below) / 2


def neighbours(losses: Losses) -> list[float]:
    """The rates next to the best one: two, or one at an end."""
    rates = sorted(losses)
    place = rates.index(best_rate(losses))
    return [rates[i] for i in (place - 1, place + 1) if 0 <= i < len(rates)]


def rounded(rate: float) -> float:
    """To four digits, so that folders and machines agree on it."""
    return float(f"{rate:.4g}")
