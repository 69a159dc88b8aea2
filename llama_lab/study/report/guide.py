"""Which arm to choose for which need, by a study's rankings: in sentences, and as a table on the terminal."""

from collections.abc import Iterator
from typing import NamedTuple

from rich import box
from rich.table import Table

from llama_lab import formatting as fmt

from .result import Quantity, Ranking, Result, Standing

NO_CHOICE = "the evidence does not carry a choice"


class Wording(NamedTuple):
    """How a quantity is spoken of. need: what it matters for. best: its best value. short: its name on the terminal."""

    need: str
    best: str
    title: str
    short: str
    is_bytes: bool = False
    is_speed: bool = False


WORDINGS: dict[Quantity, Wording] = {
    "loss": Wording("Quality", "the lowest loss", "Loss", "loss"),
    "train": Wording("Training speed", "the fastest", "Training, tokens per second", "train\ntok/s", is_speed=True),
    "decode": Wording("Decoding speed", "the fastest", "Decoding, tokens per second", "decode\ntok/s", is_speed=True),
    "prefill": Wording("Reading prompts", "the fastest", "Prefill, tokens per second", "prefill\ntok/s", is_speed=True),
    "memory": Wording("Training memory", "the least", "Training memory", "train\nmemory", is_bytes=True),
    "cache": Wording("KV cache", "the smallest", "KV cache, full context", "KV\ncache", is_bytes=True),
    "longest": Wording("Long context", "the lowest loss", "Loss at {} tokens", "loss at\n{}"),
}


def title(ranking: Ranking) -> str:
    """The title of its column."""
    return WORDINGS[ranking.quantity].title.format(fmt.number(ranking.context))


def cell(ranking: Ranking, standing: Standing) -> str:
    """The value with its interval, and below it the rank, or why there is none."""
    value = standing.value
    if value is None:
        return standing.reason
    shown = fmt.in_bytes(value.mean) if WORDINGS[ranking.quantity].is_bytes else value.text
    return f"{shown}\n{f'rank {fmt.rank(standing.ranks)}' if standing.ranks else standing.reason}"


def guide(result: Result) -> Iterator[str]:
    """A sentence for every quantity: the best arm, those that are not significantly worse, or why there is neither."""
    for ranking in result.rankings:
        words = WORDINGS[ranking.quantity]
        at = f" at {fmt.number(ranking.context)} tokens" if ranking.context else ""
        left = _left_out(ranking)
        ranked = [standing for standing in ranking.standings if standing.ranks]
        if not ranked:
            yield f"{words.need}{at}: {NO_CHOICE}: {left}."
            continue
        yield f"{words.need}{at}: {_choice(ranking, ranked, words)}.{f' Not ranked: {left}.' if left else ''}"


def _choice(ranking: Ranking, ranked: list[Standing], words: Wording) -> str:
    sign = -1 if words.is_speed else 1
    best = min(ranked, key=lambda one: sign * one.value.mean if one.value else 0)
    rivals = [one.arm for one in ranked if one.arm != best.arm and (best.arm, one.arm) not in ranking.better]
    value = cell(ranking, best).partition("\n")[0]
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
    return f"{best.arm} ({value}), or {fmt.conjoin(rivals)}, which {verb} not significantly worse; the others are"


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
    known = [ranking for ranking in result.rankings if any(standing.ranks for standing in ranking.standings)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="Ranks, 1 is the best", title_justify="left")
    table.add_column("arm", overflow="fold")
    for ranking in known:
        name = WORDINGS[ranking.quantity].short.format(fmt.number(ranking.context))
        table.add_column(name, justify="right", no_wrap=True)
    for arm, *standings in zip(result.arms, *(ranking.standings for ranking in known), strict=True):
        table.add_row(arm.name, *map(_short, known, standings))
    return table


def _short(ranking: Ranking, standing: Standing) -> str:
    value, is_bytes = standing.value, WORDINGS[ranking.quantity].is_bytes
    if value is None or not standing.ranks:
        return fmt.UNKNOWN
    shown = fmt.in_bytes(value.mean) if is_bytes else fmt.three_digits(value.mean)
    return f"{shown}\n{fmt.rank(standing.ranks)}"
