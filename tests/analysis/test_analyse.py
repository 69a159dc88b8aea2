"""The analysis of synthetic studies on disk, with known effects."""

import itertools
import json
import math
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import ArmResult, Result
from llama_lab.analysis.statistics import judge
from llama_lab.report.summary import summary_rows
from llama_lab.report.tables import tables
from llama_lab.runs.study import Study
from llama_lab.util.formatting import MINUS, p_value
from tests.analysis.synthetic import (
    BYTES_PER_TOKEN,
    STEPS,
    TOKENS_PER_STEP,
    plant_config,
    plant_cut_line,
    plant_end,
    plant_facts,
    remove_run,
    run_folder,
    write_study,
)
from tests.conftest import unstamped

pytestmark = pytest.mark.filterwarnings("error")

CACHE = "kv_cache/bytes_per_token"
LADDER = {"vanilla": 0.0, "prenorm": -0.2, "rmsnorm": -0.2, "rope": -0.3, "relu": -0.15}


def arm(result: Result, name: str) -> ArmResult:
    """The arm of that name."""
    return next(arm for arm in result.arms if arm.name == name)


def final_losses(folder: Path, name: str, seeds: tuple[int, ...] = (1, 2, 3)) -> list[float]:
    """The losses of an arm's runs, read without the package."""
    files = [folder / name / f"seed={seed}" / "summary.json" for seed in seeds]
    return [json.loads(file.read_text())["val/loss"] for file in files]


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A ladder of four steps: down, nothing, down, up."""
    folder = tmp_path_factory.mktemp("ladder")
    return folder, analyse(write_study(folder, LADDER), folder)


def test_two_arms_are_judged_by_scipys_paired_t_test_in_both_units(tmp_path: Path) -> None:
    result = analyse(write_study(tmp_path, {"base": 0.0, "arm": -0.01}, design="recipes"), tmp_path)
    found = arm(result, "arm").to_baseline
    assert found is not None
    assert found.nats is not None
    assert (found.against, found.seeds) == ("base", (1, 2, 3))
    expected = stats.ttest_rel(final_losses(tmp_path, "arm"), final_losses(tmp_path, "base"))
    interval = expected.confidence_interval()
    assert found.nats.p == pytest.approx(expected.pvalue, rel=1e-3)
    assert (found.nats.low, found.nats.high) == pytest.approx((interval.low, interval.high), abs=1e-4)
    assert found.bits.p == pytest.approx(expected.pvalue, rel=1e-3)
    assert found.bits.mean == pytest.approx(found.nats.mean / math.log(2) / BYTES_PER_TOKEN)


def test_the_steps_of_a_ladder_and_its_ends_are_one_family(ladder: tuple[Path, Result]) -> None:
    folder, result = ladder
    losses = np.array([final_losses(folder, name) for name in LADDER])
    signs = np.vstack([np.eye(5)[1:] - np.eye(5)[:-1], np.eye(5)[4] - np.eye(5)[0]])
    *steps, last = judge(list(signs @ losses), signs @ signs.T / 2)
    for contrast, a in zip(steps, result.arms[1:], strict=True):
        difference = a.to_previous.nats
        assert (difference.mean, difference.p) == pytest.approx((contrast.mean, contrast.p))
        assert (difference.low, difference.high) == pytest.approx((contrast.low, contrast.high))
        in_bits = (x / math.log(2) / BYTES_PER_TOKEN for x in (contrast.mean, contrast.low, contrast.high))
        bits = a.to_previous.bits
        assert (bits.mean, bits.low, bits.high, bits.p) == pytest.approx((*in_bits, contrast.p))
    ends = arm(result, "relu").to_baseline.nats
    assert (ends.low, ends.high, ends.p) == pytest.approx((last.low, last.high, last.p))
    assert result.tests == "moderated paired tests of the 4 steps and the last arm against the first"


@pytest.fixture(scope="module")
def all_pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The ladder's runs, each arm compared with every other one."""
    folder = tmp_path_factory.mktemp("pairs")
    study = replace(write_study(folder, LADDER), compare="all")
    study.save(folder)
    return folder, analyse(Study.load(folder), folder)


def test_all_pairs_are_one_family(all_pairs: tuple[Path, Result]) -> None:
    folder, result = all_pairs
    losses = np.array([final_losses(folder, name) for name in LADDER])
    pairs = [(c.arm, c.against) for c in result.pairs]
    assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in combinations(LADDER, 2)}
    names = list(LADDER)
    signs = np.array([np.eye(5)[names.index(arm)] - np.eye(5)[names.index(against)] for arm, against in pairs])
    contrasts = judge(list(signs @ losses), signs @ signs.T / 2)
    for contrast, comparison in zip(contrasts, result.pairs, strict=True):
        assert (comparison.change.mean, comparison.change.p) == pytest.approx((contrast.mean, contrast.p))
        assert (comparison.change.low, comparison.change.high) == pytest.approx((contrast.low, contrast.high))
    for found in result.arms[1:]:
        assert {found.to_previous, found.to_baseline} <= set(result.pairs)
    assert result.tests == "moderated paired tests of the 10 pairs of arms"
    assert {(curve.name, curve.against) for curve in result.difference_curves} == set(pairwise(names[::-1]))


def test_ranks_are_what_the_significant_pairs_allow_and_the_answer_names_who_may_be_first(
    all_pairs: tuple[Path, Result],
) -> None:
    _, result = all_pairs
    clear = [c.change.mean for c in result.pairs if c.change.significant]
    assert 0 < len(clear) < 10
    assert sum(best - 1 for best, _ in result.ranks.values()) == len(clear)
    assert sum(5 - worst for _, worst in result.ranks.values()) == len(clear)
    lowest = min(result.arms, key=lambda found: found.loss.mean)
    assert result.ranks[lowest.name][0] == 1
    (said,) = (sentence for sentence in result.answer if "pairs of arms" in sentence and sentence.startswith("Of"))
    assert said.startswith(f"Of 10 pairs of arms, {len(clear)} differ significantly; no arm is significantly below ")
    assert lowest.name in said
    table = tables(result)["pairs"]
    assert table.head == ["Arm", "Rank", *list(LADDER)[:-1]]
    first = table.rows[1][2]
    comparison = next(c for c in result.pairs if (c.arm, c.against) == ("prenorm", "vanilla"))
    assert first == f"{comparison.change.text}\n{p_value(comparison.change.p)}"
    assert summary_rows(result)[0]["rank_from"] == result.ranks["vanilla"][0]


