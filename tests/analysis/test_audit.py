"""Runs' records are checked against each other, and against what can be recomputed from them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.config.trust import Trust
from llama_lab.runs.study import ArmSpeed, Study, StudySpeed
from tests.analysis.synthetic import (
    change_metrics,
    in_runs,
    plant_config,
    plant_end,
    plant_facts,
    replace_text,
    run_folder,
    run_of,
    warnings_of,
    write_study,
)

RMSNORM = "llama_lab.model.norm.RMSNorm"


def copy_run(source: Path, copy: Path, **facts: Any) -> None:
    """Replace a run by a copy of another, keeping its path."""
    shutil.rmtree(copy)
    shutil.copytree(source, copy)
    plant_facts(copy, **facts)


# --- sizes ---


def test_a_record_that_states_fewer_parameters_than_the_model_has_is_named(tmp_path: Path) -> None:
    stated = round(1840256 * 0.6)
    facts = {"rmsnorm": {"params": stated}}
    assert warnings_of(tmp_path, facts=facts) == [
        "The record of rmsnorm states another size than the model has: 1,104,154 parameters instead of 1,840,256."
    ]


@pytest.mark.parametrize(
    ("key", "noun"),
    [
        ("params_non_embedding", "parameters without embeddings"),
        ("flops_per_token", "FLOPs per token"),
        ("train_flops_per_token", "FLOPs per token of training"),
        ("kv_cache/bytes_per_token", "bytes of KV cache per token"),
        ("kv_cache/bytes", "bytes of KV cache"),
    ],
)
def test_every_size_on_record_is_recomputed(tmp_path: Path, key: str, noun: str) -> None:
    (warning,) = warnings_of(tmp_path, in_runs(plant_facts, **{key: 1000}))
    assert warning.startswith(f"The record of rmsnorm/seed=2 states another size than the model has: 1,000 {noun} ")


def test_a_summary_that_states_another_size_than_the_run_began_with_is_named(tmp_path: Path) -> None:
    change = in_runs(replace_text, name="summary.json", old='"params": 1840256', new='"params": 7')
    (warning,) = warnings_of(tmp_path, change)
    assert "7 parameters instead of 1,840,256" in warning


def test_the_sizes_of_an_unfinished_run_are_recomputed_too(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        run = run_of(folder, study)
        plant_facts(run, params=7)
        plant_end(run, "running", "", 5)

    assert any("7 parameters instead of 1,840,256" in warning for warning in warnings_of(tmp_path, plant))


def test_a_model_that_cannot_be_rebuilt_is_named(tmp_path: Path) -> None:
    change = in_runs(replace_text, 1, 2, 3, name="resolved.yaml", old=RMSNORM, new="of_another_machine.Norm")
    found = warnings_of(tmp_path, change)
    (warning,) = [w for w in found if w.startswith("The sizes")]
    assert warning == (
        "The sizes on record of rmsnorm cannot be checked: resolved.yaml names of_another_machine.Norm, which is none "
        "of our components and could run any code; if you trust it, add --trust of_another_machine to "
        "llama-lab-compare."
    )
    trust = Trust(("of_another_machine",))
    found = list(analyse(Study.load(tmp_path), tmp_path, trust).warnings)
    (warning,) = [w for w in found if w.startswith("The sizes")]
    assert "of_another_machine.Norm: cannot be imported, " in warning


def test_the_size_of_a_model_of_a_trusted_package_is_recomputed(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02})
    plant_facts(run_of(tmp_path, study), params=7)
    for seed in (1, 2, 3):
        replace_text(run_of(tmp_path, study, seed), "resolved.yaml", RMSNORM, "tests.analysis.synthetic.MyNorm")
    assert any("MyNorm" in warning for warning in analyse(study, tmp_path).warnings)
    found = analyse(study, tmp_path, Trust(("tests",))).warnings
    assert any("7 parameters instead of 1,840,256" in warning for warning in found)
    assert not any("MyNorm" in warning and warning.startswith("The sizes") for warning in found)


def test_a_model_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    change = in_runs(replace_text, name="resolved.yaml", old="n_kv_heads: 4", new="n_kv_heads: 3")
    found = warnings_of(tmp_path, change)
    assert any(w.startswith("The sizes on record of rmsnorm/seed=2 cannot be checked: model.") for w in found)


@pytest.mark.parametrize("key", ["vocab_size", "model"])
def test_a_record_without_the_model_or_its_vocabulary_is_named(tmp_path: Path, key: str) -> None:
    def plant(folder: Path, study: Study) -> None:
        run = run_of(folder, study)
        if key == "model":
            (run / "resolved.yaml").write_text("train: {tokens: 1.6e+6}\nseed: 2\n")
            return
        for file in (run / "environment.json", run / "summary.json"):
            content = json.loads(file.read_text())
            del content["vocab_size"]
            file.write_text(json.dumps(content))

    found = [
        w
        for w in warnings_of(tmp_path, plant)
        if w.startswith("The sizes on record of rmsnorm/seed=2 cannot be checked: ")
    ]
    assert len(found) == 1


# --- copies ---


def test_a_seed_that_is_a_copy_of_another_under_its_own_label_is_named(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        source, copy = (run_of(folder, study, seed) for seed in (1, 2))
        copy_run(source, copy, seed=2)
        plant_config(copy, seed=2, model__seed=2, data__seed=2)

    assert warnings_of(tmp_path, plant) == [
        "rmsnorm/seed=1, rmsnorm/seed=2 have the same losses, to the last digit: one is a copy of another."
    ]


def test_a_seed_that_is_a_copy_under_the_label_of_its_folder_alone_is_named(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        copy_run(*(run_of(folder, study, seed) for seed in (1, 2)))

    found = warnings_of(tmp_path, plant)
    assert "rmsnorm/seed=2 is listed with seed=2, and was trained with seed=1." in found
    assert any(warning.startswith("rmsnorm/seed=1, rmsnorm/seed=2 have the same losses") for warning in found)


def test_a_run_at_another_rate_than_its_study_lists_is_named(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        plant_config(run_folder(folder, study, "rmsnorm", 2, 2e-3), optim__lr=3e-3)

    sentence = "rmsnorm-lr=0.002/seed=2 is listed with optim.lr=0.002, and was trained with optim.lr=0.003."
    assert sentence in warnings_of(tmp_path, plant, rates=(1e-3, 2e-3, 4e-3))


def test_an_arm_that_is_a_copy_of_another_is_named_once(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        for seed in (1, 2, 3):
            source, copy = (run_folder(folder, study, arm, seed) for arm in ("layernorm", "rmsnorm"))
            copy_run(source, copy, arm="rmsnorm")

    (warning,) = warnings_of(tmp_path, plant)
    assert warning == (
        "layernorm, rmsnorm have the same losses at every seed: one is a copy of another, or their settings are "
        "equivalent."
    )


def test_one_run_that_is_a_copy_of_another_arms_is_named(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        copy_run(*(run_folder(folder, study, arm, 2) for arm in ("layernorm", "rmsnorm")), arm="rmsnorm")

    assert warnings_of(tmp_path, plant) == [
        "layernorm/seed=2, rmsnorm/seed=2 have the same losses, to the last digit: one is a copy of another."
    ]


def test_equal_last_losses_after_unequal_ones_are_chance(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        first, second = (run_of(folder, study, seed) for seed in (1, 2))
        last = json.loads((first / "summary.json").read_text())
        old = json.loads((second / "summary.json").read_text())
        text = (second / "metrics.csv").read_text()
        for key in ("val/loss", "val/bits_per_byte"):
            text = text.replace(f",{old[key]},", f",{last[key]},")
        (second / "metrics.csv").write_text(text)
        plant_facts(second, **{key: last[key] for key in ("val/loss", "val/bits_per_byte")})

    assert warnings_of(tmp_path, plant) == []


# --- ends and speeds ---


@pytest.mark.parametrize("key", ["val/loss", "val/bits_per_byte", "train/loss"])
def test_a_summary_that_disagrees_with_the_metrics_is_named(tmp_path: Path, key: str) -> None:
    (warning,) = warnings_of(tmp_path, in_runs(plant_facts, **{key: 1.25}))
    assert warning.startswith(f"summary.json and metrics.csv disagree on the last {key} of rmsnorm/seed=2: 1.25 for ")


def test_a_summary_whose_metrics_are_lost_is_named(tmp_path: Path) -> None:
    found = warnings_of(tmp_path, in_runs(lambda run: (run / "metrics.csv").unlink()))
    assert any(w.endswith(" for none.") and "last val/loss of rmsnorm/seed=2" in w for w in found)


@pytest.mark.parametrize(("shift", "is_reported"), [(0.02, False), (0.1, True)])
def test_a_summary_and_a_curve_that_are_shifted_alike_are_denied_by_the_evaluation(
    tmp_path: Path, shift: float, is_reported: bool
) -> None:
    def shifted(row: dict[str, float]) -> dict[str, float]:
        loss = row.get("val/loss", 0.0)
        factor = 1 + shift / loss if loss else 1.0
        return {key: row[key] * factor for key in ("val/loss", "val/bits_per_byte") if key in row}

    plant = in_runs(lambda run: change_metrics(run, shifted))
    sentence = "eval.json has another loss at the trained length: rmsnorm/seed=2."
    assert warnings_of(tmp_path, plant, lengths=(256, 512)) == [sentence] * is_reported


@pytest.mark.parametrize(("speed", "is_reported"), [(7_900.0, True), (8_100.0, False), (18_100.0, True)])
def test_speeds_that_differ_more_than_one_and_a_half_times_within_an_arm_are_reported(
    tmp_path: Path, speed: float, is_reported: bool
) -> None:
    found = warnings_of(tmp_path, in_runs(plant_facts, **{"perf/tokens_per_second": speed}))
    assert len(found) == is_reported
    if is_reported:
        assert found[0].startswith("Logged speeds within rmsnorm differ by a factor of 1.5, from ")
        assert f"{speed:,.0f} in rmsnorm/seed=2" in found[0]


def test_unequal_speeds_of_many_arms_are_one_sentence_and_none_where_speeds_were_measured(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        for arm, speed in (("rmsnorm", 6_000.0), ("layernorm", 4_000.0)):
            plant_facts(run_folder(folder, study, arm, 2), **{"perf/tokens_per_second": speed})

    (found,) = warnings_of(tmp_path, plant)
    assert found.startswith(
        "Logged speeds within 2 arms, most within layernorm, differ by a factor of 3.0, from 4,000 in "
    )
    arms = {name: ArmSpeed([12_000.0] * 3, [300.0] * 3) for name in ("rmsnorm", "layernorm")}
    StudySpeed("cpu", 1, "32-true", 2, "2.13.0+cpu", arms).save(tmp_path)
    assert not any("Logged speeds" in warning for warning in analyse(Study.load(tmp_path), tmp_path).warnings)


def test_speeds_of_different_arms_may_differ(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, in_runs(plant_facts, 1, 2, 3, **{"perf/tokens_per_second": 24_000.0})) == []


def test_a_study_may_list_runs_by_other_names(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02})
    renamed = replace(
        study,
        baseline="a",
        arms=tuple(replace(a, name=n, previous=None) for a, n in zip(study.arms, "ab", strict=True)),
    )
    assert analyse(renamed, tmp_path).warnings == ()
