"""Losses over training: of arms, and of the differences between them."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import pandas as pd

from llama_lab.runs.record import Record, finished
from llama_lab.runs.study import Pair, Study

from .comparisons import Judged, Table, compare_arms, effects_of
from .result import BITS, Curve, CurveMetric, DifferenceCurve, Loss
from .statistics import PairedDifference

MAX_POINTS = 200  # of a curve
MAX_JUDGED = 40  # points of a curve of differences, each of which is tested


def loss_curves(arm: str, records: Sequence[Record], metric: Loss) -> Iterator[Curve]:
    """The curves of the finished runs, or, if none finished, of the others up to the first one's end.

    The training loss is left out if arms are judged in bits per byte.
    """
    metrics: tuple[CurveMetric, ...] = (metric,) if metric == BITS else (metric, "train/loss")
    for one in metrics if (shown := drawn(records)) else ():
        rows = [{row["tokens"]: row for row in record.metrics if one in row} for record in shown]
        tokens = _thin(sorted(set.intersection(*map(set, rows))), MAX_POINTS)
        flops = [n * shown[0].costs["train_flops_per_token"] for n in tokens]
        losses, seconds = ([[row[n][name] for row in rows] for n in tokens] for name in (one, "seconds"))
        if tokens:
            mean, low, high = list(map(fmean, losses)), list(map(min, losses)), list(map(max, losses))
            yield Curve(arm, one, tokens, flops, list(map(fmean, seconds)), mean, low, high)


def difference_curves(study: Study, judged: Judged, final: Table, metric: Loss) -> tuple[DifferenceCurve, ...]:
    """The family of comparisons, or of effects, at every evaluation that all finished runs share.

    Each evaluation is tested exactly as the final losses are. If all runs have one length, the curves end in those.
    """
    done = finished(record for records in judged.values() for record in records)
    if not done:
        return ()
    at: dict[float, pd.DataFrame | None] = dict(list(_logged(done, [*final]).groupby("tokens")))
    ends = {record.summary["tokens"] for record in done}
    if len(ends) == 1:
        at = {tokens: rows for tokens, rows in at.items() if tokens < min(ends)} | dict.fromkeys(ends)
    points: dict[Pair, list[tuple[float, PairedDifference]]] = {}
    for tokens in _thin(list(at), MAX_JUDGED):
        losses = final
        if (then := at[tokens]) is not None:
            tables = {unit: then.pivot_table(unit, "seed", "arm", aggfunc="last") for unit in final}
            losses = {unit: table.reindex(columns=list(judged)) for unit, table in tables.items()}
        if study.is_factorial:
            found = {(effect.name, ""): effect.change for effect in effects_of(study, judged, losses[metric])}
        else:
            compared = compare_arms(study, judged, losses, metric, is_final=False)
            found = {pair: compared[pair].change for pair in study.question if pair in compared}
        for pair, difference in found.items():
            points.setdefault(pair, []).append((tokens, difference))
    return tuple(
        DifferenceCurve(*pair, *map(list, zip(*((x, d.mean, d.low, d.high) for x, d in own), strict=True)))
        for pair, own in points.items()
    )


def _logged(records: Sequence[Record], losses: list[Loss]) -> pd.DataFrame:
    """The rows of metrics.csv that have all `losses`, with `arm` and `seed`, at the tokens that all runs share."""
    tables = [
        pd.DataFrame(one.metrics, columns=["tokens", *losses]).dropna().assign(arm=one.arm, seed=one.seed, run=i)
        for i, one in enumerate(records)
    ]
    rows = pd.concat(tables).drop_duplicates(["run", "tokens"], keep="last")
    return rows[rows.groupby("tokens")["run"].transform("size") == len(records)]


def drawn(records: Sequence[Record]) -> list[Record]:
    """The finished runs, or, if none finished, those that logged anything."""
    return finished(records) or [record for record in records if record.metrics]


def _thin(xs: list[float], most: int) -> list[float]:
    """At most `most` of xs, evenly spaced and ending in the last."""
    stride = math.ceil(len(xs) / most)
    return xs[::-1][::stride][::-1] if xs else xs
