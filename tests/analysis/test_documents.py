"""Differences over the held-out documents, beside those over seeds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llama_lab.analysis.documents import over_documents
from llama_lab.runs.evaluation import DocumentLosses
from llama_lab.runs.record import Record

RNG = np.random.default_rng


def run(seed: int, nats: np.ndarray, tokens: np.ndarray, status: str = "done") -> Record:
    documents = DocumentLosses(tokens=tokens.tolist(), nats=nats.tolist())
    return Record(Path(), "arm", seed, status, documents=documents)


def pair(gains: np.ndarray, tokens: np.ndarray, seeds: int = 3) -> tuple[list[Record], list[Record]]:
    """Runs of an arm, and of one without its gain in nats per token on each document."""
    losses = [4 + RNG(seed).normal(0, 0.5, len(tokens)) for seed in range(seeds)]
    ours = [run(seed, (loss - gains) * tokens, tokens) for seed, loss in enumerate(losses)]
    return ours, [run(seed, loss * tokens, tokens) for seed, loss in enumerate(losses)]


def drawn(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Gains that differ from document to document by 0.1 around 0.03, and the tokens of 60 documents."""
    return generator.normal(0.03, 0.1, 60), generator.lognormal(7.5, 0.8, 60).astype(int)


def test_the_difference_is_that_of_all_tokens_and_its_interval_is_over_documents() -> None:
    gains, tokens = drawn(RNG(1))
    found = over_documents(*pair(gains, tokens))
    assert found is not None
    assert found.n == 60
    assert found.mean == pytest.approx(-(gains @ tokens) / tokens.sum())
    assert found.low < found.mean < found.high
    equal = over_documents(*pair(np.full(60, 0.03), tokens))
    assert equal is not None
    assert (equal.low, equal.high) == pytest.approx((-0.03, -0.03)), "it is the same on any document"


def test_the_interval_covers_the_gain_on_other_documents() -> None:
    covered = []
    for draw in range(300):
        found = over_documents(*pair(*drawn(RNG(draw)), seeds=1))
        assert found is not None
        covered.append(found.low <= -0.03 <= found.high)
    assert 0.9 <= np.mean(covered) <= 0.97


@pytest.mark.parametrize("lacks", ["a record", "documents", "the same documents", "a common seed"])
def test_without_the_losses_of_the_same_documents_there_is_no_interval(lacks: str) -> None:
    ours, theirs = pair(*drawn(RNG(1)))
    if lacks == "a record":
        ours[0] = replace(ours[0], documents=DocumentLosses())
    elif lacks == "documents":
        ours, theirs = pair(np.ones(4), np.array([10, 20, 30, 40]))
    elif lacks == "the same documents":
        ours = pair(*drawn(RNG(2)))[0]
    else:
        theirs = [replace(record, seed=record.seed + 3) for record in theirs]
    assert over_documents(ours, theirs) is None