def test_what_is_in_no_family_is_described_and_not_tested(ladder: tuple[Path, Result]) -> None:
    between = arm(ladder[1], "rope").to_baseline
    assert between.nats.mean < 0
    assert all(map(math.isnan, (between.nats.low, between.nats.high, between.nats.p)))
    assert not between.change.significant


def test_the_answer_says_what_helped_what_hurt_and_what_is_not_significant(ladder: tuple[Path, Result]) -> None:
    _, result = ladder
    helped, hurt, unclear, needed, ends, tests = result.answer
    assert helped.startswith(f"2 of 4 steps lowered the loss: prenorm ({MINUS}0.")
    assert "rope (" in helped
    assert "nats per token" in helped
    assert "bits per byte" not in " ".join(result.answer)
    assert hurt.startswith("1 of 4 steps raised the loss: relu (+0.1")
    assert unclear.startswith("rmsnorm is not significant with 3 seeds; a change of more than 0.0")
    assert unclear.endswith("nats per token is excluded.")
    assert needed.startswith("Finding such a change would need ")
    assert ends.startswith(f"From the first arm, vanilla, to the last, relu, the loss changed by {MINUS}0.1")
    assert result.tests in tests


def test_what_is_excluded_is_what_the_interval_leaves_out(ladder: tuple[Path, Result]) -> None:
    step = arm(ladder[1], "rmsnorm").to_previous.nats
    assert 0.001 < (step.high - step.low) / 2 < 0.1
    digits = 3 if step.high - step.low > 0.02 else 4  # two of the half-width
    assert f"of more than {max(-step.low, step.high):.{digits}f} nats" in ladder[1].answer[2]


def test_seeds_are_needed_where_nothing_is_significant_and_nowhere_else(ladder: tuple[Path, Result]) -> None:
    _, result = ladder
    assert arm(result, "rmsnorm").to_previous.seeds_needed is not None
    assert arm(result, "rope").to_previous.seeds_needed is None


def test_no_seeds_would_find_a_difference_of_zero(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0}, seeds=(1, 2), design="comparison")
    for name, seed, loss in (("a", 1, 3.5), ("a", 2, 3.75), ("b", 1, 3.75), ("b", 2, 3.5)):
        bits = loss / math.log(2) / BYTES_PER_TOKEN
        plant_facts(run_folder(tmp_path, study, name, seed), **{"val/loss": loss, "val/bits_per_byte": bits})
    result = analyse(study, tmp_path)
    comparison = arm(result, "b").to_baseline
    assert (comparison.change.mean, comparison.change.is_tested) == (0.0, True)
    assert comparison.seeds_needed is None
    assert not any("would need" in sentence for sentence in result.answer)


@pytest.mark.usefixtures("with_curves")
def test_analysing_the_same_study_twice_gives_the_same_result(ladder: tuple[Path, Result]) -> None:
    folder, result = ladder
    assert repr(analyse(Study.load(folder), folder)) == repr(result)


def test_runs_may_lie_elsewhere(tmp_path: Path) -> None:
    study = write_study(tmp_path / "made", {"a": 0.0, "b": -0.1})
    record = unstamped(tmp_path / "made" / "study.yaml")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "study.yaml").write_text(record.replace("folder: ", f"folder: {tmp_path / 'made'}/"))
    there = analyse(Study.load(tmp_path / "report"), tmp_path / "report")
    assert arm(there, "b").to_baseline == arm(analyse(study, tmp_path / "made"), "b").to_baseline


def test_runs_trained_under_another_name_have_the_name_of_their_arm(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"ours": 0.0, "theirs": -0.1}, facts={"theirs": {"arm": "base", "device": "cuda"}})
    result = analyse(study, tmp_path)
    assert {record.arm for record in arm(result, "theirs").records} == {"theirs"}
    assert any("cuda in theirs" in warning for warning in result.warnings)


def test_a_better_arm_reaches_the_baselines_loss_with_fewer_tokens(ladder: tuple[Path, Result]) -> None:
    folder, result = ladder
    target = np.mean(final_losses(folder, "vanilla"))
    reached = []
    for seed in (1, 2, 3):
        lines = (folder / "rope" / f"seed={seed}" / "metrics.csv").read_text().splitlines()
        rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
        curve = [(float(row["val/loss"]), float(row["tokens"])) for row in rows if row["val/loss"]]
        losses, tokens = zip(*reversed(curve), strict=True)  # it falls all the way, and np.interp wants it to rise
        reached.append(np.interp(target, losses, tokens))
    found = arm(result, "rope").to_reach
    assert found["tokens"] == pytest.approx(np.mean(reached))
    assert found["flops"] == pytest.approx(found["tokens"] * 8678400)
    assert found["seconds"] == pytest.approx(found["tokens"] / 12_000)
    assert found["tokens"] < 0.9 * STEPS * TOKENS_PER_STEP


def test_an_arm_that_is_censored_in_a_seed_is_no_faster_for_it(tmp_path: Path) -> None:
    """Means over only the seeds that reached it would make every null arm look faster than the baseline."""
    result = analyse(write_study(tmp_path, {"base": 0.0, "equal": 0.0, "worse": 0.5, "better": -0.3}), tmp_path)
    losses = {name: final_losses(tmp_path, name) for name in ("base", "equal")}
    above = {
        seed for seed, ours, theirs in zip((1, 2, 3), losses["equal"], losses["base"], strict=True) if ours > theirs
    }
    assert 0 < len(above) < 3
    assert arm(result, "equal").to_reach == arm(result, "worse").to_reach == {}
    equal, worse, better = (arm(result, name).reach for name in ("equal", "worse", "better"))
    assert equal.censored == above
    assert all(equal.ratios[seed] == 1 if seed in above else equal.ratios[seed] < 1 for seed in (1, 2, 3))
    assert equal.ratio is None
    assert worse.censored == {1, 2, 3}
    assert better.censored == set()
    assert better.ratio.mean == pytest.approx(stats.gmean(list(better.ratios.values())))
    assert better.ratio.low < better.ratio.mean < better.ratio.high < 1
    assert set(arm(result, "base").reach.ratios.values()) == {1.0}


