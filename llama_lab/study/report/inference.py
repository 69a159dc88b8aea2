"""The cost of generation: speeds and cache sizes of an arm, from the eval.json of its runs."""

import math
from collections.abc import Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import Any

from llama_lab.runs import evaluation
from llama_lab.runs.evaluation import GenerationSpeed
from llama_lab.runs.record import Record

from .result import CacheSize, Inference, Speed, Spread

TIMED = ("prefill", "decode", "uncached")


def inference(arm: str, records: Sequence[Record]) -> Inference | None:
    """The measurements that all evaluated records have in common; None without any."""
    speeds = tuple(map(_speed, _shared(records, "speed", "batch_size", "context")))
    caches = _shared(records, "cache", "batch_size", "dtype", "context")
    # The cache of a batch is divided by its size: the smallest batch is the closest to one sequence.
    smallest = min((entries[0].batch_size for entries in caches), default=0)
    sizes = tuple(_cache_size(entries) for entries in caches if entries[0].batch_size == smallest)
    return Inference(arm, speeds, sizes) if speeds or sizes else None


def rounds(entry: GenerationSpeed, part: str) -> list[float]:
    """The seconds of one of TIMED in every round; empty if it was not measured."""
    seconds: list[float] | None = getattr(entry, part)
    return seconds or []


def _shared(records: Sequence[Record], part: str, *keys: str) -> list[list[Any]]:
    """The entries of every record that has the part, for each combination of the keys that all of them have."""
    measured = [entries for record in records if (entries := getattr(record.evaluation, part))]
    by_run = [{attrgetter(*keys)(entry): entry for entry in entries} for entries in measured]
    combinations = by_run[0] if by_run else ()
    return [[entries[one] for entries in by_run] for one in combinations if all(one in e for e in by_run)]


def _speed(entries: Sequence[GenerationSpeed]) -> Speed:
    batch_size = entries[0].batch_size
    prefill, decode, uncached = ([_median(rounds(entry, part)) for entry in entries] for part in TIMED)
    return Speed(
        batch_size=batch_size,
        context=entries[0].context,
        runs=len(entries),
        decode=_spread([batch_size / seconds for seconds in decode]),
        uncached=_spread([batch_size / seconds for seconds in uncached]),
        gain=_spread([without / seconds for without, seconds in zip(uncached, decode, strict=True)]),
        prefill=_spread(prefill),
    )


def _cache_size(entries: Sequence[evaluation.CacheSize]) -> CacheSize:
    measured, formula = (
        Spread(fmean(found), min(found), max(found))
        for found in ([getattr(e, key) / e.batch_size for e in entries] for key in ("measured_bytes", "formula_bytes"))
    )
    return CacheSize(entries[0].dtype, entries[0].context, measured, formula)


def _median(seconds: Sequence[float]) -> float:
    """nan if there are none, or if one is not positive and finite."""
    return median(seconds) if seconds and all(0 < one < math.inf for one in seconds) else math.nan


def _spread(values: Sequence[float]) -> Spread | None:
    """None if a value is unknown."""
    is_known = all(map(math.isfinite, values))
    return Spread(fmean(values), min(values), max(values)) if is_known else None
