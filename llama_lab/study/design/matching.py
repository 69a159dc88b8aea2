"""Equal size or equal compute: the feed-forward width that gives an arm what its reference has."""

from collections.abc import Callable
from dataclasses import dataclass

from llama_lab.errors import ConfigError
from llama_lab.model import Cost

# Parameters without token and position tables and the head: what the width can and should make up for. With them, tying
# the embeddings would have to be paid by most of a small model's feed-forward.
MATCHED: dict[str, Callable[[Cost], float]] = {
    "params": lambda cost: cost.params_non_embedding,
    "flops": lambda cost: cost.flops_per_token,
}
AIM = 0.005  # the residual that is not worth a word
MULTIPLES = (8, 4, 2, 1)  # of the width: matrix units like large ones, and only tiny models need less than 8


@dataclass(frozen=True)
class Matched:
    """A feed-forward width, the costs of the model that has it, and what remains, as a fraction of the reference."""

    width: int
    cost: Cost
    residual: float


def match_width(cost_at: Callable[[int], Cost], textbook: int, match: str, reference: Cost) -> Matched:
    """The width that brings an arm to `reference` within 0.5%: a multiple of 8 if one does, else of 4, 2 or 1.

    cost_at: the arm's costs at a width; what is matched grows linearly with it. textbook: the width that the arm has
    without matching. match: "params" or "flops". Raises ConfigError where no width can.
    """
    measure = MATCHED[match]
    target = measure(reference)
    at_textbook = measure(cost_at(textbook))
    per_unit = measure(cost_at(textbook + 1)) - at_textbook
    if per_unit <= 0:
        raise ConfigError(f"match={match}: the feed-forward's width does not change this arm's {match}; use match=none")
    exact = textbook + (target - at_textbook) / per_unit
    if exact < 1:
        raise ConfigError(
            f"match={match}: without any feed-forward this arm still has more {match} than the {target:,.0f} it is "
            f"matched to; use match=none, or a larger size.mlp_ratio"
        )
    for multiple in MULTIPLES:
        width = max(multiple, multiple * round(exact / multiple))
        cost = cost_at(width)
        residual = measure(cost) / target - 1
        if abs(residual) <= AIM:
            break
    return Matched(width, cost, residual)
