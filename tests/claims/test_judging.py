"""Verdicts against simulated results of every kind."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from llama_lab.analysis.result import ArmResult, Comparison, LearningRates, Result
from llama_lab.analysis.statistics import Estimate, paired_difference
from llama_lab.claims.claim import Figure, Statement
from llama_lab.claims.judging import Verdict, comparison, confirmed, judge, recompute, verdict
from llama_lab.runs.evaluation import Evaluation, LengthLoss
from llama_lab.runs.record import Record
from llama_lab.runs.stored import Environment
from llama_lab.runs.study import Arm, ArmSpeed, Study, StudySpeed

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
    ("lower", None, 0.1, 0.05): "opposite",
    ("lower", None, 0.001, 0.005): "does not hold",
    ("lower", None, -0.014, 0.001): "does not hold",  # it is lower by less than matters
    ("lower", None, -0.022, 0.01): "not decided",
    ("lower", None, -0.03, 0.1): "not decided",
    ("higher", 0.1, -0.11, 0.03): "opposite",
    ("lower", -0.1, -0.11, 0.03): "holds",
    ("lower", -0.5, -0.1, 0.03): "direction holds, size does not",
    ("lower", -0.2, -0.02, 0.05): "does not hold",  # nor any size near the one that is claimed
    ("equal", None, 0.002, 0.01): "holds",
    ("equal", None, 0.1, 0.05): "does not hold",
    ("equal", None, 0.01, 0.1): "not decided",
    ("equal", None, 0.022, 0.01): "not decided",  # significant, but perhaps smaller than the margin
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_verdict_follows_from_the_interval(case: tuple[str, float | None, float, float]) -> None:
    expects, size, mean, sd = case
    found = judge(statement(expects, size), simulated(mean, sd), detectable=0.05)
    assert found.word == CASES[case]
    assert ("could detect 0.05" in found.why) == (found.word == "not decided")


def test_what_was_not_run_has_no_verdict() -> None:
    assert judge(statement("lower"), None).word == "not run"
    one_seed = Comparison("new", "old", (1,), paired_difference([4.0], [4.1]), None)
    assert judge(statement("lower"), one_seed).word == "not run"


@pytest.mark.parametrize(
    ("expects", "mean", "word"), [("lower", -0.02, "holds"), ("lower", 0.02, "opposite"), ("equal", 0.02, "holds")]
)
def test_a_wrong_verdict_is_as_rare_as_its_level(expects: str, mean: float, word: str) -> None:
    draws = np.random.default_rng(0).normal(mean, 0.01, size=(2000, len(SEEDS)))
    words = []
    for differences in draws:
        nats = paired_difference([*(4 + differences)], [4.0] * len(SEEDS))
        words.append(judge(statement(expects), Comparison("new", "old", SEEDS, nats, nats)).word)
    assert 0.015 < words.count(word) / len(draws) < 0.035


def test_nothing_is_decided_on_a_size_that_could_not_be_seen() -> None:
    seen, unseen = (judge(statement("lower", -0.1), simulated(-0.11, 0.03), could) for could in (0.09, 0.11))
    assert seen.word == "holds"
    assert unseen.word == "not decided"
    assert "-0.1 is claimed (could detect 0.11)" in unseen.why


def study_of(**arms: ArmResult) -> Result:
    """A study of two arms, its speeds by round those of TRAIN."""
    speed = StudySpeed("cpu", 1, "32-true", 1, "2", {name: ArmSpeed(speeds, []) for name, speeds in TRAIN.items()})
    study = Study("s", "options", "old", tuple(arm.arm for arm in arms.values()))
    return Result(study, arms=tuple(arms.values()), speed=speed)


TRAIN = {"new": [79.0, 80.0, 82.0], "old": [100.0, 101.0, 99.0]}
LOSSES = {"new": [5.0, 5.2, 5.1], "old": [4.0, 4.1, 4.05]}


def with_losses(*more: Record) -> Result:
    """A study of two arms with these losses of the longest windows and of averages, and more runs of the first arm."""
    arms = {}
    for name, losses in LOSSES.items():
        runs = []
        for seed, loss in enumerate(losses):
            longest = Evaluation(lengths=[LengthLoss(8, 1.0), LengthLoss(16, loss)])
            summary = {"val/loss": 1.0, "val/ema_loss": loss}
            runs.append(Record(Path(), name, seed, "done", evaluation=longest, summary=summary))
        arms[name] = ArmResult(Arm(name, {}), (), (*runs, *(more if name == "new" else ())), None, None)
    return study_of(**arms)


def tuned(study: Result) -> Result:
    """The study with a rate of its own for each arm."""
    rates = [LearningRates(arm.name, [], [], [], 1e-3, [], 0.0, chosen={1: 1e-3}) for arm in study.arms]
    return replace(study, learning_rates=tuple(rates))


@pytest.mark.parametrize(("mean", "word"), [(-0.1, "holds"), (0.1, "opposite"), (0.001, "does not hold")])
def test_losses_at_one_rate_for_all_arms_contradict_nobody(mean: float, word: str) -> None:
    study = replace(with_losses(), pairs=(simulated(mean, 0.005),))
    at_one, at_own = verdict(statement("lower"), study), verdict(statement("lower"), tuned(study))
    assert at_own.word == (word if word == "holds" else f"{word}, once")
    if word == "holds":
        assert at_one == replace(at_own, word="holds at one rate")
    else:
        assert at_one == Verdict("not decided", f"{at_own.why}; at one rate, at which it is {word}")


@pytest.mark.parametrize(
    ("seeds", "text", "other", "word"),
    [
        ((4, 5), "two", "opposite, once", "opposite"),
        ((4, 5), "one", "opposite, once", "opposite, once"),
        ((2, 3), "two", "opposite, once", "opposite, once"),
        ((4, 5), "two", "not decided", "opposite, once"),
    ],
    ids=["repeated", "the same text", "a common seed", "another verdict"],
)
def test_what_contradicts_a_source_is_repeated_with_other_seeds_and_text(
    seeds: tuple[int, ...], text: str, other: Any, word: str
) -> None:
    def study(seeds: tuple[int, ...], text: str) -> Result:
        run = Record(Path(), "new", 1, "done", environment=Environment(data_hash=text))
        return replace(with_losses(), seeds=seeds, records=(run,))

    found = [Verdict("opposite, once", ""), Verdict(other, "")]
    assert confirmed(found, [study((1, 2), "one"), study(seeds, text)])[0].word == word
    assert confirmed(found[:1], [study((1, 2), "one")])[0].word == "opposite, once"


def test_extrapolation_is_the_change_from_the_trained_length() -> None:
    study = with_losses()
    worse = Evaluation(lengths=[LengthLoss(8, 5.0), LengthLoss(16, 5.0)])  # at any length
    flat = [replace(run, evaluation=worse) for run in study.arms[0].records]
    arms = (replace(study.arms[0], records=tuple(flat)), study.arms[1])
    found = comparison(replace(statement("higher"), quantity="longest"), replace(study, arms=arms))
    assert found is not None
    assert found.change.mean == pytest.approx(1 - np.mean(LOSSES["old"]))


def test_speeds_are_judged_by_the_logarithm_of_their_ratio_over_rounds() -> None:
    said = replace(statement("lower", math.log(0.8)), quantity="train")
    found = comparison(said, with_losses())
    assert found is not None
    assert found.change.mean == pytest.approx(math.log(79 / 100 * 80 / 101 * 82 / 99) / 3)
    assert verdict(said, with_losses()).word == "holds"
    assert "log" in verdict(said, with_losses()).why
    assert verdict(replace(said, quantity="decode"), with_losses()).word == "not run"


def test_a_pair_of_arms_is_found_in_either_order() -> None:
    found = simulated(-0.1, 0.03)
    study = replace(with_losses(), pairs=(found,))
    assert comparison(statement("lower"), study) == found
    other = replace(statement("higher"), arm="old", against="new")
    assert found.nats is not None
    assert verdict(statement("lower"), study).word == verdict(other, study).word == "holds at one rate"
    assert f"+{-found.nats.low:.3f}]" in verdict(other, study).why


@pytest.mark.parametrize("quantity", ["longest", "average"])
def test_losses_of_longer_windows_and_of_averages_are_paired_by_seed(quantity: str) -> None:
    said = replace(statement("higher"), quantity=quantity)
    assert verdict(said, tuned(with_losses())).word == "holds"
    assert verdict(replace(said, arm="another"), with_losses()).word == "not run"


@given(st.floats(-0.03, 0.03), st.floats(0.001, 0.05))
def test_equality_is_two_one_sided_tests_of_scipy(mean: float, sd: float) -> None:
    noise = np.random.default_rng(0).normal(size=len(SEEDS))
    differences = mean + sd * (noise - noise.mean()) / noise.std(ddof=1)
    above = stats.ttest_1samp(differences, -0.02, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.02, alternative="less").pvalue
    if not math.isclose(max(above, below), 0.025, rel_tol=1e-6):
        assert (judge(statement("equal"), simulated(mean, sd)).word == "holds") == (max(above, below) < 0.025)


@pytest.mark.parametrize("quantity", ["loss", "longest", "average"])
def test_nothing_is_decided_on_an_arm_that_diverged_in_a_seed_or_before_all_runs_have_ended(quantity: str) -> None:
    said = replace(statement("higher"), quantity=quantity)
    diverged, partial = (verdict(said, with_losses(Record(Path(), "new", 3, end))) for end in ("diverged", "running"))
    assert diverged.word == "not decided"
    assert diverged.why.startswith("new diverged in 1 of ")
    if quantity != "loss":
        assert partial == Verdict("not decided", "1 of 7 runs are missing")


@pytest.mark.parametrize(("share", "word"), [(0.3, "not decided"), (0.9, "holds")])
def test_a_probe_that_neither_arm_has_learned_decides_nothing(share: float, word: str) -> None:
    nats = paired_difference([1.5, 1.6, 1.55, 1.5], [1.4, 1.4, 1.4, 1.4])
    probe = Environment(entropy_floor=0.0)
    arms = {}
    for name, accuracy in {"new": 0.2, "old": share}.items():
        run = Record(Path(), name, 1, "done", environment=probe)
        arms[name] = ArmResult(Arm(name, {}), (), (run,), None, None, accuracy=Estimate(4, accuracy))
    study = tuned(replace(study_of(**arms), pairs=(Comparison("new", "old", (0, 1, 2, 3), nats, nats),)))
    found = verdict(statement("higher"), study)
    assert found.word == word
    assert ("per answer" in found.why) == (word == "holds")


def test_a_figure_holds_if_the_computed_one_agrees() -> None:
    wrong, right = (recompute(Figure("", "", says, 0.01, "qkv_saved", [4])) for says in (0.33, 0.44))
    assert (wrong.word, right.word) == ("does not hold", "holds")
    assert "0.444444" in wrong.why
