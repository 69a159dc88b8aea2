"""The analysis of synthetic studies on disk, with known effects."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import ArmResult, Result
from llama_lab.analysis.statistics import judge
from llama_lab.report.tables import tables
from llama_lab.runs.evaluation import DocumentLosses
from llama_lab.runs.study import ArmSpeed, Study, StudySpeed
from llama_lab.util.formatting import MINUS
from tests.analysis.synthetic import (
    BYTES_PER_TOKEN,
    STEPS,
    TOKENS_PER_STEP,
    change_metrics,
    plant_config,
    plant_end,
    plant_facts,
    remove_run,
    write_study,
)
from tests.conftest import unstamped

pytestmark = pytest.mark.filterwarnings("error")

CACHE, SPEED = "kv_cache/bytes_per_token", "perf/tokens_per_second"
LADDER = {"vanilla": 0.0, "prenorm": -0.2, "rmsnorm": -0.2, "rope": -0.3, "relu": -0.15}
RATES = (1e-3, 2e-3, 4e-3)
BITS = math.log(2) * BYTES_PER_TOKEN  # nats per token in a bit per byte
OTHER_TOKENIZER = {"tokenizer_hash": "byte", "bytes_per_token": 1.0, "vocab_size": 257}


def analysed(folder: Path, arms: dict[str, float], seeds: Sequence[int] = (1, 2, 3), **settings: Any) -> Result:
    """The analysis of a study that `write_study` writes."""
    return analyse(write_study(folder, arms, seeds, **settings), folder)


def arm(result: Result, name: str) -> ArmResult:
    """The arm of that name."""
    return next(arm for arm in result.arms if arm.name == name)


def final_losses(folder: Path, name: str, seeds: tuple[int, ...] = (1, 2, 3)) -> list[float]:
    """The losses of an arm's runs, read without the package."""
    files = [folder / name / f"seed={seed}" / "summary.json" for seed in seeds]
    return [json.loads(file.read_text())["val/loss"] for file in files]


def plant_losses(arm: Path, *losses: float) -> None:
    """Let the runs of an arm end with these losses, from the first seed on."""
    for seed, loss in enumerate(losses, start=1):
        plant_facts(arm / f"seed={seed}", **{"val/loss": loss, "val/bits_per_byte": loss / BITS})