def test_costs_are_read_and_speed_is_the_mean_over_seeds(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"mha": 0.0, "gqa": 0.01}, facts={"gqa": {"kv_cache/bytes_per_token": 1024}})
    for seed, speed in ((1, 10_000.0), (2, 11_000.0), (3, 15_000.0)):
        plant_facts(run_folder(tmp_path, study, "gqa", seed), **{"perf/tokens_per_second": speed})
    result = analyse(study, tmp_path)
    assert arm(result, "gqa").costs["kv_cache/bytes_per_token"] == 1024
    assert arm(result, "gqa").costs["perf/tokens_per_second"] == 12_000
    assert arm(result, "gqa").costs["seq_len"] == 256
    assert "perf/mfu" not in arm(result, "gqa").costs


def test_the_fronts_hold_the_arms_that_nothing_beats_in_loss_and_cost(tmp_path: Path) -> None:
    facts = {
        "mha": {"kv_cache/bytes_per_token": 2048},
        "gqa": {"kv_cache/bytes_per_token": 1024},
        "bad": {"kv_cache/bytes_per_token": 1024},
    }
    study = write_study(tmp_path, {"mha": 0.0, "gqa": 0.1, "bad": 0.3}, facts=facts)
    for seed in (1, 2, 3):
        plant_facts(run_folder(tmp_path, study, "bad", seed), **{"perf/tokens_per_second": 20_000.0})
    result = analyse(study, tmp_path)
    assert result.front(CACHE) == ("mha", "gqa")
    assert result.front("perf/tokens_per_second") == ("mha", "bad")


def test_a_curve_is_the_mean_and_range_of_its_seeds(ladder: tuple[Path, Result]) -> None:
    folder, result = ladder
    (curve,) = [c for c in result.curves if c.arm == "rope" and c.metric == "val/loss"]
    losses = final_losses(folder, "rope")
    assert (curve.mean[-1], curve.low[-1], curve.high[-1]) == (pytest.approx(np.mean(losses)), min(losses), max(losses))
    assert curve.tokens[-1] == STEPS * TOKENS_PER_STEP
    assert curve.flops[-1] == STEPS * TOKENS_PER_STEP * 8678400
    assert curve.seconds[-1] == pytest.approx(curve.tokens[-1] / 12_000)
    assert {c.metric for c in result.curves} == {"val/loss", "train/loss"}


def test_a_long_curve_is_thinned_and_keeps_its_last_point(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0}, seeds=(1,))
    table = run_folder(tmp_path, study, "arm", 1) / "metrics.csv"
    header = table.read_text().splitlines()[0]
    table.write_text(
        "\n".join([header, *(f"{n},{n * 10},{n / 10},,{5 - n / 1000},1.5,,,,,," for n in range(1, 1000))]) + "\n"
    )
    (curve,) = [c for c in analyse(study, tmp_path).curves if c.arm == "arm" and c.metric == "val/loss"]
    assert 100 < len(curve.tokens) == len(curve.mean) <= 200
    assert (curve.tokens[-1], curve.mean[-1]) == (9990, 5 - 999 / 1000)
    assert curve.tokens == sorted(curve.tokens)


def test_a_half_written_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": -0.1})
    whole = analyse(study, tmp_path)
    plant_cut_line(run_folder(tmp_path, study, "arm", 2))  # the last line holds the last validation loss
    cut = analyse(study, tmp_path)
    before, after = (next(c for c in r.curves if c.arm == "arm" and c.metric == "val/loss") for r in (whole, cut))
    assert after.tokens == before.tokens[:-1]
    assert arm(cut, "arm").loss == arm(whole, "arm").loss  # summary.json has it


def test_a_diverged_run_is_reported_and_left_out_of_its_pair(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "postnorm": 0.1})
    plant_end(run_folder(tmp_path, study, "postnorm", 2), "diverged", "the training loss is nan at step 60", 7)
    result = analyse(study, tmp_path)
    ((_, record),) = result.unfinished
    assert (record.arm, record.seed, record.status) == ("postnorm", 2, "diverged")
    (row,) = tables(result)["unfinished"].rows
    assert row[-2:] == [f"{60 * TOKENS_PER_STEP:,}", "the training loss is nan at step 60"]
    comparison = arm(result, "postnorm").to_baseline
    assert comparison is not None
    assert comparison.seeds == (1, 3)
    assert arm(result, "postnorm").to_reach == {}
    assert all(c.tokens[-1] > 0.95 * STEPS * TOKENS_PER_STEP for c in result.curves)  # of the runs that finished
    assert len(arm(result, "postnorm").records) == 3


def test_survivors_of_a_divergence_are_not_judged_and_the_answer_says_how_many_diverged(tmp_path: Path) -> None:
    """A regression test: with two of five seeds diverged, the arm was said to have lowered the loss, p = 0.001."""
    seeds = (1, 2, 3, 4, 5)
    study = write_study(tmp_path, {"base": 0.0, "bold": -0.3, "other": -0.3}, seeds, design="recipes")
    for seed in (2, 4):
        plant_end(run_folder(tmp_path, study, "bold", seed), "diverged", "nan", 7)
    result = analyse(study, tmp_path)
    comparison = arm(result, "bold").to_baseline
    assert comparison.untested == "bold diverged in 2 of 5 seeds"
    assert not comparison.change.significant
    assert all(map(math.isnan, (comparison.nats.low, comparison.nats.high, comparison.nats.p)))
    assert result.answer[0] == "bold diverged in 2 of 5 seeds: it is not tested over the others."
    assert "other (" in result.answer[1]
    assert "bold (" not in " ".join(result.answer)
    assert arm(result, "other").to_baseline.change.significant


