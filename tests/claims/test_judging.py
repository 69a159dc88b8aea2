"""Verdicts against simulated results of every kind."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from llama_lab.analysis.result import Comparison
from llama_lab.analysis.statistics import paired_difference
from llama_lab.claims.claim import Figure, Statement
from llama_lab.claims.judging import is_within, judge, recompute

SEEDS = tuple(range(1, 9))


def statement(expects: str, size: float | None = None) -> Statement:
    return Statement("", "", "new", "old", expects, 0.02, size)  # type: ignore[arg-type]


def simulated(mean: float, sd: float) -> Comparison:
    """Paired losses whose differences have exactly this mean and standard deviation."""
    noise = np.random.default_rng(0).normal(size=len(SEEDS))
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    old = 4 + 0.1 * np.arange(len(SEEDS))
    nats = paired_difference([*(old + mean + sd * noise)], [*old])
    return Comparison("new", "old", SEEDS, nats, nats)


CASES = {
    ("lower", None, -0.1, 0.05): "holds",
    ("higher", None, -0.1, 0.05): "opposite",
    ("lower", None, 0.1, 0.05): "opposite",
    ("lower", None, 0.001, 0.005): "does not hold",
    ("lower", None, -0.03, 0.1): "not decided",
    ("lower", -0.1, -0.11, 0.03): "holds",
    ("lower", -0.5, -0.1, 0.03): "direction holds, size does not",
    ("equal", None, 0.002, 0.01): "holds",
    ("equal", None, 0.1, 0.05): "does not hold",
    ("equal", None, -0.1, 0.05): "does not hold",
    ("equal", None, 0.01, 0.1): "not decided",
    ("equal", None, 0.022, 0.01): "not decided",  # significant, but perhaps smaller than the margin
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_verdict_follows_from_the_interval(case: tuple[str, float | None, float, float]) -> None:
    expects, size, mean, sd = case
    found = judge(statement(expects, size), simulated(mean, sd), detectable=0.05)
    assert found.word == CASES[case]
    assert "8 seeds" in found.why
    assert ("could detect 0.05" in found.why) == (found.word == "not decided")


def test_what_was_not_run_has_no_verdict() -> None:
    assert judge(statement("lower"), None).word == "not run"
    one_seed = Comparison("new", "old", (1,), paired_difference([4.0], [4.1]), None)
    assert judge(statement("lower"), one_seed).word == "not run"


@given(st.floats(-0.03, 0.03), st.floats(0.001, 0.05))
def test_equality_is_two_one_sided_tests_of_scipy(mean: float, sd: float) -> None:
    found = simulated(mean, sd).nats
    assert found is not None
    noise = np.random.default_rng(0).normal(size=len(SEEDS))
    differences = mean + sd * (noise - noise.mean()) / noise.std(ddof=1)
    above = stats.ttest_1samp(differences, -0.02, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.02, alternative="less").pvalue
    if not math.isclose(max(above, below), 0.05, rel_tol=1e-6):
        assert is_within(found.mean, found.error, found.df, 0.02) == (max(above, below) < 0.05)


def test_a_figure_holds_if_the_computed_one_agrees() -> None:
    wrong, right = (recompute(Figure("", "", says, "qkv_saved_by_4_kv_heads", 0.01)) for says in (0.33, 0.44))
    assert (wrong.word, right.word) == ("does not hold", "holds")
    assert "0.444444" in wrong.why
