"""Limits of a study's statistics, as sentences: two seeds, repeated looks, noisy arms, models that learned little."""

import math
from collections.abc import Iterator, Mapping, Sequence

from llama_lab.runs.study import Study
from llama_lab.util.formatting import TIMES, count, number

from .result import ArmResult, Metric, unit_of

MOST_NOISE = 3.0  # standard deviation of an arm over the typical one; see docs/statistics.md
UNIGRAM = 0.97  # fraction of the entropy of token frequencies that a useful loss is below


def cautions(study: Study, arms: Sequence[ArmResult], metric: Metric, noise: Mapping[str, float]) -> Iterator[str]:
    """A sentence for everything that the verdicts do not account for.

    noise: each arm's standard deviation over seeds, relative to the typical arm's.
    """
    compared = [c for arm in arms for c in (arm.to_previous, arm.to_baseline) if c and c.change.is_tested]
    if compared and max(c.change.n for c in compared) == 2:
        others = "an arm's noise is estimated mostly from the other arms, and " if noise else ""  # of two arms: not
        yield f"Two seeds: {others}one outlier can decide a verdict."
    if study.looks:
        yield (
            f"Seeds were added after {count(study.looks, 'report')}: p and intervals no longer hold as printed. "
            f"Testing at 3, 4, 5 and 6 seeds until something is significant finds something in 6 to 12% of studies "
            f"without an effect."
        )
    for name, ratio in noise.items():
        if ratio > MOST_NOISE:
            yield (
                f"{name} varies {number(ratio, 1)}{TIMES} as much over seeds as the typical arm: where noise is "
                f"skewed, comparisons with such an arm are often falsely significant (docs/statistics.md)."
            )
    unit = unit_of(arms, "val/loss")
    for arm in arms:
        entropies = [entropy for r in arm.records if r.done and (entropy := r.environment.unigram_entropy)]
        if arm.loss and entropies and arm.loss.mean > UNIGRAM * min(entropies):
            yield (
                f"{arm.name} ends at {number(arm.loss.mean, 3)} {unit}, where token frequencies alone give "
                f"{number(min(entropies), 3)}: it has learned little else, and differences to it mean little."
            )
    lengths = {
        arm.name: next((length for r in arm.records if (length := r.environment.bytes_per_token)), math.nan)
        for arm in arms
    }
    known = {name: length for name, length in lengths.items() if not math.isnan(length)}
    if metric == "val/bits_per_byte" and len(set(known.values())) > 1:
        sizes = ", ".join(f"{length:.2f} bytes in {name}" for name, length in known.items())
        yield f"A token is {sizes}: with equal tokens an arm with longer ones has seen more text."
