"""What limits the statistics of a study, in sentences: few seeds, many looks, noise, losses that tell nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence

from llama_lab.formatting import TIMES, count, number
from llama_lab.study.study import Study

from .result import ArmResult, Metric

MOST_NOISE = 3.0  # of an arm over the typical one, in standard deviations; see docs/statistics.md
UNIGRAM = 0.97  # of the loss of unigram frequencies


def cautions(study: Study, arms: Sequence[ArmResult], metric: Metric, noise: Mapping[str, float]) -> tuple[str, ...]:
    """A sentence for everything that the verdicts do not allow for.

    noise: of each arm, the standard deviation over seeds, over that of the typical arm.
    """
    return (
        *_two_seeds(arms),
        *_looks(study),
        *_noisy(noise),
        *_unigram(arms),
        *_tokens_of_text(arms, metric),
    )


def _two_seeds(arms: Sequence[ArmResult]) -> Iterator[str]:
    compared = [c for arm in arms for c in (arm.to_previous, arm.to_baseline) if c and not math.isnan(c.difference.p)]
    if compared and max(c.difference.n for c in compared) == 2:
        yield "Two seeds: how much an arm varies is taken from all arms, and a single odd run can make a verdict."


def _looks(study: Study) -> Iterator[str]:
    if study.looks:
        yield (
            f"Seeds were added after {count(study.looks, 'report')}: p and intervals no longer hold as printed. "
            f"Who looks at 3, 4, 5 and 6 seeds until something is significant finds it in 9 to 13% of studies without "
            f"an effect."
        )


def _noisy(noise: Mapping[str, float]) -> Iterator[str]:
    for name, ratio in noise.items():
        if ratio > MOST_NOISE:
            yield (
                f"{name} varies {number(ratio, 1)}{TIMES} as much over seeds as the typical arm: of comparisons with "
                f"such an arm, more than 5% of studies report one that is none (docs/statistics.md)."
            )


def _unigram(arms: Sequence[ArmResult]) -> Iterator[str]:
    for arm in arms:
        entropies = [t.facts["unigram_entropy"] for t in arm.records if t.done and "unigram_entropy" in t.facts]
        if arm.loss and entropies and arm.loss.mean > UNIGRAM * min(entropies):
            yield (
                f"{arm.name} ends at {number(arm.loss.mean, 3)} nats per token, where token frequencies alone give "
                f"{number(min(entropies), 3)}: it has learned little else, and differences to it mean little."
            )


def _tokens_of_text(arms: Sequence[ArmResult], metric: Metric) -> Iterator[str]:
    """How much text a token is, where arms have different tokenizers."""
    lengths = {
        arm.name: next((t.facts["bytes_per_token"] for t in arm.records if "bytes_per_token" in t.facts), math.nan)
        for arm in arms
    }
    known = {name: length for name, length in lengths.items() if not math.isnan(length)}
    if metric == "val/bits_per_byte" and len(set(known.values())) > 1:
        told = ", ".join(f"{length:.2f} bytes in {name}" for name, length in known.items())
        yield f"A token is {told}: with equal tokens an arm with longer ones has seen more text."