def test_ranks_and_fronts_are_over_the_seeds_that_all_arms_have_finished(tmp_path: Path) -> None:
    study = write_study(
        tmp_path, {"base": 0.0, "lucky": 0.01, "bad": 0.02}, noise=0.0, seed_noise=0.5, design="recipes"
    )
    losses = dict(zip((1, 2, 3), final_losses(tmp_path, "base"), strict=True))
    worst = max(losses, key=lambda seed: losses[seed])
    plant_end(run_folder(tmp_path, study, "lucky", worst), "diverged", "nan", 7)
    result = analyse(study, tmp_path)
    assert arm(result, "lucky").loss.mean < arm(result, "base").loss.mean  # over its own seeds
    assert "The lowest mean loss is that of base, over the 2 seeds that all have finished" in " ".join(result.answer)
    assert result.front(CACHE) == result.front("perf/tokens_per_second") == ("base",)


def test_arms_without_a_common_seed_are_not_ranked(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0}, design="recipes")
    for name, seed in (("b", 1), ("b", 2), ("c", 3)):
        remove_run(run_folder(tmp_path, study, name, seed))
    result = analyse(study, tmp_path)
    assert "Arms are not ranked: no seed was finished by all of them." in result.answer
    assert result.front(CACHE) == ()


def test_an_arm_that_always_diverged_has_no_loss_and_a_curve_up_to_its_first_divergence(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "postnorm": 0.1, "prenorm": -0.1})
    for seed, rows in ((1, 12), (2, 7), (3, 20)):
        plant_end(run_folder(tmp_path, study, "postnorm", seed), "diverged", "nan", rows)
    result = analyse(study, tmp_path)
    assert arm(result, "postnorm").loss is None
    assert arm(result, "postnorm").to_baseline is None
    assert arm(result, "prenorm").to_previous is None
    assert arm(result, "prenorm").to_baseline is not None
    (curve,) = [c for c in result.curves if c.arm == "postnorm" and c.metric == "train/loss"]
    assert curve.tokens[-1] == 60 * TOKENS_PER_STEP
    assert result.front(CACHE) == ("prenorm",)


