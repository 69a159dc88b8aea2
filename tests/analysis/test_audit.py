"""Runs' records are checked against each other, and against what can be recomputed from them."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.config.trust import Trust
from llama_lab.runs.study import ArmSpeed, Study, StudySpeed
from tests.analysis.synthetic import (
    Plant,
    change_metrics,
    in_runs,
    plant_config,
    plant_end,
    plant_facts,
    planted_warnings,
    replace_text,
    run_folder,
    run_of,
    warnings_of,
    write_study,
)

RMSNORM, SPEED = "llama_lab.model.norm.RMSNorm", "perf/tokens_per_second"
STATES = "Records state other sizes than models have: "
DISAGREE = "summary.json and metrics.csv disagree on the last values:"
facts = partial(in_runs, plant_facts)


# --- sizes ---


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (facts(params=1000), f"{STATES}1,000 parameters instead of 1,840,256 in rmsnorm/seed=2."),
        (facts(1, 2, 3, params=7), f"{STATES}7 parameters instead of 1,840,256 in rmsnorm."),
        (facts(**{"kv_cache/bytes": 1000}), f"{STATES}1,000 bytes of KV cache "),
        (in_runs(replace_text, name="summary.json", old='params": 1', new='params": 7'), f"{STATES}7,840,256 param"),
        (facts(**{"val/loss": 1.25}), f"{DISAGREE} val/loss 1.25 for "),
    ],
)
def test_sizes_and_losses_on_record_that_the_run_denies_are_named(tmp_path: Path, plant: Plant, named: str) -> None:
    (warning,) = warnings_of(tmp_path, plant)
    assert warning.startswith(named)


def test_the_sizes_of_an_unfinished_run_are_recomputed_too(tmp_path: Path) -> None:
    def plant(run: Path) -> None:
        plant_facts(run, params=7)
        plant_end(run, "running", "", 5)

    assert f"{STATES}7 parameters instead of 1,840,256 in rmsnorm/seed=2." in warnings_of(tmp_path, in_runs(plant))


def without_vocabulary(run: Path) -> None:
    for file in (run / "environment.json", run / "summary.json"):
        content = json.loads(file.read_text())
        del content["vocab_size"]
        file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (partial(replace_text, name="resolved.yaml", old="n_kv_heads: 4", new="n_kv_heads: 3"), "model."),
        (lambda run: (run / "resolved.yaml").write_text("train: {tokens: 1.6e+6}\nseed: 2\n"), "resolved.yaml has no"),
        (without_vocabulary, ""),
    ],
    ids=["no such model", "no model", "no vocabulary"],
)
def test_a_model_that_cannot_be_built_is_named(tmp_path: Path, change: Callable[[Path], object], reason: str) -> None:
    (warning,) = [w for w in warnings_of(tmp_path, in_runs(change)) if w.startswith("Sizes on record")]
    assert warning.startswith(f"Sizes on record of rmsnorm/seed=2 cannot be checked: {reason}")


def test_a_model_of_another_package_is_named_until_it_is_trusted_and_can_be_imported(tmp_path: Path) -> None:
    def unchecked(*trusted: str) -> list[str]:
        found = analyse(Study.load(tmp_path), tmp_path, Trust(trusted)).warnings
        return [warning for warning in found if warning.startswith("Sizes on record")]

    study = write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02})
    in_runs(replace_text, 1, 2, 3, name="resolved.yaml", old=RMSNORM, new="of_another_machine.Norm")(tmp_path, study)
    assert unchecked() == [
        "Sizes on record of rmsnorm cannot be checked: resolved.yaml names of_another_machine.Norm, which is none of "
        "our components and could run any code; if you trust it, add --trust of_another_machine to llama-lab-compare."
    ]
    mine = "tests.analysis.synthetic.MyNorm"
    in_runs(replace_text, 1, 2, 3, name="resolved.yaml", old="of_another_machine.Norm", new=mine)(tmp_path, study)
    assert mine in unchecked()[0]
    assert unchecked("tests") == []


# --- copies ---


def copied(*runs: tuple[tuple[str, int], tuple[str, int]], is_relabelled: bool = True) -> Plant:
    """Replace runs, each by an arm and a seed, by copies of others that keep their own path."""

    def plant(folder: Path, study: Study) -> None:
        for source, (arm, seed) in runs:
            copy = run_folder(folder, study, arm, seed)
            shutil.rmtree(copy)
            shutil.copytree(run_folder(folder, study, *source), copy)
            plant_facts(copy, arm=arm)
            if is_relabelled:
                plant_facts(copy, seed=seed)
                plant_config(copy, seed=seed, model__seed=seed, data__seed=seed)

    return plant


SEED_1, SEED_2 = ("rmsnorm", 1), ("rmsnorm", 2)
OTHERWISE = "Runs were trained otherwise than the study lists them"
COPY = "have the same losses, to the last digit: one is a copy of another."
ALL = "have the same losses at every seed: one is a copy of another, or their settings are equivalent."


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (copied((SEED_1, SEED_2)), f"rmsnorm/seed=1, rmsnorm/seed=2 {COPY}"),
        (copied((("layernorm", 2), SEED_2)), f"layernorm/seed=2, rmsnorm/seed=2 {COPY}"),
        (copied(*((("layernorm", seed), ("rmsnorm", seed)) for seed in (1, 2, 3))), f"layernorm, rmsnorm {ALL}"),
    ],
)
def test_a_run_or_an_arm_that_is_a_relabelled_copy_is_named(tmp_path: Path, plant: Plant, named: str) -> None:
    assert warnings_of(tmp_path, plant) == [named]


def test_a_run_with_another_seed_or_rate_than_its_study_lists_is_named(tmp_path: Path) -> None:
    def faster(folder: Path, study: Study) -> None:
        plant_config(run_folder(folder, study, "rmsnorm", 2, 2e-3), optim__lr=3e-3)

    found = warnings_of(tmp_path / "copy", copied((SEED_1, SEED_2), is_relabelled=False))
    assert f"{OTHERWISE}: seed=1 instead of 2 in rmsnorm/seed=2." in found
    assert any(warning.startswith("rmsnorm/seed=1, rmsnorm/seed=2 have the same losses") for warning in found)
    sentence = f"{OTHERWISE}: optim.lr=0.003 instead of 0.002 in rmsnorm-lr=0.002/seed=2."
    assert sentence in warnings_of(tmp_path / "rates", faster, rates=(1e-3, 2e-3, 4e-3))


def test_equal_last_losses_after_unequal_ones_are_chance(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        last = json.loads((run_of(folder, study, 1) / "summary.json").read_text())
        own = {key: last[key] for key in ("val/loss", "val/bits_per_byte")}
        change_metrics(run_of(folder, study), lambda row: own if row["step"] == 390 and "val/loss" in row else {})

    assert warnings_of(tmp_path, plant) == []


# --- ends and speeds ---


def test_a_summary_whose_metrics_are_lost_is_named(tmp_path: Path) -> None:
    found = warnings_of(tmp_path, in_runs(lambda run: (run / "metrics.csv").unlink()))
    assert any(
        w.startswith(DISAGREE) and re.search(r"val/loss [\d.]+ for none.* in rmsnorm/seed=2\.", w) for w in found
    )


@pytest.mark.parametrize(("shift", "is_reported"), [(0.02, False), (0.1, True)])
def test_an_evaluation_denies_a_shifted_summary_and_curve(tmp_path: Path, shift: float, is_reported: bool) -> None:
    def shifted(row: dict[str, float]) -> dict[str, float]:
        factor = 1 + shift / row.get("val/loss", 1.0)
        return {key: row[key] * factor for key in ("val/loss", "val/bits_per_byte") if key in row}

    found = warnings_of(tmp_path, in_runs(lambda run: change_metrics(run, shifted)), lengths=(256, 512))
    assert found == ["eval.json has another loss at the trained length: rmsnorm/seed=2."] * is_reported


@pytest.mark.parametrize(("speed", "is_reported"), [(7_900.0, True), (8_100.0, False), (18_100.0, True)])
def test_speeds_1_5_times_apart_within_an_arm_are_reported(tmp_path: Path, speed: float, is_reported: bool) -> None:
    found = warnings_of(tmp_path, facts(**{SPEED: speed}))
    assert len(found) == is_reported
    if is_reported:
        assert found[0].startswith("Logged speeds within rmsnorm differ by a factor of 1.5, from ")
        assert f"{speed:,.0f} in rmsnorm/seed=2" in found[0]


def test_unequal_speeds_of_many_arms_are_one_sentence_and_none_where_speeds_were_measured(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        for arm, speed in (("rmsnorm", 6_000.0), ("layernorm", 4_000.0)):
            plant_facts(run_folder(folder, study, arm, 2), **{SPEED: speed})

    (found,) = warnings_of(tmp_path / "many", plant)
    assert found.startswith(
        "Logged speeds within 2 arms, most within layernorm, differ by a factor of 3.0, from 4,000 in "
    )
    arms = {name: ArmSpeed([12_000.0] * 3, [300.0] * 3) for name in ("rmsnorm", "layernorm")}
    StudySpeed("cpu", 1, "32-true", 2, "2.13.0+cpu", arms).save(tmp_path / "many")
    again = analyse(Study.load(tmp_path / "many"), tmp_path / "many")
    assert not any("Logged speeds" in warning for warning in again.warnings)


def test_a_study_may_list_runs_by_other_names(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02})
    arms = tuple(replace(a, name=n, previous=None) for a, n in zip(study.arms, "ab", strict=True))
    assert planted_warnings(analyse(replace(study, baseline="a", arms=arms), tmp_path)) == []
