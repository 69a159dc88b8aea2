"""Differences between arms over the held-out documents: other text is a source of error, as other seeds are."""

from collections.abc import Sequence

import numpy as np

from llama_lab.runs.record import Record

from .statistics import PairedDifference

DRAWS = 2000
FEWEST = 5  # documents; an interval over fewer says nothing


def over_documents(ours: Sequence[Record], theirs: Sequence[Record]) -> PairedDifference | None:
    """The mean difference of losses, in nats per token, with its 95% interval if other documents had been held out.

    By a percentile bootstrap over documents (Efron & Tibshirani 1993, section 13.3), each with the mean over the seeds
    that both arms have finished. None where losses by document are not recorded, or are of other documents.
    """
    others = {record.seed: record.documents for record in theirs if record.done}
    pairs = [(record.documents, others[record.seed]) for record in ours if record.done and record.seed in others]
    tokens = pairs[0][0].tokens if pairs else []
    if len(tokens) < FEWEST or any(one.tokens != tokens for pair in pairs for one in pair):
        return None
    differences = np.mean([np.subtract(one.nats, other.nats) for one, other in pairs], axis=0)
    generator = np.random.default_rng(0)
    counts = generator.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), DRAWS)  # of each document
    low, high = np.quantile((counts @ differences) / (counts @ np.array(tokens)), [0.025, 0.975])
    mean = differences.sum() / sum(tokens)
    return PairedDifference(len(tokens), float(mean), low=float(low), high=float(high))