def test_a_run_that_never_began_is_reported(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": -0.1})
    remove_run(run_folder(tmp_path, study, "arm", 3))
    ((_, record),) = analyse(study, tmp_path).unfinished
    assert (record.arm, record.seed, record.status, record.metrics) == ("arm", 3, "missing", [])


def test_a_study_without_any_run_is_not_an_error(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": -0.1})
    for name, seed in itertools.product(("base", "arm"), (1, 2, 3)):
        remove_run(run_folder(tmp_path, study, name, seed))
    result = analyse(study, tmp_path)
    assert "Nothing can be compared" in result.answer[0]
    assert len(result.unfinished) == 6
    assert result.seeds == (1, 2, 3)


def test_from_one_seed_nothing_is_concluded(tmp_path: Path) -> None:
    result = analyse(write_study(tmp_path, {"base": 0.0, "arm": -0.5}, seeds=(1,)), tmp_path)
    assert result.answer[0] == "Nothing can be concluded from one seed."
    assert "may be noise" in result.answer[1]
    comparison = arm(result, "arm").to_baseline
    assert comparison is not None
    assert not comparison.change.significant
    assert math.isnan(comparison.change.p)
    assert comparison.seeds_needed is None
    assert result.tests == "none"


def test_only_a_ladder_has_a_first_and_a_last_arm(tmp_path: Path) -> None:
    alone = analyse(write_study(tmp_path / "1", {"a": 0.0, "b": -0.5}, seeds=(1,), design="recipes"), tmp_path / "1")
    assert alone.answer == ("Nothing can be concluded from one seed.",)
    three = analyse(write_study(tmp_path / "3", {"a": 0.0, "b": -0.5, "c": 0.0}, design="recipes"), tmp_path / "3")
    assert three.answer[0].startswith("Compared with a, 1 of 2 arms lowered the loss: b (")
    assert three.answer[1].startswith("c is not significant with 3 seeds; ")
    assert three.answer[3].startswith("The lowest mean loss is that of b: 3.")


def test_where_tokenizers_differ_arms_are_compared_in_bits_alone(tmp_path: Path) -> None:
    other = {"tokenizer_hash": "byte", "bytes_per_token": 1.0, "vocab_size": 257}
    study = write_study(tmp_path, {"bpe": 0.0, "byte": -2.0}, facts={"byte": other}, noise=0.001, seed_noise=0.001)
    result = analyse(study, tmp_path)
    assert result.metric == "val/bits_per_byte"
    comparison = arm(result, "byte").to_baseline
    assert comparison is not None
    assert comparison.nats is None
    assert comparison.bits.mean == pytest.approx((1.7 - 3.7 / BYTES_PER_TOKEN) / math.log(2), abs=0.01)
    assert comparison.change.significant
    assert "raised the loss" in result.answer[0]  # though its nats per token are fewer
    assert "nats" not in " ".join(result.answer)
    assert result.front(CACHE) == ("bpe",)
    assert {curve.metric for curve in result.curves} == {"val/bits_per_byte"}
    assert result.curves[0].mean[-1] == pytest.approx(arm(result, "bpe").bits.mean)


def test_each_arm_is_judged_at_its_best_learning_rate(tmp_path: Path) -> None:
    grid = (1e-3, 2e-3, 4e-3)
    study = write_study(
        tmp_path, {"base": 0.0, "arm": -0.1}, rates=grid, best_rates={"arm": 4e-3}, design="learning_rate"
    )
    result = analyse(study, tmp_path)
    assert (arm(result, "base").learning_rates, arm(result, "arm").learning_rates) == ((2e-3,), (4e-3,))
    assert len(arm(result, "arm").records) == 3
    base, other = result.learning_rates
    assert (base.best, base.on_edge) == (2e-3, False)
    assert (other.best, other.on_edge) == (4e-3, True)
    assert other.rates == list(grid)
    means = [np.mean(final_losses(tmp_path, f"base-lr={rate:g}")) for rate in grid]
    assert [e.mean for e in base.loss if e] == pytest.approx(means)
    assert base.sensitivity == pytest.approx(np.mean(means) - min(means))
    assert "optim.lr" not in arm(result, "arm").difference


def test_a_rate_at_which_a_seed_diverged_does_not_win_and_counts_as_a_model_of_frequencies(tmp_path: Path) -> None:
    study = write_study(
        tmp_path, {"base": 0.0, "arm": 0.0}, rates=(1e-3, 2e-3, 4e-3), best_rates={"arm": 4e-3}, design="learning_rate"
    )
    plant_end(run_folder(tmp_path, study, "arm", 1, 4e-3), "diverged", "nan", 5)
    result = analyse(study, tmp_path)
    grid = result.learning_rates[1]
    assert (grid.best, grid.on_edge, grid.diverged) == (2e-3, False, [0, 0, 1])
    assert grid.loss[2] is not None
    assert grid.loss[2].n == 2
    at_low, at_best = (np.mean(final_losses(tmp_path, f"arm-lr={rate:g}")) for rate in (1e-3, 2e-3))
    at_high = np.mean([6.268971992882659, *final_losses(tmp_path, "arm-lr=0.004", (2, 3))])
    assert grid.sensitivity == pytest.approx(np.mean([at_low, at_best, at_high]) - min(at_low, at_best, at_high))
    assert result.unfinished[0][0].learning_rate == 4e-3


def test_a_rate_at_which_runs_finished_above_the_entropy_of_frequencies_counts_with_their_losses(
    tmp_path: Path,
) -> None:
    study = write_study(tmp_path, {"base": 0.0}, seeds=(1, 2), rates=(1e-3, 2e-3, 4e-3), design="learning_rate")
    for seed in (1, 2):
        plant_facts(run_folder(tmp_path, study, "base", seed, 4e-3), **{"val/loss": 7.0})
    low, best = (np.mean(final_losses(tmp_path, f"base-lr={rate:g}", (1, 2))) for rate in (1e-3, 2e-3))
    (grid,) = analyse(study, tmp_path).learning_rates
    assert grid.sensitivity == pytest.approx(np.mean([low, best, 7.0]) - best)


@pytest.mark.parametrize("tuned", [True, False])
def test_the_table_of_rates_says_whether_its_losses_are_those_of_tuning_runs(tmp_path: Path, tuned: bool) -> None:
    study = write_study(tmp_path, {"base": 0.0}, rates=(1e-3, 2e-3, 4e-3), tuned=tuned, design="learning_rate")
    caption = tables(analyse(study, tmp_path))["learning_rates"].caption
    assert caption.endswith("the tuning runs: the judged ones have other seeds, and so other losses.") == tuned


def test_an_arm_that_diverged_at_every_rate_has_no_best_one(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0}, seeds=(1, 2), rates=(1e-3, 2e-3), design="learning_rate")
    for seed, rate in itertools.product((1, 2), (1e-3, 2e-3)):
        plant_end(run_folder(tmp_path, study, "arm", seed, rate), "diverged", "nan", 5)
    result = analyse(study, tmp_path)
    grid = result.learning_rates[1]
    assert math.isnan(grid.best)
    assert grid.loss == [None, None]
    assert grid.diverged == [2, 2]
    assert not grid.on_edge
    assert arm(result, "arm").learning_rates == (1e-3, 2e-3)


def test_a_ladder_without_rates_or_lengths_has_no_effects_ranks_and_grids(ladder: tuple[Path, Result]) -> None:
    _, result = ladder
    assert {a.learning_rates for a in result.arms} == {(2e-3,)}
    assert (result.learning_rates, result.effects, result.pairs, result.ranks) == ((), (), (), {})
    assert "rank_from" not in summary_rows(result)[0]
    assert not any("compared with the trained length" in sentence for sentence in result.answer)


def test_a_factorials_effects_are_those_that_were_planted(tmp_path: Path) -> None:
    arms, axes = {}, {}
    for levels in itertools.product((0, 1), repeat=3):
        name = "".join(map(str, levels))
        arms[name] = -0.1 * levels[0] + 0.04 * levels[1] + 0.06 * levels[0] * levels[1]
        options = {"norm": ("layernorm", "rmsnorm"), "block": ("post", "pre"), "ffn": ("relu", "swiglu")}
        axes[name] = {axis: options[axis][level] for axis, level in zip(options, levels, strict=True)}
    study = write_study(tmp_path, arms, axes=axes, design="factorial", noise=0.002)
    result = analyse(study, tmp_path)
    effects = {effect.axes: effect for effect in result.effects}
    truth = {("norm",): -0.07, ("block",): 0.07, ("norm", "block"): 0.03}
    assert len(effects) == 6
    for axes_of, effect in effects.items():
        assert effect.change.mean == pytest.approx(truth.get(axes_of, 0.0), abs=0.003)
    assert result.answer[0].startswith(f"1 of 6 effects lowered the loss: norm ({MINUS}0.0")
    assert "norm \u00d7 block" in result.answer[1]
    assert result.tests == "moderated paired tests of the 6 effects"
    assert all(math.isnan(a.to_baseline.change.p) for a in result.arms[1:])


def test_from_one_seed_of_a_factorial_nothing_is_concluded(tmp_path: Path) -> None:
    levels = itertools.product(("layernorm", "rmsnorm"), ("relu", "swiglu"))
    axes = {"".join(pair): dict(zip(("norm", "ffn"), pair, strict=True)) for pair in levels}
    result = analyse(write_study(tmp_path, dict.fromkeys(axes, 0.0), (1,), axes=axes, design="factorial"), tmp_path)
    assert result.answer == ("Nothing can be concluded from one seed.",)
    assert len(result.effects) == 3
    assert all(math.isnan(effect.change.p) for effect in result.effects)


def test_lengths_are_means_over_seeds_and_none_where_positions_end(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"rope": 0.0, "learned": 0.1}, lengths=(256, 512), design="context")
    for seed in (1, 2, 3):
        file = run_folder(tmp_path, study, "learned", seed) / "eval.json"
        content = json.loads(file.read_text())
        content["lengths"][1] |= {"loss": None, "positions": [], "losses": []}
        file.write_text(json.dumps(content))
    rope, learned = analyse(study, tmp_path).lengths
    assert (rope.arm, rope.trained, list(rope.loss)) == ("rope", 256, [256, 512])
    assert rope.loss[512] is not None
    assert rope.loss[512].mean == pytest.approx(np.mean(final_losses(tmp_path, "rope")) + 0.001)
    assert rope.by_position[512][0] == [64, 192, 320, 448]
    assert rope.by_position[256][1][0] == pytest.approx(np.mean(final_losses(tmp_path, "rope")) + 0.1)
    assert learned.loss[256] is not None
    assert learned.loss[512] is None
    assert list(learned.by_position) == [256]