def cautioned(result: Result, words: str) -> bool:
    return any(words in warning for warning in result.warnings)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A ladder of four steps: down, nothing, down, up."""
    folder = tmp_path_factory.mktemp("ladder")
    return folder, analysed(folder, LADDER)


# --- comparisons ---


def test_two_arms_are_judged_by_scipys_paired_t_test_in_both_units(tmp_path: Path) -> None:
    found = arm(analysed(tmp_path, {"base": 0.0, "arm": -0.01}, design="recipes"), "arm").to_baseline
    assert (found.against, found.seeds) == ("base", (1, 2, 3))
    expected = stats.ttest_rel(final_losses(tmp_path, "arm"), final_losses(tmp_path, "base"))
    interval = expected.confidence_interval()
    assert found.nats.p == pytest.approx(expected.pvalue, rel=1e-3)
    assert (found.nats.low, found.nats.high) == pytest.approx((interval.low, interval.high), abs=1e-4)
    assert found.bits.p == pytest.approx(expected.pvalue, rel=1e-3)
    assert found.bits.mean == pytest.approx(found.nats.mean / BITS)


def test_the_steps_of_a_ladder_and_its_ends_are_one_family_of_tests(
    ladder: tuple[Path, Result],
) -> None:
    folder, result = ladder
    losses = np.array([final_losses(folder, name) for name in LADDER])
    signs = np.vstack([np.eye(5)[1:] - np.eye(5)[:-1], np.eye(5)[4] - np.eye(5)[0]])
    *steps, last = judge(list(signs @ losses), signs @ signs.T / 2)
    for contrast, a in zip(steps, result.arms[1:], strict=True):
        nats, bits, expected = a.to_previous.nats, a.to_previous.bits, (contrast.mean, contrast.low, contrast.high)
        assert (nats.mean, nats.low, nats.high, nats.p) == pytest.approx((*expected, contrast.p))
        in_bits = (x / BITS for x in expected)
        assert (bits.mean, bits.low, bits.high, bits.p) == pytest.approx((*in_bits, contrast.p))
    ends = arm(result, "relu").to_baseline.nats
    assert (ends.low, ends.high, ends.p) == pytest.approx((last.low, last.high, last.p))
    assert result.tests == "moderated paired tests of the 4 steps and the last arm against the first"
    assert not arm(result, "rope").to_baseline.change.is_tested


@pytest.mark.usefixtures("with_curves")
def test_all_pairs_are_one_family_and_rank_the_arms(tmp_path: Path) -> None:
    study = replace(write_study(tmp_path, LADDER), compare="all")
    result = analyse(study, tmp_path)
    losses = np.array([final_losses(tmp_path, name) for name in LADDER])
    names, pairs = list(LADDER), [(c.arm, c.against) for c in result.pairs]
    assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in combinations(LADDER, 2)}
    signs = np.array([np.eye(5)[names.index(arm)] - np.eye(5)[names.index(against)] for arm, against in pairs])
    for contrast, pair in zip(judge(list(signs @ losses), signs @ signs.T / 2), result.pairs, strict=True):
        found = (pair.change.mean, pair.change.low, pair.change.high, pair.change.p)
        assert found == pytest.approx((contrast.mean, contrast.low, contrast.high, contrast.p))
    assert result.tests == "moderated paired tests of the 10 pairs of arms"
    assert {(curve.name, curve.against) for curve in result.difference_curves} == set(pairwise(names[::-1]))
    clear = [pair for pair in result.pairs if pair.change.significant]
    assert 0 < len(clear) < 10
    assert sum(best - 1 for best, _ in result.ranks.values()) == len(clear)
    assert tables(result)["pairs"].head == ["Arm", "Rank", *names[:-1]]


def test_the_answer_says_what_is_excluded_and_how_many_seeds_are_needed(ladder: tuple[Path, Result]) -> None:
    _, result = ladder
    unclear, needed, ends, tests = result.answer
    assert "bits per byte" not in " ".join(result.answer)
    step = arm(result, "rmsnorm").to_previous
    assert 0.001 < (step.nats.high - step.nats.low) / 2 < 0.1
    digits = 3 if step.nats.high - step.nats.low > 0.02 else 4  # two of the half-width
    excluded = f"{max(-step.nats.low, step.nats.high):.{digits}f}"
    assert unclear.startswith(f"rmsnorm is not significant with 3 seeds; a change of more than {excluded} nats")
    assert unclear.endswith("nats per token is excluded.")
    assert needed.startswith("Finding such a change would need ")
    assert (step.seeds_needed is None, arm(result, "rope").to_previous.seeds_needed) == (False, None)
    assert ends.startswith(f"From the first arm, vanilla, to the last, relu, the loss changed by {MINUS}0.1")
    assert result.tests in tests


def test_the_verdict_counts_what_helped_and_names_what_did_most(tmp_path: Path, ladder: tuple[Path, Result]) -> None:
    assert ladder[1].verdict.startswith(
        f"Of 4 steps, 2 lowered the loss and 1 raised it; prenorm changed it most: {MINUS}0."
    )
    assert ladder[1].verdict.endswith(" nats per token.")
    two = analysed(tmp_path / "2", {"base": 0.0, "arm": -0.1}, design="recipes")
    assert two.verdict.startswith("arm is best; base is significantly worse, by 0.")
    three = analysed(tmp_path / "3", dict.fromkeys("ABC", 0.0), design="recipes")
    assert three.verdict == "No clear winner: no arm differs significantly from A."


def test_from_one_seed_nothing_is_concluded(tmp_path: Path) -> None:
    arms, nothing = {"base": 0.0, "arm": -0.5}, "Nothing can be concluded from one seed."
    result = analysed(tmp_path / "ladder", arms, (1,))
    assert (result.answer[0], result.verdict, result.tests) == (nothing, nothing, "none")
    assert "may be noise" in result.answer[1]
    assert not arm(result, "arm").to_baseline.change.is_tested
    factorial = two_by_two(tmp_path / "factorial", (1,))
    assert factorial.answer == (nothing,)
    assert not any(effect.change.is_tested for effect in factorial.effects)


def test_an_arm_that_is_identical_to_the_baseline_is_said_to_be(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "same": 0.0, "moved": 0.0, "better": -0.2}, design="recipes")
    base = final_losses(tmp_path, "base")
    plant_losses(tmp_path / "same", *base)
    plant_losses(tmp_path / "moved", *(loss + 0.125 for loss in base))
    result = analyse(study, tmp_path)
    assert result.answer[0] == "same and base are identical: their losses are equal in each of 3 seeds."
    assert result.answer[1] == "moved and base differ by exactly as much in each of 3 seeds, which is no evidence."
    assert not any(arm(result, name).to_baseline.change.significant for name in ("same", "moved"))


def test_a_margin_shows_which_changes_are_too_small_to_matter(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "same": 0.0, "better": -0.2}, (1, 2, 3, 4, 5), design="recipes")
    limits = [max(-d.low, d.high) for d in (a.to_baseline.nats for a in analyse(study, tmp_path).arms[1:])]
    assert limits[0] < 0.02
    wide, narrow = (analyse(replace(study, margin=margin), tmp_path).answer for margin in (0.02, limits[0] / 2))
    assert "same changes the loss by less than study.margin=0.02 nats per token." in wide
    assert any(sentence.startswith("No change is shown to be within study.margin=") for sentence in narrow)


def test_a_difference_that_other_documents_might_not_show_is_said_to_be_of_these(tmp_path: Path) -> None:
    write_study(tmp_path, {"vanilla": 0.0, "prenorm": -0.2, "rope": -0.3})
    gains = {"vanilla": np.zeros(60), "prenorm": np.full(60, 0.2), "rope": np.r_[6.0, np.zeros(59)]}
    for name, seed in itertools.product(gains, (1, 2, 3)):
        documents = DocumentLosses(tokens=[100] * 60, nats=(100 * (4 - gains[name])).tolist())
        documents.save(tmp_path / name / f"seed={seed}")
    result = analyse(Study.load(tmp_path), tmp_path)
    assert any(line.startswith("Of these documents only: rope; over other") for line in result.answer)
    table = tables(result)["differences"]
    column = table.head.index("Over documents")
    assert [row[column].split()[0] for row in table.rows] == [f"{MINUS}0.20", "+0.10", f"{MINUS}0.10"]


def test_where_tokenizers_differ_arms_are_compared_in_bits_alone(tmp_path: Path) -> None:
    arms, facts = {"bpe": 0.0, "byte": -2.0}, {"byte": OTHER_TOKENIZER}
    result = analysed(tmp_path, arms, facts=facts, noise=0.001, seed_noise=0.001)
    assert result.metric == "val/bits_per_byte"
    comparison = arm(result, "byte").to_baseline
    assert comparison.nats is None
    assert comparison.bits.mean == pytest.approx((1.7 - 3.7 / BYTES_PER_TOKEN) / math.log(2), abs=0.01)
    assert comparison.change.significant
    assert "raised the loss" in result.verdict  # though its nats per token are fewer
    assert {curve.metric for curve in result.curves} == {"val/bits_per_byte"}
    assert result.curves[0].mean[-1] == pytest.approx(arm(result, "bpe").bits.mean)
    assert cautioned(result, "A token is 3.44 bytes in bpe, 1.00 bytes in byte")


def test_arms_of_different_texts_are_not_tested_against_each_other(tmp_path: Path) -> None:
    arms, facts = {"base": 0.0, "same": -0.3, "other": -0.3}, {"other": {"data_hash": "else"}}
    result = analysed(tmp_path, arms, facts=facts, design="recipes")
    assert arm(result, "other").to_baseline.untested == "other and base were trained on different texts"
    assert not arm(result, "other").to_baseline.change.significant
    assert arm(result, "same").to_baseline.change.significant
    assert "other is not tested against base: other and base were trained on different texts." in result.answer


# --- divergences and missing runs ---


def test_a_run_that_diverged_or_never_began_is_reported_and_left_out_of_its_pair(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "postnorm": 0.1, "arm": 0.0})
    plant_end(tmp_path / "postnorm/seed=2", "diverged", "the training loss is nan at step 60", 7)
    remove_run(tmp_path / "arm/seed=3")
    result = analyse(study, tmp_path)
    (_, diverged), (_, missing) = result.unfinished
    assert (diverged.arm, diverged.seed, diverged.status) == ("postnorm", 2, "diverged")
    assert (missing.arm, missing.seed, missing.status, missing.metrics) == ("arm", 3, "missing", [])
    assert arm(result, "postnorm").to_baseline.seeds == (1, 3)
    assert arm(result, "postnorm").to_reach == {}
    assert all(c.tokens[-1] > 0.95 * STEPS * TOKENS_PER_STEP for c in result.curves)  # of the runs that finished


def test_survivors_of_a_divergence_are_not_judged_and_the_answer_says_how_many_diverged(tmp_path: Path) -> None:
    """A regression test: with two of five seeds diverged, the arm was said to have lowered the loss, p = 0.001."""
    arms = {"base": 0.0, "bold": -0.3, "other": -0.3}
    study = write_study(tmp_path, arms, (1, 2, 3, 4, 5), design="recipes")
    for seed in (2, 4):
        plant_end(tmp_path / f"bold/seed={seed}", "diverged", "nan", 7)
    result = analyse(study, tmp_path)
    comparison = arm(result, "bold").to_baseline
    assert comparison.untested == "bold diverged in 2 of 5 seeds"
    assert not comparison.change.significant
    assert result.answer[0] == "bold diverged in 2 of 5 seeds: it is not tested over the others."
    assert result.verdict.startswith("other is significantly better than base, by 0.")
    assert arm(result, "other").to_baseline.change.significant


def test_ranks_and_fronts_are_over_the_seeds_that_all_arms_have_finished(tmp_path: Path) -> None:
    arms = {"base": 0.0, "lucky": 0.01, "bad": 0.02}
    study = write_study(tmp_path, arms, noise=0.0, seed_noise=0.5, design="recipes")
    worst = 1 + int(np.argmax(final_losses(tmp_path, "base")))
    plant_end(tmp_path / f"lucky/seed={worst}", "diverged", "nan", 7)
    result = analyse(study, tmp_path)
    assert arm(result, "lucky").loss.mean < arm(result, "base").loss.mean  # over its own seeds
    assert "The lowest mean loss is that of base, over the 2 seeds that all have finished" in " ".join(result.answer)
    assert result.front(CACHE) == result.front(SPEED) == ("base",)
    for seed in {1, 2, 3} - {worst}:
        remove_run(tmp_path / f"bad/seed={seed}")
    result = analyse(study, tmp_path)
    assert "Arms are not ranked: no seed was finished by all of them." in result.answer
    assert result.front(CACHE) == ()


def test_an_arm_that_always_diverged_has_no_loss_and_a_curve_up_to_its_first_divergence(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "postnorm": 0.1, "prenorm": -0.1})
    for seed, rows in ((1, 12), (2, 7), (3, 20)):
        plant_end(tmp_path / f"postnorm/seed={seed}", "diverged", "nan", rows)
    result = analyse(study, tmp_path)
    postnorm, prenorm = (arm(result, name) for name in ("postnorm", "prenorm"))
    assert postnorm.loss is postnorm.to_baseline is prenorm.to_previous is None
    assert prenorm.to_baseline is not None
    (curve,) = [c for c in result.curves if c.arm == "postnorm" and c.metric == "train/loss"]
    assert curve.tokens[-1] == 60 * TOKENS_PER_STEP


# --- costs and what arms are ---


def test_costs_are_means_over_seeds_and_fronts_hold_the_arms_that_nothing_beats(tmp_path: Path) -> None:
    facts = {name: {CACHE: 1024} for name in ("gqa", "bad")}
    study = write_study(tmp_path, {"mha": 0.0, "gqa": 0.1, "bad": 0.3}, facts=facts)
    for seed, speed in ((1, 19_000.0), (2, 20_000.0), (3, 24_000.0)):
        plant_facts(tmp_path / f"bad/seed={seed}", **{SPEED: speed})
    result = analyse(study, tmp_path)
    costs = arm(result, "bad").costs
    assert (costs[CACHE], costs[SPEED], costs["seq_len"]) == (1024, 21_000, 256)
    assert "perf/mfu" not in costs
    assert result.front(CACHE) == ("mha", "gqa")
    assert result.front(SPEED) == ("mha", "bad")


@pytest.mark.parametrize(("devices", "mfu"), [(8, 0.3), (1, None)])
def test_mfu_follows_a_measured_speed_of_the_same_hardware_alone(
    tmp_path: Path, devices: int, mfu: float | None
) -> None:
    study = write_study(tmp_path, {"a": 0.0}, facts={"a": {"device": "H100", "devices": 8}})
    for seed in (1, 2, 3):
        plant_facts(tmp_path / f"a/seed={seed}", **{SPEED: 8e5, "perf/mfu": 0.4})
    StudySpeed("H100", devices, "bf16-mixed", 2, "2", {"a": ArmSpeed([6e5], [1.0])}).save(tmp_path)
    assert arm(analyse(study, tmp_path), "a").costs.get("perf/mfu") == (mfu and pytest.approx(mfu))


def test_an_arm_differs_by_its_options_from_the_arm_before_but_not_by_names_and_seeds(tmp_path: Path) -> None:
    facts = {"b": {"choices": {"norm": "layernorm", "position": "rope"}}}
    facts["c"] = {"choices": {"norm": "layernorm", "position": "rope_500k"}}
    config = {name: {"model.norm.eps": 1e-6, "name": "other", "logger.wandb": True} for name in "bc"}
    config["c"] |= {"model.position.theta": 500_000.0, "optim.beta1": 0.8}
    result = analysed(tmp_path, dict.fromkeys("abc", 0.0), (2, 3), facts=facts, config=config)
    assert arm(result, "a").difference == {}
    assert arm(result, "b").difference == {"norm": ("rmsnorm", "layernorm")}
    assert arm(result, "c").difference == {"position": ("rope", "rope_500k"), "optim.beta1": (0.9, 0.8)}


def test_provenance_counts_the_runs_of_every_value(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0})
    plant_facts(tmp_path / "arm/seed=2", device="NVIDIA H100 80GB HBM3")
    plant_config(tmp_path / "base/seed=1", train__prompt="def")
    result = analyse(study, tmp_path)
    assert result.seeds == (1, 2, 3)
    assert result.environment["device"] == {"cpu": 5, "NVIDIA H100 80GB HBM3": 1}
    assert result.baseline_config == (tmp_path / "base/seed=1/resolved.yaml").read_text()


def test_a_study_that_was_written_before_some_fields_were_is_read_as_without(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0})
    lines = unstamped(tmp_path / "study.yaml").splitlines()
    later = ("margin:", "looks:", "compare:", "settings:", "title:", "max_seeds:", "reported_seeds:")
    old = [line for line in lines if not line.lstrip().startswith(later)]
    assert len(old) == len(lines) - 8
    (tmp_path / "study.yaml").write_text("\n".join(old))
    assert Study.load(tmp_path) == study


# --- added seeds ---


@pytest.mark.parametrize("reports", [(8,), (3, 8), (3, 4, 5, 6, 7, 8), (2, 5, 8)])
def test_reports_up_to_max_seeds_spend_the_level_once(reports: tuple[int, ...]) -> None:
    study = Study("", "", "", (), max_seeds=8)
    assert study.level_share(reports[0]) == reports[0] / 8
    whole = replace(study, reported_seeds=reports)
    assert sum(map(whole.level_share, reports)) == 1, "also once all of them have been drawn"


def test_a_report_with_max_seeds_tests_at_the_part_of_the_level_that_its_seeds_add(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": -0.01}, (1, 2, 3, 4), design="recipes")
    expected = stats.ttest_rel(
        final_losses(tmp_path, "arm", (1, 2, 3, 4)), final_losses(tmp_path, "base", (1, 2, 3, 4))
    )
    for reported, share in ((None, 0.5), ((4,), 0.5), ((3,), 0.125), ((3, 4), 0.125), ((2, 4, 6), 0.25)):
        result = analyse(replace(study, max_seeds=8, reported_seeds=reported), tmp_path)
        found = arm(result, "arm").to_baseline.nats
        assert (found.low, found.high) == pytest.approx([*expected.confidence_interval(1 - 0.05 * share)], abs=1e-4)
        assert found.p == pytest.approx(min(1, expected.pvalue / share), rel=1e-3)
        said = f"Tested at {0.05 * share:.3g} for 4 of at most 8 seeds (study.max_seeds)"
        assert sum(sentence.startswith(said) for sentence in result.answer) == 1


@pytest.mark.usefixtures("with_curves")
@pytest.mark.parametrize("compare", ["baseline", "all"])
def test_seeds_added_after_a_report_are_not_tested_and_one_sentence_says_why(tmp_path: Path, compare: str) -> None:
    study = replace(write_study(tmp_path, LADDER, (1, 2, 3, 4)), compare=compare)
    first, later = (analyse(replace(study, reported_seeds=reported), tmp_path) for reported in ((), (3, 4)))
    assert arm(first, "prenorm").to_previous.change.significant
    assert later.tests == "none"
    assert not any(found.change.is_tested for a in later.arms for found in (a.to_previous, a.to_baseline) if found)
    assert arm(later, "prenorm").to_previous.change.mean == arm(first, "prenorm").to_previous.change.mean
    (why,) = [line for line in later.answer if "study.max_seeds" in line]
    assert why.startswith("There is no p at 4 seeds, since a report at 3 spent the whole level of 5%")
    assert not any("not significant" in line or "is not tested against" in line for line in later.answer)
    assert all(math.isnan(low) for curve in later.difference_curves for low in curve.low)


def test_effects_share_the_level_of_max_seeds_too(tmp_path: Path) -> None:
    study = two_by_two(tmp_path).study
    for settings, share in (({}, 1.0), ({"max_seeds": 8}, 0.375), ({"reported_seeds": (2,)}, 0.0)):
        result = analyse(replace(study, **settings), tmp_path)
        assert [effect.change.is_tested for effect in result.effects] == [share > 0] * 3
        if share == 1:
            whole = result.effects
        elif share:
            p = [(before.change.p, after.change.p) for before, after in zip(whole, result.effects, strict=True)]
            assert [after for _, after in p] == pytest.approx([min(1, before / share) for before, _ in p], rel=0.01)
    assert any("There is no p at 3 seeds" in line for line in result.answer)


def stopped(folder: Path) -> Study:
    """A study in which the arm "far" stopped at three seeds, and the others have five, of at most eight."""
    study = write_study(
        folder, {"base": 0.0, "far": -0.3, "near": 0.0, "unclear": -0.02}, (1, 2, 3, 4, 5), design="recipes"
    )
    arms = [replace(a, members=a.members[:3]) if a.name == "far" else a for a in study.arms]
    return replace(study, arms=tuple(arms), max_seeds=8, reported_seeds=(3, 4), margin=0.03)


def test_an_arm_that_stopped_keeps_the_level_of_its_last_report(tmp_path: Path) -> None:
    study = stopped(tmp_path)
    result = analyse(study, tmp_path)
    of_three = analyse(replace(study, reported_seeds=(), max_seeds=3), tmp_path)
    p, whole = (arm(found, "far").to_baseline.change.p for found in (result, of_three))
    assert p == pytest.approx(whole * 8 / 3)
    (said,) = [line for line in result.answer if line.startswith("Tested at ")]
    assert said.startswith("Tested at 0.0188 for 3 and 0.00625 for 5 of at most 8 seeds")


def test_arms_are_undecided_while_their_interval_crosses_an_end_of_the_margin(tmp_path: Path) -> None:
    study = stopped(tmp_path)
    changes = {name: arm(analyse(study, tmp_path), name).to_baseline.change for name in ("near", "unclear")}
    assert max(-changes["near"].low, changes["near"].high) < 0.03 < -changes["unclear"].low
    result = analyse(study, tmp_path)
    assert result.is_complete
    assert result.undecided_arms == ["base", "unclear"]
    assert analyse(replace(study, margin=0.0005), tmp_path).undecided_arms == ["base", "near"], "the other is beyond"
    assert analyse(replace(study, margin=1.0), tmp_path).undecided_arms == []
    plant_end(tmp_path / "unclear/seed=2", "diverged", "nan", 7)
    assert analyse(study, tmp_path).undecided_arms == [], "more seeds would not test an arm that diverges"
    plant_end(tmp_path / "near/seed=5", "interrupted", "", 7)
    assert not analyse(study, tmp_path).is_complete


def test_an_undecided_effect_concerns_all_arms(tmp_path: Path) -> None:
    result = two_by_two(tmp_path)
    for margin, undecided in ((1.0, []), (abs(result.effects[0].change.mean), [arm.name for arm in result.arms])):
        assert analyse(replace(result.study, margin=margin), tmp_path).undecided_arms == undecided


# --- curves ---


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
    result = analysed(tmp_path, {"base": 0.0, "equal": 0.0, "worse": 0.5, "better": -0.3})
    losses = zip((1, 2, 3), final_losses(tmp_path, "equal"), final_losses(tmp_path, "base"), strict=True)
    above = {seed for seed, ours, theirs in losses if ours > theirs}
    assert 0 < len(above) < 3
    assert arm(result, "equal").to_reach == arm(result, "worse").to_reach == {}
    equal, worse, better = (arm(result, name).reach for name in ("equal", "worse", "better"))
    assert equal.censored == above
    assert all(equal.ratios[seed] == 1 if seed in above else equal.ratios[seed] < 1 for seed in (1, 2, 3))
    assert equal.ratio is None
    assert (worse.censored, better.censored) == ({1, 2, 3}, set())
    assert better.ratio.mean == pytest.approx(stats.gmean(list(better.ratios.values())))
    assert better.ratio.low < better.ratio.mean < better.ratio.high < 1
    assert set(arm(result, "base").reach.ratios.values()) == {1.0}


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
    table = tmp_path / "arm/seed=1/metrics.csv"
    rows = [f"{n},{n * 10},{n / 10},,{5 - n / 1000},1.5,,,,,," for n in range(1, 1000)]
    table.write_text("\n".join([table.read_text().splitlines()[0], *rows]) + "\n")
    (curve,) = [c for c in analyse(study, tmp_path).curves if c.arm == "arm" and c.metric == "val/loss"]
    assert 100 < len(curve.tokens) == len(curve.mean) <= 200
    assert (curve.tokens[-1], curve.mean[-1]) == (9990, 5 - 999 / 1000)
    assert curve.tokens == sorted(curve.tokens)


@pytest.mark.usefixtures("with_curves")
def test_a_point_on_a_curve_of_differences_is_the_test_of_the_losses_then(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": -0.1, "c": -0.1})
    for seed in (1, 2, 3):

        def shifted(row: dict[str, float], by: float = 0.03 * seed) -> dict[str, float]:
            return {"val/loss": row["val/loss"] + by} if row["step"] == 78 and "val/loss" in row else {}

        change_metrics(tmp_path / f"b/seed={seed}", shifted)
    result = analyse(study, tmp_path)
    step = result.difference_curves[0]
    losses = np.array([final_losses(tmp_path, name) for name in "abc"])
    losses[1] += (0.03, 0.06, 0.09)
    signs = np.array([[-1, 1, 0], [0, -1, 1], [-1, 0, 1]])
    then = judge(list(signs @ losses), signs @ signs.T / 2)[0]
    assert (step.mean[1], step.low[1], step.high[1]) == pytest.approx((then.mean, then.low, then.high))
    judged = arm(result, "b").to_previous.nats
    assert (step.mean[-1], step.low[-1], step.high[-1]) == (judged.mean, judged.low, judged.high)


@pytest.mark.usefixtures("with_curves")
def test_curves_of_differences_end_where_all_runs_do(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0})
    shorter = tmp_path / "b/seed=1"
    lines = (shorter / "metrics.csv").read_text().splitlines(keepends=True)
    (shorter / "metrics.csv").write_text("".join(lines[:30]))
    plant_facts(shorter, tokens=TOKENS_PER_STEP * 240.0)
    (curve,) = analyse(study, tmp_path).difference_curves
    assert curve.tokens[-1] < TOKENS_PER_STEP * 240


# --- learning rates ---


def test_each_arm_is_judged_at_its_best_learning_rate(tmp_path: Path) -> None:
    swept = {"rates": RATES, "best_rates": {"arm": 4e-3}, "design": "learning_rate"}
    result = analysed(tmp_path, {"base": 0.0, "arm": -0.1}, **swept)
    assert (arm(result, "base").learning_rates, arm(result, "arm").learning_rates) == ((2e-3,), (4e-3,))
    base, other = result.learning_rates
    assert (base.best, base.at_edge, other.best, other.at_edge) == (2e-3, [], 4e-3, [4e-3])
    assert other.rates == list(RATES)
    means = [np.mean(final_losses(tmp_path, f"base-lr={rate:g}")) for rate in RATES]
    assert [e.mean for e in base.loss if e] == pytest.approx(means)
    assert "optim.lr" not in arm(result, "arm").difference


def test_a_rate_at_which_a_seed_diverged_does_not_win_and_counts_as_a_model_of_frequencies(tmp_path: Path) -> None:
    arms, best = {"base": 0.0, "arm": 0.0}, {"arm": 4e-3}
    study = write_study(tmp_path, arms, rates=RATES, best_rates=best, design="learning_rate")
    plant_end(tmp_path / "arm-lr=0.004/seed=1", "diverged", "nan", 5)
    result = analyse(study, tmp_path)
    grid = result.learning_rates[1]
    assert (grid.best, grid.at_edge, grid.diverged, grid.loss[2].n) == (2e-3, [], [0, 0, 1], 2)
    at_low, at_best = (np.mean(final_losses(tmp_path, f"arm-lr={rate:g}")) for rate in (1e-3, 2e-3))
    at_high = np.mean([6.268971992882659, *final_losses(tmp_path, "arm-lr=0.004", (2, 3))])
    assert grid.sensitivity == pytest.approx(np.mean([at_low, at_best, at_high]) - min(at_low, at_best, at_high))
    assert result.unfinished[0][0].learning_rate == 4e-3


def test_an_arm_that_diverged_at_every_rate_has_no_best_one(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0}, seeds=(1, 2), rates=(1e-3, 2e-3), design="learning_rate")
    for seed, rate in itertools.product((1, 2), (1e-3, 2e-3)):
        plant_end(tmp_path / f"arm-lr={rate:g}/seed={seed}", "diverged", "nan", 5)
    result = analyse(study, tmp_path)
    grid = result.learning_rates[1]
    assert math.isnan(grid.best)
    assert (grid.loss, grid.diverged, grid.at_edge) == ([None, None], [2, 2], [])
    assert arm(result, "arm").learning_rates == (1e-3, 2e-3)


# --- factorials ---


def test_a_factorials_effects_are_those_that_were_planted(tmp_path: Path) -> None:
    arms, axes = {}, {}
    options = {"norm": ("layernorm", "rmsnorm"), "block": ("post", "pre"), "ffn": ("relu", "swiglu")}
    for levels in itertools.product((0, 1), repeat=3):
        name = "".join(map(str, levels))
        arms[name] = -0.1 * levels[0] + 0.04 * levels[1] + 0.06 * levels[0] * levels[1]
        axes[name] = {axis: options[axis][level] for axis, level in zip(options, levels, strict=True)}
    result = analysed(tmp_path, arms, axes=axes, design="factorial", noise=0.002)
    truth = {("norm",): -0.07, ("block",): 0.07, ("norm", "block"): 0.03}
    assert len(result.effects) == 6
    for effect in result.effects:
        assert effect.change.mean == pytest.approx(truth.get(effect.axes, 0.0), abs=0.003)
    assert result.verdict.startswith("Of 6 effects, 1 lowered the loss and 2 raised it; ")
    assert "norm \u00d7 ffn" in result.answer[0]
    assert result.tests == "moderated paired tests of the 6 effects"
    assert all(math.isnan(a.to_baseline.change.p) for a in result.arms[1:])


def two_by_two(folder: Path, seeds: tuple[int, ...] = (1, 2, 3)) -> Result:
    """A factorial of two axes that interact."""
    levels = itertools.product(("layernorm", "rmsnorm"), ("relu", "swiglu"))
    axes = {"+".join(pair): dict(zip(("norm", "ffn"), pair, strict=True)) for pair in levels}
    effects = dict(zip(axes, (0.0, -0.1, -0.05, -0.05), strict=True))
    return analysed(folder, effects, seeds, axes=axes, design="factorial")


def test_no_effect_is_tested_where_an_arm_diverged(tmp_path: Path) -> None:
    study = two_by_two(tmp_path, (1, 2, 3, 4)).study
    plant_end(tmp_path / "rmsnorm+swiglu/seed=2", "diverged", "nan", 7)
    result = analyse(study, tmp_path)
    assert len(result.effects) == 3
    assert not any(effect.change.is_tested for effect in result.effects)
    assert (result.tests, result.verdict) == ("none", "No arm could be tested.")


@pytest.mark.usefixtures("with_curves")
def test_an_interaction_is_half_the_change_of_one_axis_s_effect_and_every_effect_has_its_curve(tmp_path: Path) -> None:
    result = two_by_two(tmp_path)
    (found,) = result.interactions
    assert found.axes == ("norm", "ffn")
    assert found.levels == (("layernorm", "rmsnorm"), ("relu", "swiglu"))
    means = [[np.mean(final_losses(tmp_path, f"{a}+{b}")) for b in found.levels[1]] for a in found.levels[0]]
    assert np.array(found.means) == pytest.approx(np.array(means))
    losses = (final_losses(tmp_path, f"{a}+{b}") for a, b in itertools.product(*found.levels))
    plain, swiglu, rmsnorm, both = map(np.array, losses)
    contrasts = [rmsnorm + both - plain - swiglu, swiglu + both - plain - rmsnorm, plain + both - rmsnorm - swiglu]
    expected = judge([contrast / 2 for contrast in contrasts], np.eye(3))[-1]
    assert (found.changes[0], found.changes[1][0]) == ((None, None), None)
    change = found.changes[1][1]
    assert [change.mean, change.low, change.high] == pytest.approx([expected.mean, expected.low, expected.high])
    assert change.p == pytest.approx(expected.p)
    assert [effect.axes for effect in result.effects] == [("norm",), ("ffn",), ("norm", "ffn")]
    for curve, effect in zip(result.difference_curves, result.effects, strict=True):
        assert curve.name == effect.name
        last = (curve.mean[-1], curve.low[-1], curve.high[-1])
        assert last == (effect.change.mean, effect.change.low, effect.change.high)


# --- longer contexts ---


def eval_json(arm: Path, losses: dict[int, float | None], *seeds: int) -> None:
    """Write the evaluation of runs of an arm at these lengths."""
    entries = [{"length": n, "loss": loss, "positions": [], "losses": []} for n, loss in losses.items()]
    for seed in seeds:
        (arm / f"seed={seed}" / "eval.json").write_text(json.dumps({"step": STEPS, "lengths": entries}))


def test_lengths_are_means_over_seeds_and_none_where_positions_end(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"rope": 0.0, "learned": 0.1}, lengths=(256, 512), design="context")
    eval_json(tmp_path / "learned", {256: 3.0, 512: None}, 1, 2, 3)
    rope, learned = analyse(study, tmp_path).lengths
    assert (rope.arm, rope.trained, list(rope.loss)) == ("rope", 256, [256, 512])
    assert rope.loss[512].mean == pytest.approx(np.mean(final_losses(tmp_path, "rope")) + 0.001)
    assert rope.by_position[512][0] == [64, 192, 320, 448]
    assert (learned.loss[256].mean, learned.loss[512]) == (pytest.approx(3.0), None)
    assert 512 not in learned.by_position


def test_the_answer_says_whose_loss_holds_at_the_longest_context_and_who_has_none(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"rope": 0.0, "alibi": 0.1, "none": 0.1, "learned": 0.0}, design="context")
    for seed in (1, 2, 3):
        base = 3.0 + seed
        for name, rise in (("rope", 0.4), ("alibi", -0.01), ("none", 0.2), ("learned", None)):
            at_longest = None if rise is None else base + rise + 0.001 * seed**2
            eval_json(tmp_path / name, {256: base, 512: base, 1024: at_longest}, seed)
    result = analyse(study, tmp_path)
    assert result.answer[-2].startswith("At 1,024 tokens, compared with the trained length, the loss of alibi")
    interval = stats.ttest_1samp([-0.009, -0.006, -0.001], 0).confidence_interval()
    shown = f"[{interval.low:+.3f},\u00a0{interval.high:+.3f}]".replace("-", MINUS)
    assert f"alibi ({MINUS}0.005 {shown} nats per token, 3 seeds) falls most and that of rope (+" in result.answer[-2]
    assert result.answer[-1] == "learned could not be evaluated at that length."


# --- warnings ---


def test_two_seeds_give_a_warning_with_whose_noise_they_are_judged_by(tmp_path: Path) -> None:
    for arms, seeds, is_cautioned, from_others in (("ab", (1, 2), True, False), ("abc", (1, 2), True, True)):
        result = analysed(tmp_path / arms, dict.fromkeys(arms, 0.0), seeds)
        assert cautioned(result, "Two seeds: ") == is_cautioned
        assert cautioned(result, "mostly from the other arms") == from_others


@pytest.mark.slow
def test_a_noisy_arm_is_named_in_a_warning(tmp_path: Path) -> None:
    study = write_study(tmp_path, dict.fromkeys("abcdefgh", 0.0), (1, 2, 3, 4, 5))
    assert not cautioned(analyse(study, tmp_path), "than the typical one")
    plant_losses(tmp_path / "d", 3.8, 3.6, 3.75, 3.7, 3.62)
    (warning,) = [w for w in analyse(study, tmp_path).warnings if "than the typical one" in w]
    assert ": d " in warning


@pytest.mark.parametrize(
    ("losses", "groups"),
    [
        ((3.70, 3.71, 3.95), True),
        ((3.70, 3.96, 3.71, 3.95, 3.70), True),
        ((3.70, 3.95), False),
        ((3.6, 3.7, 3.8, 3.9, 4.0), False),
        ((3.70, 3.705, 3.712), False),
    ],
    ids=["one apart", "two apart", "two seeds, which a warning of their own says to decide little", "noisy", "quiet"],
)
def test_an_arm_whose_seeds_fall_into_two_groups_is_named(
    losses: tuple[float, ...], groups: bool, tmp_path: Path
) -> None:
    study = write_study(tmp_path, dict.fromkeys("abcd", 0.0), range(1, len(losses) + 1), seed_noise=0.0)
    plant_losses(tmp_path / "d", *losses)
    found = [w for w in analyse(study, tmp_path).warnings if w.startswith("Seeds fall into two groups: d ")]
    assert bool(found) == groups


def test_a_loss_at_the_entropy_of_token_frequencies_gives_a_warning(tmp_path: Path) -> None:
    result = analysed(tmp_path, {"base": 0.0, "stuck": 2.55})
    assert result.warnings[0].startswith(
        "Arms have not learned more than token frequencies, in nats per token: stuck ends"
    )


def test_added_seeds_give_a_warning_with_the_number_of_earlier_reports(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"base": 0.0, "arm": 0.0})
    assert not cautioned(analyse(study, tmp_path), "Seeds were added")
    assert cautioned(analyse(replace(study, looks=2), tmp_path), "Seeds were added after 2 reports: p and intervals no")
