"""The learning rate of each judged run: the best on a tuning seed of its own, which is not judged.

A rate chosen on the runs that are compared favours the noisiest arm, and a single tuning seed gives all judged runs the
same error; docs/statistics.md says how often.
"""

from collections.abc import Mapping

Losses = Mapping[float, float]
"""The final loss at each learning rate; infinite where the run diverged."""


def best_rate(losses: Losses) -> float:
    """The learning rate with the lowest loss; the lowest such rate if several tie, as when all diverged."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def is_on_edge(losses: Losses) -> bool:
    """Whether the best rate is at an end of the grid, so that a better one may lie beyond."""
    return best_rate(losses) in (min(losses), max(losses))


def rate_beyond(losses: Losses) -> float | None:
    """The next rate beyond the edge, at the ratio of the best rate to its neighbour; None unless the best is there."""
    if not is_on_edge(losses):
        return None
    rates, best = sorted(losses), best_rate(losses)
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:.6g}")