def eval_json(folder: Path, study: Study, name: str, seed: int, losses: dict[int, float | None]) -> None:
    """Write the evaluation of one run at these lengths."""
    entries = [{"length": n, "loss": loss, "positions": [], "losses": []} for n, loss in losses.items()]
    (run_folder(folder, study, name, seed) / "eval.json").write_text(json.dumps({"step": STEPS, "lengths": entries}))


def test_the_answer_says_whose_loss_holds_at_the_longest_context_and_who_has_none(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"rope": 0.0, "alibi": 0.1, "none": 0.1, "learned": 0.0}, design="context")
    for seed in (1, 2, 3):
        base = 3.0 + seed
        for name, rise in (("rope", 0.4), ("alibi", -0.01), ("none", 0.2), ("learned", None)):
            at_longest = None if rise is None else base + rise + 0.001 * seed**2
            eval_json(tmp_path, study, name, seed, {256: base, 512: base, 1024: at_longest})
    result = analyse(study, tmp_path)
    assert result.answer[-2].startswith("At 1,024 tokens, compared with the trained length, the loss of alibi")
    interval = stats.ttest_1samp([-0.009, -0.006, -0.001], 0).confidence_interval()
    shown = f"[{interval.low:+.3f},\u00a0{interval.high:+.3f}]".replace("-", MINUS)
    assert f"alibi ({MINUS}0.005 {shown} nats per token, 3 seeds) falls most and that of rope (+" in result.answer[-2]
    assert result.answer[-2].endswith(" rises most.")
    assert result.answer[-1] == "learned could not be evaluated at that length."


@pytest.mark.parametrize(
    ("rises", "first", "last"),
    [
        ({"a": 0.4, "b": 0.1}, ("b", "rises least"), ("a", "most")),
        ({"a": -0.1, "b": -0.4}, ("b", "falls most"), ("a", "least")),
        ({"a": -0.1, "b": 0.4}, ("a", "falls most"), ("b", "rises most")),
    ],
)
def test_losses_at_the_longest_context_rise_or_fall_by_their_signs(
    tmp_path: Path, rises: dict[str, float], first: tuple[str, str], last: tuple[str, str]
) -> None:
    study = write_study(tmp_path, dict.fromkeys(rises, 0.0), seeds=(1, 2), design="context")
    for seed, (name, rise) in itertools.product((1, 2), rises.items()):
        eval_json(tmp_path, study, name, seed, {256: 3.0, 512: 3.0 + rise + 0.001 * seed})
    pattern = rf"of {first[0]} \([^()]*\) {first[1]} and that of {last[0]} \([^()]*\) {last[1]}\."
    assert re.search(pattern, analyse(study, tmp_path).answer[-1])


@pytest.mark.parametrize(("lengths", "shown"), [((512, 1024), [512]), ((1024,), None)])
def test_an_arm_of_runs_with_two_contexts_shows_what_they_share(
    tmp_path: Path, lengths: tuple[int, ...], shown: list[int] | None
) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0}, design="comparison")
    for seed in (1, 2):
        eval_json(tmp_path, study, "a", seed, dict.fromkeys((256, 512), 3.0))
    eval_json(tmp_path, study, "a", 3, dict.fromkeys(lengths, 3.0))
    assert [list(found.loss) for found in analyse(study, tmp_path).lengths] == ([shown] if shown else [])


def test_an_arm_that_is_identical_to_the_baseline_is_said_to_be(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "same": 0.0, "moved": 0.0, "better": -0.2}, design="recipes")
    for seed in (1, 2, 3):
        loss = json.loads((run_folder(tmp_path, study, "base", seed) / "summary.json").read_text())["val/loss"]
        for name, shift in (("same", 0.0), ("moved", 0.125)):
            bits = (loss + shift) / math.log(2) / BYTES_PER_TOKEN
            plant = {"val/loss": loss + shift, "val/bits_per_byte": bits}
            plant_facts(run_folder(tmp_path, study, name, seed), **plant)
    result = analyse(study, tmp_path)
    assert result.answer[1] == "same and base are identical: their losses are equal in each of 3 seeds."
    assert result.answer[2] == "moved and base differ by exactly as much in each of 3 seeds, which is no evidence."
    assert not any("not significant" in sentence for sentence in result.answer)
    assert not any(arm(result, name).to_baseline.change.significant for name in ("same", "moved"))
    assert arm(result, "moved").to_baseline.seeds_needed is None


def test_a_number_of_seeds_above_the_limit_is_not_given(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "near": 0.0}, seeds=(1, 2), design="recipes")
    base = 3.7
    for seed, sign in ((1, 1), (2, -1)):
        near = base + sign * 0.01 + 1e-6
        for name, loss in (("base", base), ("near", near)):
            planted = {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / BYTES_PER_TOKEN}
            plant_facts(run_folder(tmp_path, study, name, seed), **planted)
    assert analyse(study, tmp_path).answer[1].endswith(" would need over 10,000 seeds.")


def test_what_an_arm_changed_in_its_config_is_listed_without_names_and_seeds(tmp_path: Path) -> None:
    config = {"arm": {"model.norm._target_": "llama_lab.model.norm.LayerNorm", "name": "other", "logger.wandb": True}}
    result = analyse(write_study(tmp_path, {"base": 0.0, "arm": 0.0}, seeds=(2, 3), config=config), tmp_path)
    norms = ("llama_lab.model.norm.RMSNorm", "llama_lab.model.norm.LayerNorm")
    assert arm(result, "arm").difference == {"model.norm._target_": norms}
    assert arm(result, "base").difference == {}


