"""The learning rates that an arm was trained at, and the best of them."""

import math
from itertools import cycle

import numpy as np
import pandas as pd

from .rate_choice import best_rate, chosen_rate, fitted_optimum, is_on_edge, with_collapsed
from .result import LearningRates, estimate_of
from .settings import RATE


def is_swept(runs: pd.DataFrame) -> bool:
    """Whether an arm was trained at several rates."""
    return bool(runs["rate"].nunique() > 1)


def _best_rate(runs: pd.DataFrame) -> float:
    """The rate with the lowest mean loss among those with the most finished seeds; nan if no run finished."""
    losses = runs[runs["status"] == "done"].groupby("rate")["loss"]
    found = losses.agg(["size", "mean"]).sort_values(["size", "mean"], ascending=[False, True])
    return float(found.index[0]) if len(found) else math.nan


def judged_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that an arm is judged by: all but its tuning runs.

    If learning rates are swept without tuning runs, those at the best rate; all of them if no run finished.
    """
    if runs["tunes"].notna().any():
        return runs[runs["tunes"].isna()]
    best = _best_rate(runs) if is_swept(runs) else math.nan
    return runs if math.isnan(best) else runs[runs["rate"] == best]


def learning_rates(arm: str, runs: pd.DataFrame) -> LearningRates:
    """What an arm's runs say of its learning rates."""
    best, ended = _best_rate(runs), _with_collapsed(runs.dropna(subset=["rate", "loss"]))
    by_rate = {rate: own["record"].tolist() for rate, own in runs.groupby("rate")}
    by_seed = ended.groupby("tunes")  # the tuning runs of each judged seed that finished or diverged
    tuned = {int(seed): dict(zip(own["rate"], own["loss"], strict=True)) for seed, own in by_seed}
    rates, judged = list(by_rate), judged_runs(runs)
    in_turn = zip((record.seed for record in judged["record"]), cycle(runs["tunes"].dropna().unique()), strict=False)
    at_edge = [best_rate(losses) for losses in tuned.values() if is_on_edge(losses)]
    return LearningRates(
        arm=arm,
        rates=rates,
        loss=[estimate_of(records, "val/loss") for records in by_rate.values()],
        diverged=[sum(record.status == "diverged" for record in records) for records in by_rate.values()],
        best=best,
        at_edge=at_edge if tuned else [rate for rate in (rates[0], rates[-1]) if rate == best],
        sensitivity=_sensitivity(ended),
        chosen={seed: chosen_rate(tuned[tunes]) for seed, tunes in in_turn if tunes in tuned},
        left=_left(judged, ended),
    )


def _with_collapsed(ended: pd.DataFrame) -> pd.DataFrame:
    """The ended runs, those of a seed that collapsed with infinite losses; see `with_collapsed`."""
    found = ended.copy()
    for _, own in ended.groupby([record.seed for record in ended["record"]]):
        entropy = own["record"].iloc[0].environment.unigram_entropy
        losses = with_collapsed(dict(zip(own["rate"], own["loss"], strict=True)), entropy)
        found.loc[own.index, "loss"] = [losses[rate] for rate in own["rate"]]
    return found


def _left(judged: pd.DataFrame, ended: pd.DataFrame) -> float:
    """See LearningRates; nan for fewer than two judged runs, or if the mean over tuning seeds has no optimum."""
    rates = [rate for record in judged["record"] if (rate := record.config.get(RATE))]
    # The rate that is best by luck has steep sides: curvatures of single seeds are too high
    shared = ended.pivot_table("loss", "tunes", "rate").dropna(axis="columns").mean()
    optimum = fitted_optimum(dict(shared)) if len(rates) > 1 and len(shared) else None
    return math.nan if optimum is None else float(optimum[1] * np.var(np.log(np.divide(rates, rates[0])), ddof=1))


def _sensitivity(ended: pd.DataFrame) -> float:
    """See LearningRates; nan if no run finished. A diverged run counts with the entropy of token frequencies."""
    if not (ended["status"] == "done").any():
        return math.nan
    entropy = [record.environment.unigram_entropy or math.inf for record in ended["record"]]
    by_rate = ended["loss"].where(np.isfinite(ended["loss"]), entropy).groupby(ended["rate"]).mean()
    return float(by_rate.mean() - by_rate.min())
