"""What each chart shows, in words and numbers, for readers who do not see it."""

from collections.abc import Iterable

from . import words
from .charts import LOSS, Row
from .result import Curve, Inference, LearningRates, Lengths, Result

MOST = 12  # arms that one text lists; the tables hold all


def differences(rows: list[Row], what: str) -> str:
    """Each row's difference with its interval, and whether it can be told from zero."""
    return _text(f"{what}, with 95% intervals", (_difference(row) for row in rows))


def curves(result: Result) -> str:
    """Where each arm's loss begins and ends."""
    metric = next((m for m in LOSS if any(c.metric == m for c in result.curves)), "val/loss")
    found = (_course(curve) for curve in result.curves if curve.metric == metric)
    return _text(f"{LOSS[metric].capitalize()} over training, in {words.UNITS[metric]}, mean over seeds", found)


def front(result: Result, cost: str, on_front: tuple[str, ...], of_cost: str) -> str:
    """Each arm's loss and cost, and which arms are on the front."""
    found = [
        f"{arm.name} {words.number(loss.mean, 4)} at {_cost(cost, arm.costs[cost])}"
        for arm in result.arms
        if (loss := arm.judged(result.metric)) and words.known(arm.costs.get(cost))
    ]
    best = words.enumerate_some(on_front, MOST) or "no arm"
    return (
        f"{_text(f'Validation loss, in {words.UNITS[result.metric]}, against {of_cost}', found)} On the front: {best}."
    )


def decoding_speeds(arms: Iterable[Inference]) -> str:
    """Each arm's speed with the KV cache over its contexts, and what it would be without, in the smallest batch."""
    measured = [arm for arm in arms if arm.speeds]
    batch_size = min(speed.batch_size for arm in measured for speed in arm.speeds)
    what = f"Decoding speed over context length, in tokens per second, {words.count(batch_size, 'sequence')} at once"
    return _text(what, (_speeds(arm, batch_size) for arm in measured))


def cache_sizes(arms: Iterable[Inference]) -> str:
    """Each arm's cache at its largest context, beside what the formula says."""
    found = (_cache(arm, dtype) for arm in arms for dtype in dict.fromkeys(cache.dtype for cache in arm.caches))
    return _text("Measured KV cache of one sequence over context length", found)


def learning_rates(sweeps: Iterable[LearningRates]) -> str:
    """Each arm's best learning rate, its loss there, and how many runs diverged."""
    return _text("Validation loss over learning rate", (_sweep(sweep) for sweep in sweeps))


def context_lengths(arms: Iterable[Lengths]) -> str:
    """Each arm's loss at each length."""
    return _text("Validation loss over context length, in nats per token", (_lengths(arm) for arm in arms))


def positions(arms: Iterable[Lengths]) -> str:
    """Each arm's loss at the first and the last positions of its longest context."""
    return _text("Loss by position in the longest context, in nats per token", (_positions(arm) for arm in arms))


def _text(what: str, found: Iterable[str]) -> str:
    return f"{what}: {words.enumerate_some(list(found), MOST, '; ')}."


def _difference(row: Row) -> str:
    change = words.with_interval(row.mean, row.low, row.high, is_difference=True)
    against = f" against {row.against}" if row.against else ""
    return f"{row.label} {change}{against}{'' if row.significant else ', not significant'}"


def _course(curve: Curve) -> str:
    known = [mean for mean in curve.mean if words.known(mean)]
    if not known:
        return f"{curve.arm} without a known loss"
    return f"{curve.arm} from {words.number(known[0], 3)} to {words.number(known[-1], 3)}"


def _cost(cost: str, value: float) -> str:
    return words.size(value) if "bytes" in cost else f"{words.number(value)} tokens per second"


def _speeds(arm: Inference, batch_size: int) -> str:
    speeds = sorted((s for s in arm.speeds if s.batch_size == batch_size), key=lambda speed: speed.context)
    found = [f"{words.three_digits(s.decode.mean if s.decode else None)} at {s.context:,}" for s in speeds]
    gain = speeds[-1].gain if speeds else None
    beside = [f"there {words.three_digits(gain.mean)} times that without the cache"] if gain else []
    return f"{arm.arm} {', '.join([*found, *beside]) or words.UNKNOWN}"


def _cache(arm: Inference, dtype: str) -> str:
    cache = arm.cache(dtype)
    if not cache:
        return f"{arm.arm} was not measured"
    share = words.number(cache.measured.mean / cache.formula.mean, 2)
    return f"{arm.arm} {words.size(cache.measured.mean)} at {cache.context:,} tokens in {dtype}, {share} of its formula"


def _sweep(sweep: LearningRates) -> str:
    at_best = dict(zip(sweep.rates, sweep.loss, strict=True)).get(sweep.best)
    edge = ", at the edge of the grid" if sweep.on_edge else ""
    diverged = f", {words.count(sum(sweep.diverged), 'run')} diverged" if any(sweep.diverged) else ""
    loss = words.number(at_best.mean if at_best else None, 4)
    return f"{sweep.arm} is best at {words.learning_rate(sweep.best)} with {loss}{edge}{diverged}"


def _lengths(arm: Lengths) -> str:
    losses = (
        f"{words.number(loss.mean, 3)} at {length:,}" if loss else f"none at {length:,}"
        for length, loss in zip(arm.lengths, arm.loss, strict=True)
    )
    return f"{arm.arm}, trained at {arm.trained:,}: {', '.join(losses)}"


def _positions(arm: Lengths) -> str:
    if not arm.by_position:
        return f"{arm.arm} was not measured"
    places, losses = arm.by_position[max(arm.by_position)]
    first, last = words.number(losses[0], 3), words.number(losses[-1], 3)
    return f"{arm.arm} {first} at {words.number(places[0])}, {last} at {words.number(places[-1])}"
