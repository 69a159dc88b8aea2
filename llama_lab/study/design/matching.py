"""Match arms in parameters or FLOPs by solving for a width: the feed-forward's, or the mixer's without one."""

from collections.abc import Callable
from typing import NamedTuple

from llama_lab.model import Cost
from llama_lab.runs.study import MOST_RESIDUAL
from llama_lab.util.errors import ConfigError

MEASURES: dict[str, Callable[[Cost], float]] = {
    "params": lambda cost: cost.params_non_embedding,
    "active": lambda cost: cost.params_active_non_embedding,
    "flops": lambda cost: cost.flops_per_token,
}
STEPS = 5  # of Newton's method; where costs are linear in the width, the first is enough
MULTIPLES = (8, 4, 2, 1)  # of the width: matrix units are faster with larger ones, and only tiny models need less


class Matched(NamedTuple):
    """A width, the cost of the model with it, and its relative difference to the reference."""

    width: int
    cost: Cost
    residual: float


def match_width(
    cost_at: Callable[[int], Cost], textbook: int | None, match: str, reference: Cost, part: str = "feed-forward"
) -> Matched:
    """The width that brings an arm to `reference` within 0.5%: a multiple of 8 if one does, else of 4, 2 or 1.

    cost_at: the arm's cost at a width, with which the matched quantity grows. textbook: the arm's width without
    matching; None: it has none. match: "params", "active" or "flops". part: whose width it is. Raises ConfigError if
    none can match.
    """
    if textbook is None:
        problem = "this arm has no feed-forward, and its mixer no value_dim, whose width to solve for"
        raise ConfigError(f"match={match}: {problem}; use match=none, or another mixer, such as attention=mamba2")
    measure = MEASURES[match]
    target, width = measure(reference), textbook
    for step in range(STEPS):
        here = measure(cost_at(width))
        if (per_unit := measure(cost_at(width + 1)) - here) <= 0:
            if step:  # a cost that grows in steps of several units
                break
            raise ConfigError(f"match={match}: the {part}'s width does not change this arm's {match}; use match=none")
        exact = width + (target - here) / per_unit
        if exact < 1:
            raise ConfigError(
                f"match={match}: without any {part} this arm still has more {match} than the {target:,.0f} it is "
                f"matched to; use match=none, or a larger size.mlp_ratio"
            )
        before = width
        for multiple in MULTIPLES:
            width = max(multiple, multiple * round(exact / multiple))
            cost = cost_at(width)
            residual = measure(cost) / target - 1
            if abs(residual) <= MOST_RESIDUAL:
                return Matched(width, cost, residual)
        if width == before:
            break
    return Matched(width, cost, residual)