def test_provenance_counts_the_runs_of_every_value(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0})
    plant_facts(run_folder(tmp_path, study, "arm", 2), device="NVIDIA H100 80GB HBM3")
    plant_config(run_folder(tmp_path, study, "base", 1), train__prompt="def")
    result = analyse(study, tmp_path)
    assert result.seeds == (1, 2, 3)
    assert result.environment["device"] == {"cpu": 5, "NVIDIA H100 80GB HBM3": 1}
    assert result.environment["data"] == {"9f4fcfe12c2f": 6}
    assert result.environment["torch"] == {"2.13.0+cpu": 6}
    assert result.environment["uncommitted changes"] == {"no": 6}
    assert result.baseline_config == (run_folder(tmp_path, study, "base", 1) / "resolved.yaml").read_text()


def cautioned(result: Result, words: str) -> bool:
    return any(words in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("arms", "seeds", "is_cautioned", "from_others"),
    [("ab", (1, 2), True, False), ("abc", (1, 2), True, True), ("abc", (1, 2, 3), False, False)],
)
def test_two_seeds_give_a_warning_with_whose_noise_they_are_judged_by(
    tmp_path: Path, arms: str, seeds: tuple[int, ...], is_cautioned: bool, from_others: bool
) -> None:
    result = analyse(write_study(tmp_path, dict.fromkeys(arms, 0.0), seeds), tmp_path)
    assert cautioned(result, "Two seeds: ") == is_cautioned
    assert cautioned(result, "mostly from the other arms") == from_others


def test_arms_that_are_not_tested_at_two_seeds_have_no_warning_of_verdicts(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0}, (1, 2))
    for seed in (1, 2):
        plant_facts(run_folder(tmp_path, study, "b", seed), data_hash="other")
    assert not cautioned(analyse(study, tmp_path), "Two seeds: ")


@pytest.mark.slow
def test_a_noisy_arm_is_named_in_a_warning(tmp_path: Path) -> None:
    study = write_study(tmp_path, dict.fromkeys("abcdefgh", 0.0), (1, 2, 3, 4, 5))
    assert not cautioned(analyse(study, tmp_path), "as the typical arm")
    for seed, noise in zip((1, 2, 3, 4, 5), (0.1, -0.1, 0.05, 0.0, -0.08), strict=True):
        plant_facts(run_folder(tmp_path, study, "d", seed), **{"val/loss": 3.7 + noise})
    (warning,) = [w for w in analyse(study, tmp_path).warnings if "as the typical arm" in w]
    assert warning.startswith("d varies ")


def test_a_loss_at_the_entropy_of_token_frequencies_gives_a_warning(tmp_path: Path) -> None:
    result = analyse(write_study(tmp_path, {"base": 0.0, "stuck": 2.55}), tmp_path)
    (warning,) = [w for w in result.warnings if "token frequencies alone give" in w]
    assert warning.startswith("stuck ends at 6.2")


def test_across_tokenizers_the_text_per_token_is_reported(tmp_path: Path) -> None:
    other = {"tokenizer_hash": "byte", "bytes_per_token": 1.0, "vocab_size": 257}
    study = write_study(tmp_path, {"bpe": 0.0, "byte": -2.0}, facts={"byte": other})
    assert cautioned(analyse(study, tmp_path), "A token is 3.44 bytes in bpe, 1.00 bytes in byte")


def test_arms_of_different_texts_are_not_tested_against_each_other(tmp_path: Path) -> None:
    study = write_study(
        tmp_path, {"base": 0.0, "same": -0.3, "other": -0.3}, facts={"other": {"data_hash": "else"}}, design="recipes"
    )
    result = analyse(study, tmp_path)
    assert arm(result, "other").to_baseline.untested == "other and base were trained on different texts"
    assert not arm(result, "other").to_baseline.change.significant
    assert arm(result, "same").to_baseline.change.significant
    assert "other is not tested against base: other and base were trained on different texts." in result.answer


def test_added_seeds_give_a_warning_with_the_number_of_earlier_reports(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0})
    assert not cautioned(analyse(study, tmp_path), "Seeds were added")
    assert cautioned(analyse(replace(study, looks=2), tmp_path), "Seeds were added after 2 reports: p and intervals no")


def test_a_margin_shows_which_changes_are_too_small_to_matter(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "same": 0.0, "better": -0.2}, (1, 2, 3, 4, 5), design="recipes")
    limits = [max(-d.low, d.high) for d in (a.to_baseline.nats for a in analyse(study, tmp_path).arms[1:])]
    assert limits[0] < 0.02
    wide, narrow = (analyse(replace(study, margin=margin), tmp_path).answer for margin in (0.02, limits[0] / 2))
    assert "same changes the loss by less than study.margin=0.02 nats per token." in wide
    assert any(sentence.startswith("No change is shown to be within study.margin=") for sentence in narrow)


def test_a_study_that_was_written_before_some_fields_were_is_read_as_without(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0})
    lines = unstamped(tmp_path / "study.yaml").splitlines()
    old = [line for line in lines if not line.lstrip().startswith(("margin:", "looks:", "compare:", "settings:"))]
    assert len(old) == len(lines) - 5
    (tmp_path / "study.yaml").write_text("\n".join(old))
    assert Study.load(tmp_path) == study


def plant_evaluation_at(run: Path, step: int, shift: float) -> None:
    """Shift the validation loss of a run at one of its evaluations."""
    lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    loss = lines[0].index("val/loss")
    for line in lines[1:]:
        if line[0] == str(step) and line[loss]:
            line[loss] = repr(float(line[loss]) + shift)
    (run / "metrics.csv").write_text("\n".join(map(",".join, lines)) + "\n")


def test_curves_of_differences_end_in_the_verdicts_interval_and_are_judged_alike_before(
    ladder: tuple[Path, Result],
) -> None:
    """In these studies the losses of all runs fall alike, so that every evaluation has the final differences."""
    curves = {curve.name: curve for curve in ladder[1].difference_curves}
    assert list(curves) == [name for name in LADDER if name != "vanilla"]
    for name, curve in curves.items():
        step = arm(ladder[1], name).to_previous
        assert curve.against == step.against
        assert curve.tokens == [TOKENS_PER_STEP * at for at in range(39, STEPS + 1, 39)]
        assert (curve.mean[-1], curve.low[-1], curve.high[-1]) == (step.nats.mean, step.nats.low, step.nats.high)
        assert curve.low == pytest.approx([step.nats.low] * 10, abs=1e-5)
        assert curve.high == pytest.approx([step.nats.high] * 10, abs=1e-5)


