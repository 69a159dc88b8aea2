"""Ranks of a study's arms by loss, speed, memory and loss at longer contexts, each as far as the data determine them.

Each quantity is a family of its own: all pairs of arms, and from these the intervals of the ranks.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pandas as pd

from llama_lab.runs.study import ArmSpeed
from llama_lab.util.formatting import conjoin

from .comparisons import judge_pairs
from .result import ArmResult, Quantity, Ranking, Result, Standing, common_losses
from .sentences import divergence
from .statistics import Estimate, describe, estimate, geometric_mean, rank_intervals

Names = Sequence[str]  # of all arms
Values = Mapping[str, Estimate]
Reasons = Mapping[str, str]  # why arms are not ranked
Pairs = Set[tuple[str, str]]  # of arms, the better one first

SPEED_QUANTITIES: tuple[Quantity, ...] = ("train", "decode", "prefill")  # fields of ArmSpeed
CACHE, MEMORY = "kv_cache/bytes", "perf/peak_memory_bytes"


def rankings(result: Result) -> tuple[Ranking, ...]:
    """The arms ranked by everything that one may choose by; empty unless the study compares all pairs."""
    if result.study.compare != "all":
        return ()
    names, speeds = [arm.name for arm in result.arms], result.speed.arms if result.speed else {}
    looped = {record.arm for record in result.started if "loop" in record.environment.experts_kernel}
    memory = {name: found.costs[MEMORY] for name, found in speeds.items() if found.memory}
    caches = {arm.name: arm.costs[CACHE] for arm in result.arms if CACHE in arm.costs}
    return (
        _by_loss(result, names),
        *(_by_speed(quantity, names, speeds, looped) for quantity in SPEED_QUANTITIES),
        _by_size("memory", names, memory, "measured on GPUs only"),
        _by_size("cache", names, caches, "not known"),
        _at_longest(result, names),
    )


def _by_loss(result: Result, names: Names) -> Ranking:
    if len(result.targets) > 1:
        reason = f"losses of {conjoin(result.targets)} do not compare"
        return _ranking("loss", names, {}, dict.fromkeys(names, reason), None)
    tested = {name for c in result.pairs if c.change.is_tested for name in (c.arm, c.against)}
    clear = [(c.change.mean, c.arm, c.against) for c in result.pairs if c.change.significant]
    common = common_losses(result.arms, result.metric)
    values = {name: estimate(common[name].tolist()) for name in common if len(common)}
    unranked = {arm.name: _untested(arm) or "not tested" for arm in result.arms if arm.name not in tested}
    return _ranking("loss", names, values, unranked, {(a, b) if mean < 0 else (b, a) for mean, a, b in clear})


def _by_speed(quantity: Quantity, names: Names, speeds: Mapping[str, ArmSpeed], looped: Set[str]) -> Ranking:
    """By rounds of measuring. looped: the arms whose experts are computed one by one, which no kernel would."""
    measured = {name: found for name, arm in speeds.items() if (found := getattr(arm, quantity))}
    rounds = pd.DataFrame({name: found for name, found in measured.items() if name not in looped})
    values = {name: geometric_mean(rounds[name].tolist()) for name in rounds}
    unranked = {name: "not measured" for name in names if name not in measured}
    unranked |= {name: "its experts are computed one by one" for name in names if name in looped}
    return _ranking(quantity, names, values, unranked, _better(-np.log(rounds)))


def _by_size(quantity: Quantity, names: Names, sizes: Mapping[str, float], unknown: str) -> Ranking:
    """By numbers of bytes, which are exact."""
    unranked = {name: unknown for name in names if name not in sizes}
    smaller = {(a, b) for a, b in permutations(sizes, 2) if sizes[a] < sizes[b]}
    return _ranking(quantity, names, {name: Estimate(1, size) for name, size in sizes.items()}, unranked, smaller)


def _at_longest(result: Result, names: Names) -> Ranking:
    """By the loss at the longest context that was evaluated, over the seeds that all ranked arms have."""
    entries = [
        (arm.name, record.seed, entry.length, entry.loss, entry.note.removeprefix("cannot: "))
        for arm in result.arms
        for record in arm.records
        for entry in record.evaluation.lengths
    ]
    rows = pd.DataFrame(entries, columns=["arm", "seed", "length", "loss", "note"]).astype({"loss": float})
    if rows["length"].nunique() < 2:
        return _ranking("longest", names, {}, dict.fromkeys(names, "not evaluated beyond the trained context"), None)
    if result.metric != "val/loss":
        return _ranking("longest", names, {}, dict.fromkeys(names, "nats of different tokens cannot be compared"), None)
    longest = int(rows["length"].max())
    rows = rows[rows["length"] == longest]
    notes = dict(rows.loc[rows["loss"].isna(), ["arm", "note"]].itertuples(index=False))
    losses = rows.pivot_table("loss", "seed", "arm", aggfunc="last")
    unranked = {arm.name: reason for arm in result.arms if (reason := notes.get(arm.name) or _untested(arm))}
    unranked |= {name: "not evaluated" for name in names if name not in {*losses, *unranked}}
    kept = losses.drop(columns=[*unranked], errors="ignore").dropna()
    values = {name: estimate(kept[name].tolist()) for name in kept if len(kept)}
    better = _better(kept, result.study.level_share(len(kept)))
    return replace(_ranking("longest", names, values, unranked, better), context=longest)


def _untested(arm: ArmResult) -> str:
    """Why the losses of an arm are not tested; empty if nothing is known to prevent it."""
    if how := divergence(arm.name, arm.records):
        return how.removeprefix(f"{arm.name} ")
    return "no finished run" if arm.loss is None else "one seed" if arm.loss.n == 1 else ""


def _better(costs: pd.DataFrame, share: float = 1.0) -> Pairs | None:
    """The significant pairs of columns, (rounds or seeds, arms), lower ones being better; None if none can be tested.

    share: of the 5% level.
    """
    scale = np.abs(costs.to_numpy()).max(initial=0)
    pairs = [(a, b) for a, b in combinations(costs, 2) if describe((costs[a] - costs[b]).to_numpy(), scale).sd > 0]
    if share == 0 or (len(costs.columns) > 1 and not pairs):
        return None
    tests = zip(pairs, judge_pairs(costs, pairs, [share] * len(pairs)), strict=True)
    return {(a, b) if test.mean < 0 else (b, a) for (a, b), test in tests if test.significant}


def _ranking(quantity: Quantity, names: Names, values: Values, unranked: Reasons, better: Pairs | None) -> Ranking:
    """Better: None where no pair is tested."""
    why = unranked if better is not None else {**dict.fromkeys(names, "not tested"), **unranked}
    ranks = rank_intervals([name for name in names if name not in why], better or ())
    standings = (Standing(name, values.get(name), ranks.get(name), why.get(name, "")) for name in names)
    return Ranking(quantity, tuple(standings), frozenset(better or ()))
