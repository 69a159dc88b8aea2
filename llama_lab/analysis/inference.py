"""The cost of generation: speeds and cache sizes of an arm, from the eval.json of its runs."""

import math
from collections.abc import Collection, Sequence
from statistics import fmean, median
from typing import Any

import pandas as pd

from llama_lab.runs.record import Record

from .result import CacheSize, Inference, Speed, Spread

TIMED = ("prefill", "decode", "uncached")


def inference(arm: str, records: Sequence[Record]) -> Inference | None:
    """The measurements that all evaluated records have in common; None without any."""
    measured = _shared(records, "speed", ["batch_size", "context"])
    speeds = []
    for (batch_size, context), rows in measured:
        prefill, decode, uncached = (rows[part].map(_median) for part in TIMED)
        spreads = map(_spread, (batch_size / decode, batch_size / uncached, uncached / decode, prefill))
        speeds.append(Speed(batch_size, context, len(rows), *spreads))
    caches = _shared(records, "cache", ["batch_size", "dtype", "context"])
    # The cache of a batch is divided by its size: the smallest batch is the closest to one sequence.
    smallest = min((batch_size for (batch_size, *_), _ in caches), default=0)
    sizes = tuple(
        CacheSize(dtype, context, *(_spread(rows[f"{by}_bytes"] / batch_size) for by in ("measured", "formula")))
        for (batch_size, dtype, context), rows in caches
        if batch_size == smallest
    )
    return Inference(arm, tuple(speeds), sizes) if speeds or sizes else None


def _shared(records: Sequence[Record], part: str, keys: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """A row per record that has the part, for each combination of the keys that all of them have."""
    measured = [pd.DataFrame(entries) for record in records if (entries := getattr(record.evaluation, part))]
    if not measured:
        return []
    rows = pd.concat([table.drop_duplicates(keys, keep="last") for table in measured])
    return [(key, own) for key, own in rows.groupby(keys, sort=False) if len(own) == len(measured)]


def _median(seconds: Collection[float] | None) -> float:
    """nan if there are none, or if one is not positive and finite."""
    return median(seconds) if seconds and all(0 < one < math.inf for one in seconds) else math.nan


def _spread(values: pd.Series) -> Spread | None:
    """None if a value is unknown."""
    return Spread(fmean(values), min(values), max(values)) if all(map(math.isfinite, values)) else None
