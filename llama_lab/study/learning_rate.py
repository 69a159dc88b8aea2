"""The learning rate of each judged run: the best on a seed of its own, which is not judged.

A rate chosen on the runs that are then compared lets a noisy arm win, and one tuning seed for all judged ones makes
them wrong together; docs/statistics.md has how often.
"""

from collections.abc import Mapping

Losses = Mapping[float, float]
"""The final loss at each learning rate; infinite where the run diverged."""


def best_rate(losses: Losses) -> float:
    """The learning rate with the lowest loss; of several, as where all diverged, the lowest rate."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def is_on_edge(losses: Losses) -> bool:
    """Whether the best rate is an end of the grid, so that a better one may lie beyond."""
    return best_rate(losses) in (min(losses), max(losses))


def rate_beyond(losses: Losses) -> float | None:
    """The rate to try next, as far beyond the best one as its neighbour is before it; None unless it is on the edge."""
    if not is_on_edge(losses):
        return None
    rates, best = sorted(losses), best_rate(losses)
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:.6g}")
