"""Ranks of a study's arms by loss, speed, memory and loss at longer contexts, each as far as the data determine them.

Each quantity is a family of its own: all pairs of arms, and from these the intervals of the ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations

import numpy as np
import pandas as pd

from llama_lab.runs.study import ArmSpeed, Study, StudySpeed

from .comparisons import judge_pairs
from .result import ArmResult, Comparison, Metric, Quantity, Ranking, Standing
from .sentences import divergence
from .statistics import Estimate, describe, estimate, geometric_mean, rank_intervals

Arms = Sequence[ArmResult]
Values = Mapping[str, Estimate]
Reasons = Mapping[str, str]  # why arms are not ranked
Pairs = set[tuple[str, str]]  # of arms, the better one first

SPEEDS: tuple[Quantity, ...] = ("train", "decode", "prefill")  # fields of ArmSpeed
CACHE, MEMORY = "kv_cache/bytes", "perf/peak_memory_bytes"


def rankings(
    study: Study, arms: Arms, pairs: Sequence[Comparison], speed: StudySpeed | None, metric: Metric
) -> tuple[Ranking, ...]:
    """The arms ranked by everything that one may choose by; empty unless the study compares all pairs.

    pairs: all pairs, compared by loss.
    """
    if study.compare != "all":
        return ()
    speeds = speed.arms if speed else {}
    memory = {name: found.costs[MEMORY] for name, found in speeds.items() if found.memory}
    caches = {arm.name: arm.costs[CACHE] for arm in arms if CACHE in arm.costs}
    return (
        _by_loss(arms, pairs, metric),
        *(_by_speed(quantity, arms, speeds) for quantity in SPEEDS),
        _by_size("memory", arms, memory, "measured on GPUs only"),
        _by_size("cache", arms, caches, "not known"),
        _at_longest(arms, metric),
    )


def _by_loss(arms: Arms, pairs: Sequence[Comparison], metric: Metric) -> Ranking:
    tested = {name for c in pairs if c.change.is_tested for name in (c.arm, c.against)}
    clear = [(c.change.mean, c.arm, c.against) for c in pairs if c.change.significant]
    values = {arm.name: loss for arm in arms if (loss := arm.judged(metric))}
    unranked = {arm.name: _untested(arm) or "not tested" for arm in arms if arm.name not in tested}
    return _ranking("loss", arms, values, unranked, {(a, b) if mean < 0 else (b, a) for mean, a, b in clear})


def _by_speed(quantity: Quantity, arms: Arms, speeds: Mapping[str, ArmSpeed]) -> Ranking:
    rounds = pd.DataFrame({name: found for name, arm in speeds.items() if (found := getattr(arm, quantity))})
    values = {name: geometric_mean(rounds[name].tolist()) for name in rounds}
    unranked = {arm.name: "not measured" for arm in arms if arm.name not in rounds}
    return _tested_ranking(quantity, arms, values, unranked, -np.log(rounds))


def _by_size(quantity: Quantity, arms: Arms, sizes: Mapping[str, float], unknown: str) -> Ranking:
    """By numbers of bytes, which are exact."""
    unranked = {arm.name: unknown for arm in arms if arm.name not in sizes}
    smaller = {(a, b) for a, b in permutations(sizes, 2) if sizes[a] < sizes[b]}
    return _ranking(quantity, arms, {name: Estimate(1, size) for name, size in sizes.items()}, unranked, smaller)


def _at_longest(arms: Arms, metric: Metric) -> Ranking:
    """By the loss at the longest context that was evaluated, over the seeds that all ranked arms have."""
    entries = [
        (arm.name, record.seed, entry.length, entry.loss, entry.note.removeprefix("cannot: "))
        for arm in arms
        for record in arm.records
        for entry in record.evaluation.lengths
    ]
    rows = pd.DataFrame(entries, columns=["arm", "seed", "length", "loss", "note"]).astype({"loss": float})
    if rows["length"].nunique() < 2:
        return _unknown("longest", arms, "not evaluated beyond the trained context")
    if metric != "val/loss":
        return _unknown("longest", arms, "nats of different tokens cannot be compared")
    longest = int(rows["length"].max())
    rows = rows[rows["length"] == longest]
    notes = dict(rows.loc[rows["loss"].isna(), ["arm", "note"]].itertuples(index=False))
    losses = rows.pivot_table("loss", "seed", "arm", aggfunc="last")
    unranked = {arm.name: reason for arm in arms if (reason := notes.get(arm.name) or _untested(arm))}
    unranked |= {arm.name: "not evaluated" for arm in arms if arm.name not in {*losses, *unranked}}
    kept = losses.drop(columns=[*unranked], errors="ignore").dropna()
    values = {name: estimate(kept[name].tolist()) for name in kept if len(kept)}
    return _tested_ranking("longest", arms, values, unranked, kept, longest)


def _untested(arm: ArmResult) -> str:
    """Why the losses of an arm are not tested; empty if nothing is known to prevent it."""
    if how := divergence(arm.name, arm.records):
        return how.removeprefix(f"{arm.name} ")
    return "no finished run" if arm.loss is None else "one seed" if arm.loss.n == 1 else ""


def _tested_ranking(
    quantity: Quantity, arms: Arms, values: Values, unranked: Reasons, costs: pd.DataFrame, context: int | None = None
) -> Ranking:
    """Rank by all pairs of the columns of `costs`, (rounds or seeds, arms), lower ones being better."""
    better, pairs, scale = set(), list(combinations(costs, 2)), np.abs(costs.to_numpy()).max(initial=0)
    if not all(describe((costs[a] - costs[b]).to_numpy(), scale).sd > 0 for a, b in pairs):  # without any noise
        unranked = {**dict.fromkeys(costs, "not tested"), **unranked}
    else:
        tests = zip(pairs, judge_pairs(costs, pairs), strict=True)
        better = {(a, b) if test.mean < 0 else (b, a) for (a, b), test in tests if test.significant}
    return _ranking(quantity, arms, values, unranked, better, context)


def _ranking(
    quantity: Quantity, arms: Arms, values: Values, unranked: Reasons, better: Pairs, context: int | None = None
) -> Ranking:
    ranks = rank_intervals([arm.name for arm in arms if arm.name not in unranked], better)
    standings = (Standing(n, values.get(n), ranks.get(n), unranked.get(n, "")) for n in (arm.name for arm in arms))
    return Ranking(quantity, tuple(standings), frozenset(better), context)


def _unknown(quantity: Quantity, arms: Arms, reason: str) -> Ranking:
    return _ranking(quantity, arms, {}, {arm.name: reason for arm in arms}, set())