@pytest.mark.usefixtures("with_curves")
def test_a_point_on_a_curve_of_differences_is_the_test_of_the_losses_then(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": -0.1, "c": -0.1})
    for seed in (1, 2, 3):
        plant_evaluation_at(run_folder(tmp_path, study, "b", seed), 78, 0.03 * seed)
    step = analyse(study, tmp_path).difference_curves[0]
    losses = np.array([final_losses(tmp_path, name) for name in "abc"])
    losses[1] += (0.03, 0.06, 0.09)
    signs = np.array([[-1, 1, 0], [0, -1, 1], [-1, 0, 1]])
    then = judge(list(signs @ losses), signs @ signs.T / 2)[0]
    assert (step.mean[1], step.low[1], step.high[1]) == pytest.approx((then.mean, then.low, then.high))
    assert step.mean[2] == pytest.approx(step.mean[-1]) != pytest.approx(step.mean[1])


@pytest.mark.usefixtures("with_curves")
def test_curves_of_differences_are_thinned_and_keep_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_lab.analysis.curves.MAX_JUDGED", 4)
    (curve,) = analyse(write_study(tmp_path, {"a": 0.0, "b": 0.0}), tmp_path).difference_curves
    assert 2 < len(curve.tokens) <= 4
    assert curve.tokens[-1] == STEPS * TOKENS_PER_STEP


@pytest.mark.usefixtures("with_curves")
def test_runs_of_unequal_length_have_differences_where_all_were_evaluated(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0})
    run = run_folder(tmp_path, study, "b", 1)
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[:30]))
    plant_facts(run, tokens=TOKENS_PER_STEP * 240.0)
    (curve,) = analyse(study, tmp_path).difference_curves
    assert curve.tokens[-1] < TOKENS_PER_STEP * 240


def two_by_two(folder: Path, seeds: tuple[int, ...] = (1, 2, 3)) -> Result:
    """A factorial of two axes that interact."""
    levels = itertools.product(("layernorm", "rmsnorm"), ("relu", "swiglu"))
    axes = {"+".join(pair): dict(zip(("norm", "ffn"), pair, strict=True)) for pair in levels}
    effects = dict(zip(axes, (0.0, -0.1, -0.05, -0.05), strict=True))
    return analyse(write_study(folder, effects, seeds, axes=axes, design="factorial"), folder)


def test_an_interaction_is_half_the_change_of_one_axis_s_effect_in_the_means_that_are_drawn(tmp_path: Path) -> None:
    result = two_by_two(tmp_path)
    (found,) = result.interactions
    assert found.axes == ("norm", "ffn")
    assert found.levels == (("layernorm", "rmsnorm"), ("relu", "swiglu"))
    means = [[np.mean(final_losses(tmp_path, f"{a}+{b}")) for b in found.levels[1]] for a in found.levels[0]]
    assert np.array(found.means) == pytest.approx(np.array(means))
    (effect,) = [effect for effect in result.effects if effect.axes == ("norm", "ffn")]
    assert found.size == pytest.approx(abs(effect.change.mean))


@pytest.mark.usefixtures("with_curves")
def test_the_curves_of_a_factorial_are_those_of_its_effects(tmp_path: Path) -> None:
    result = two_by_two(tmp_path)
    assert [(c.name, c.against) for c in result.difference_curves] == [
        ("norm", ""),
        ("ffn", ""),
        ("norm \u00d7 ffn", ""),
    ]
    for curve, effect in zip(result.difference_curves, result.effects, strict=True):
        last = (curve.mean[-1], curve.low[-1], curve.high[-1])
        assert last == (effect.change.mean, effect.change.low, effect.change.high)


def test_an_arm_differs_by_its_options_from_the_arm_before(tmp_path: Path) -> None:
    facts = {"b": {"choices": {"norm": "layernorm", "position": "rope"}}}
    facts["c"] = {"choices": {"norm": "layernorm", "position": "rope_500k"}}
    config = {name: {"model.norm._target_": "llama_lab.model.norm.LayerNorm"} for name in "bc"}
    config["c"] = config["c"] | {"model.position.theta": 500_000.0, "optim.beta1": 0.8}
    result = analyse(write_study(tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0}, facts=facts, config=config), tmp_path)
    assert arm(result, "b").difference == {"norm": ("rmsnorm", "layernorm")}
    assert arm(result, "c").difference == {"position": ("rope", "rope_500k"), "optim.beta1": (0.9, 0.8)}


def test_the_verdict_counts_what_helped_and_names_what_did_most(tmp_path: Path, ladder: tuple[Path, Result]) -> None:
    assert ladder[1].verdict.startswith(
        f"Of 4 steps, 2 lowered the loss and 1 raised it; prenorm changed it most: {MINUS}0."
    )
    assert ladder[1].verdict.endswith(" nats per token.")
    two = analyse(write_study(tmp_path / "2", {"base": 0.0, "arm": -0.1}, design="recipes"), tmp_path / "2")
    assert two.verdict.startswith(f"Compared with base, arm lowered the loss: {MINUS}0.")
    none = analyse(write_study(tmp_path / "0", {"A": 0.0, "B": 0.0, "C": 0.0}, design="recipes"), tmp_path / "0")
    assert none.verdict == "Compared with A, no arm changed the loss significantly."
    one = analyse(write_study(tmp_path / "1", {"a": 0.0, "b": 0.0}, (1,)), tmp_path / "1")
    assert one.verdict == "Nothing can be concluded from one seed."


def test_of_many_arms_that_are_not_significant_a_sentence_gives_the_largest_limit_alone(tmp_path: Path) -> None:
    result = analyse(write_study(tmp_path, dict.fromkeys("abcdef", 0.0), design="recipes"), tmp_path)
    limits = [max(-d.low, d.high) for d in (a.to_baseline.nats for a in result.arms[1:])]
    (sentence,) = [s for s in result.answer if "is excluded" in s]
    assert f"of more than {max(limits):.3f} nats per token is excluded." in sentence
    assert not any("would need" in s for s in result.answer)
