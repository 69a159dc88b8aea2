"""Measurements of inference, from eval.json to the report's numbers and warnings."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Inference, Result
from llama_lab.report.page import page
from llama_lab.report.summary import summary_rows, write_summary_csv
from llama_lab.runs.study import Study
from tests.analysis.synthetic import STEPS, cache, plant_end, plant_evaluation, speed, write_study

ARMS = {"mha": 0.0, "gqa": 0.02}
COLUMNS = (
    "decode_tokens_per_second",
    "decode_tokens_per_second_uncached",
    "prefill_seconds",
    "kv_cache_measured_bytes",
)
CLEAN = {"speed": [speed(128), speed(256), speed(256, 8)], "cache": [cache(128, 2**18), cache(256, 2**19)]}


def evaluated(folder: Path, parts: dict[str, Any] = CLEAN, **settings: Any) -> Study:
    """A study whose runs all have an eval.json with these parts."""
    study = write_study(folder, ARMS, **settings)
    for arm in study.arms:
        for member in arm.members:
            plant_evaluation(folder / member.folder, **parts)
    return study


def found(result: Result, name: str) -> Inference:
    """The measurements of an arm."""
    return next(arm for arm in result.inference if arm.arm == name)


def warnings_of(result: Result) -> list[str]:
    """The warnings of inference."""
    words = ("Measurements of inference", "not quiet", "their formula", "several contexts")
    return [warning for warning in result.warnings if any(word in warning for word in words)]


def test_a_speed_is_the_mean_over_seeds_of_the_median_round_with_the_lowest_and_the_highest(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    for seed, seconds in ((1, 0.001), (2, 0.002), (3, 0.004)):
        decode = [seconds, 100 * seconds, 0.9 * seconds]
        parts = [speed(256, 8, decode=decode, uncached=[0.008, 0.016, 0.1], prefill=[seconds, seconds / 2, 1.0])]
        plant_evaluation(tmp_path / f"gqa/seed={seed}", speed=parts)
    (eight,) = found(analyse(study, tmp_path), "gqa").speeds
    assert (eight.batch_size, eight.context, eight.runs) == (8, 256, 3)
    of_seeds = [8 / 0.001, 8 / 0.002, 8 / 0.004]
    assert (eight.decode.mean, eight.decode.low, eight.decode.high) == pytest.approx((sum(of_seeds) / 3, 2000, 8000))
    assert eight.uncached.mean == pytest.approx(8 / 0.016)
    assert (eight.gain.mean, eight.gain.low, eight.gain.high) == pytest.approx(((16 + 8 + 4) / 3, 4, 16))
    assert (eight.prefill.mean, eight.prefill.low) == pytest.approx((0.007 / 3, 0.001))


def test_a_cache_is_that_of_one_sequence_also_where_batches_alone_were_measured(tmp_path: Path) -> None:
    parts = {"cache": [cache(256, 2**22, 8, "int8"), cache(128, 2**18, 4), cache(256, 2**21, 4)]}
    mha = found(analyse(evaluated(tmp_path, parts), tmp_path), "mha")
    assert [(one.dtype, one.context, one.measured.mean) for one in mha.caches] == [
        ("bfloat16", 128, 2**16),
        ("bfloat16", 256, 2**19),
    ]
    assert mha.cache("bfloat16") == mha.caches[1]
    assert mha.speeds == ()


def test_runs_that_were_not_evaluated_at_their_end_are_left_out_of_the_mean(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    (tmp_path / "gqa/seed=1/eval.json").unlink()
    plant_evaluation(tmp_path / "gqa/seed=2", speed=[speed(256, decode=[0.004])])
    plant_end(tmp_path / "mha/seed=2", "diverged", "nan", 5)
    result = analyse(study, tmp_path)
    (only,) = found(result, "gqa").speeds
    assert (only.runs, only.decode.mean) == (2, pytest.approx((250 + 500) / 2))
    assert found(result, "mha").speeds[0].runs == 2
    assert len(found(result, "gqa").caches) == 2  # of the third run alone
    for seed in (1, 2, 3):
        plant_evaluation(tmp_path / f"gqa/seed={seed}", STEPS - 10, device="cuda", **CLEAN)
    result = analyse(study, tmp_path)
    assert [arm.arm for arm in result.inference] == ["mha"]
    assert warnings_of(result) == []


def test_an_arm_of_runs_with_unequal_measurements_shows_what_they_share(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    plant_evaluation(tmp_path / "gqa/seed=2", speed=[speed(64), speed(128)], cache=CLEAN["cache"])
    gqa = found(analyse(study, tmp_path), "gqa")
    assert [(one.batch_size, one.context) for one in gqa.speeds] == [(1, 128)]
    assert [one.context for one in gqa.caches] == [128, 256]


def test_an_arm_that_was_measured_further_is_reported_and_shown_at_its_own_context(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    for seed in (1, 2, 3):
        parts = [speed(256), speed(512, decode=[0.005])]
        plant_evaluation(tmp_path / f"gqa/seed={seed}", speed=parts, cache=[cache(512, 2**19)])
    result = analyse(study, tmp_path)
    mha, gqa = (found(result, name) for name in ARMS)
    assert (mha.speed(1).context, gqa.speed(1).context, gqa.speed(8)) == (256, 512, None)
    assert [row["decode_tokens_per_second"] for row in summary_rows(result)] == pytest.approx([500, 200])
    assert warnings_of(result) == [
        "Measurements of inference differ in largest context: 256 in mha; 512 in gqa; their speeds cannot be compared."
    ]


def test_the_csv_holds_one_sequence_at_the_largest_context_and_nothing_where_nothing_is_known(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    for seed in (1, 2, 3):
        plant_evaluation(tmp_path / f"gqa/seed={seed}", cache=[cache(256, 2**18), cache(256, 2**17, 1, "int8")])
    write_summary_csv(analyse(study, tmp_path), tmp_path / "summary.csv")
    with (tmp_path / "summary.csv").open(newline="") as file:
        mha, gqa = ([row[name] for name in COLUMNS] for row in csv.DictReader(file))
    assert [float(value) for value in mha] == pytest.approx([500, 125, 0.001, 2**19])
    assert gqa == ["", "", "", "262144.0"]


def test_speeds_measured_under_other_conditions_are_named(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    for key, value, shown in (
        ("device", "NVIDIA H100 80GB HBM3", "device: NVIDIA H100 80GB HBM3 in gqa/seed=2; cpu in "),
        ("threads", 16, "CPU threads: 16 in gqa/seed=2; 2 in "),
    ):
        plant_evaluation(tmp_path / "gqa/seed=2", **CLEAN, **{key: value})
        assert warnings_of(analyse(study, tmp_path)) == [
            f"Measurements of inference differ in {shown}mha, gqa/seed=1, gqa/seed=3; their speeds cannot be compared."
        ]
    lengths = evaluated(tmp_path / "lengths", {"lengths": (own := [{"length": 256, "loss": 3.0}])})
    plant_evaluation(tmp_path / "lengths/gqa/seed=2", lengths=own, precision="bf16-mixed")
    (warning,) = warnings_of(analyse(lengths, tmp_path / "lengths"))
    assert warning.startswith("Losses at several contexts were evaluated with unequal precision: bf16-mixed in gqa/see")
    sizes = evaluated(tmp_path / "sizes", {"cache": CLEAN["cache"]})
    plant_evaluation(tmp_path / "sizes/gqa/seed=2", cache=CLEAN["cache"], device="cuda")
    assert warnings_of(analyse(sizes, tmp_path / "sizes")) == [], "sizes may be measured anywhere"


@pytest.mark.parametrize("part", ["prefill", "uncached"])
def test_rounds_that_spread_widely_are_reported_once_with_their_arms(tmp_path: Path, part: str) -> None:
    study = evaluated(tmp_path)
    sentence = "The machine was not quiet while inference was measured, with rounds more than 1.5\u00d7 apart: gqa."
    for slowest, reported in ((1.4, []), (1.6, [sentence])):
        for seed in (1, 2):
            parts = [speed(128), speed(256, **{part: [0.01, 0.01 * slowest, 0.01]})]
            plant_evaluation(tmp_path / f"gqa/seed={seed}", speed=parts)
        assert warnings_of(analyse(study, tmp_path)) == reported


def test_a_cache_that_does_not_match_its_formula_is_reported_once_for_its_arm(tmp_path: Path) -> None:
    study = evaluated(tmp_path)
    for seed in (2, 3):
        plant_evaluation(tmp_path / f"gqa/seed={seed}", cache=[cache(128, 1000), cache(256, 2000, excess=24)])
    assert warnings_of(analyse(study, tmp_path)) == [
        "KV caches have other bytes than by their formula: gqa 2,024 instead of 2,000 at 256 tokens."
    ]


def test_rounds_without_a_valid_time_give_no_speed_and_do_not_break_the_report(tmp_path: Path) -> None:
    study = write_study(tmp_path, ARMS, (1,))
    entry = speed(256)
    del entry["uncached"]
    unmeasured = [speed(256, decode=seconds) for seconds in ([], [0.0, 0.0], [math.nan, 0.1], [-1.0])]
    for parts in (*unmeasured, entry):
        plant_evaluation(tmp_path / "mha/seed=1", speed=[parts])
        result = analyse(study, tmp_path)
        (only,) = found(result, "mha").speeds
        missing, there = (only.uncached, only.decode) if parts is entry else (only.decode, only.uncached)
        assert missing is only.gain is None
        assert there.mean == pytest.approx(500 if parts is entry else 125)
    page(result)
