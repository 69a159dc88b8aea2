"""Which arm to choose for which need, by a study's rankings: in sentences, and as a table on the terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from llama_lab.analysis.result import ArmResult, Quantity, Ranking, Result, Standing
from llama_lab.util import formatting as fmt
from llama_lab.util.display import plain_table

NO_CHOICE = "no clear winner"


class Wording(NamedTuple):
    """How a quantity is spoken of. need: what it matters for. best: its best value. short: its name on the terminal."""

    need: str
    best: str
    title: str
    short: str
    is_bytes: bool = False
    is_speed: bool = False


SPEED = ", tokens per second"
WORDINGS: dict[Quantity, Wording] = {
    "loss": Wording("Quality", "the lowest loss", "Loss", "loss"),
    "train": Wording("Training speed", "the fastest", "Training" + SPEED, "train\ntokens/s", is_speed=True),
    "decode": Wording("Decoding speed", "the fastest", "Decoding" + SPEED, "decode\ntokens/s", is_speed=True),
    "prefill": Wording("Reading prompts", "the fastest", "Prefill" + SPEED, "prefill\ntokens/s", is_speed=True),
    "memory": Wording("Training memory", "the least", "Training memory", "train\nmemory", is_bytes=True),
    "cache": Wording("KV cache", "the smallest", "KV cache, full context", "KV\ncache", is_bytes=True),
    "longest": Wording("Long context", "the lowest loss", "Loss at {} tokens", "loss at\n{}"),
}


def title(ranking: Ranking) -> str:
    """The title of its column."""
    return WORDINGS[ranking.quantity].title.format(fmt.number(ranking.context))


def ranked(ranking: Ranking, arm: ArmResult) -> str:
    """The value with its interval, and below it the rank, or why there is none."""
    standing = ranking.standing(arm.name)
    rank = f"rank {fmt.rank(standing.ranks)}" if standing.ranks else standing.reason
    return f"{_value(ranking, standing)}\n{rank}"


def _value(ranking: Ranking, standing: Standing) -> str:
    if standing.value is None:
        return fmt.UNKNOWN
    return fmt.in_bytes(standing.value.mean) if WORDINGS[ranking.quantity].is_bytes else standing.value.text


def guide(result: Result) -> tuple[str, ...]:
    """A sentence for every quantity: the best arm, those that are not significantly worse, or why there is neither."""
    return tuple(_advice(ranking, result.unit) for ranking in result.rankings)


def _advice(ranking: Ranking, unit: str) -> str:
    words, left = WORDINGS[ranking.quantity], _left_out(ranking)
    need = f"{words.need} at {fmt.number(ranking.context)} tokens" if ranking.context else words.need
    ranked = [standing for standing in ranking.standings if standing.ranks]
    if not ranked:
        return f"{need}: {NO_CHOICE}: {left}."
    unit = "" if words.is_bytes else " tokens/s" if words.is_speed else f" {unit}"
    return f"{need}: {_choice(ranking, ranked, words, unit)}.{f' Not ranked: {left}.' if left else ''}"


def _choice(ranking: Ranking, ranked: Sequence[Standing], words: Wording, unit: str) -> str:
    sign = -1 if words.is_speed else 1
    best = min(ranked, key=lambda one: sign * one.value.mean if one.value else 0)
    rivals = [one.arm for one in ranked if one.arm != best.arm and (best.arm, one.arm) not in ranking.better]
    value = f"{_value(ranking, best)}{unit}"
    others = len(ranked) - 1 - len(rivals)
    if not ranked[1:]:
        return f"{best.arm} alone ({value})"
    if words.is_bytes:
        equal = fmt.conjoin([best.arm, *rivals])
        return f"{equal}, {words.best} ({value})" if others else f"{NO_CHOICE}: all have {value}"
    if not others:
        return f"{NO_CHOICE}: no arm is significantly worse than {best.arm}, {words.best} ({value})"
    if not rivals:
        return f"{best.arm}, {words.best} ({value}): every other arm is significantly worse"
    verb = "is" if len(rivals) == 1 else "are"
    return f"{best.arm} ({value}), or {fmt.conjoin(rivals)}, which {verb} not significantly worse; every other arm is"


def _left_out(ranking: Ranking) -> str:
    """`gpt2 and opt (learned positions end at 256)`; the reason alone if all arms have the same."""
    reasons: dict[str, list[str]] = {}
    for standing in ranking.standings:
        if standing.reason:
            reasons.setdefault(standing.reason, []).append(standing.arm)
    if any(len(arms) == len(ranking.standings) for arms in reasons.values()):
        return next(iter(reasons))
    return ", ".join(f"{fmt.conjoin(arms)} ({reason})" for reason, arms in reasons.items())


def grid(result: Result) -> Table:
    """The values and, below them, the ranks; 80 columns are enough."""
    known = [ranking for ranking in result.rankings if ranking.is_known]
    names = [WORDINGS[ranking.quantity].short.format(fmt.number(ranking.context)) for ranking in known]
    table = plain_table("Below each value its rank: 1 is the best", ["arm"], names, gap=2)
    table.pad_edge, table.columns[0].overflow = True, "fold"
    for arm in result.arms:
        table.add_row(arm.name, *(_short(ranking, ranking.standing(arm.name)) for ranking in known))
    return table


def _short(ranking: Ranking, standing: Standing) -> str:
    if standing.value is None:
        return fmt.UNKNOWN
    is_bytes, mean = WORDINGS[ranking.quantity].is_bytes, standing.value.mean
    return f"{fmt.in_bytes(mean) if is_bytes else fmt.three_digits(mean)}\n{fmt.rank(standing.ranks)}"
