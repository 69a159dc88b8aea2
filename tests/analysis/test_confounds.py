"""Every planted confound is named, with its runs and its values; a clean study has none."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.runs.study import Study
from tests.analysis.synthetic import (
    FACTS,
    Plant,
    in_runs,
    plant_config,
    plant_end,
    plant_facts,
    remove_run,
    run_folder,
    warnings_of,
    write_study,
)

VERSIONS, COMMIT = FACTS["versions"], FACTS["git"]["commit"]
DIRTY = {"git": {"commit": COMMIT, "dirty": True}}
ARMS = ("layernorm", "rmsnorm")
RATES = (1e-3, 2e-3, 4e-3)
TUNED = {"rates": RATES, "tuned": True, "design": "learning_rate"}
GROUPED = {"design": "comparison", "axes": {arm: {"norm": arm} for arm in ARMS}}
FURTHER = "resume=runs/ladder/rmsnorm/seed=2"
facts, config = partial(in_runs, plant_facts), partial(in_runs, plant_config)


def earlier(**other: Any) -> Plant:
    """A run with earlier sessions, in two of which something was other."""
    return facts(earlier_sessions=[FACTS | other, FACTS | other, FACTS])


def test_a_clean_study_is_warned_of_its_one_learning_rate_alone_and_not_if_rates_are_searched(
    tmp_path: Path,
) -> None:
    result = analyse(write_study(tmp_path / "one", dict.fromkeys(ARMS, 0.0)), tmp_path / "one")
    (warning,) = result.warnings
    assert warning.startswith("One learning rate for all arms, 0.002: an arm with another optimum is at a disadvantage")
    assert result.notes == ()
    result = analyse(write_study(tmp_path / "swept", dict.fromkeys(ARMS, 0.0), **TUNED), tmp_path / "swept")
    assert result.warnings == ()


def test_the_gravest_warning_is_first_and_those_of_speeds_are_last_with_a_line_for_all_arms(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 3.0, "b": 3.0, "c": 3.0}, match="none", facts={"c": {"cpu_threads": 7}})
    for arm in ("b", "c"):
        for seed in (1, 2, 3):
            plant_facts(run_folder(tmp_path, study, arm, seed), params_non_embedding=900_000)
    unigram, *others, speeds = analyse(study, tmp_path).warnings
    assert unigram.startswith("No arm has learned more than token frequencies, in nats per token: a ends at 6.")
    assert any(warning.endswith("b 13.7% more than a, c 13.7% more than a.") for warning in others)
    assert speeds.startswith("Runs differ in CPU threads: ")


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (facts(device="H100"), "Runs differ in device: H100 in rmsnorm/seed=2; cpu in"),
        (facts(data_hash="0123456789abcdef"), "Runs differ in data: 0123456789ab in rmsnorm/seed=2; 9f4fcfe12c2f in"),
        (facts(versions=VERSIONS | {"torch": "2.12"}), "Runs differ in torch: 2.12 in rmsnorm/seed=2; 2.13.0+cpu in"),
        (facts(git=None), "Runs differ in commit: unknown in rmsnorm/seed=2; 799d2f66f95e in"),
        (config(train__recompute="block"), "Runs differ in train.recompute: block in rmsnorm/seed=2; none in"),
        (config(train__tokens=3e6), "Training tokens differ: 3,000,000 in rmsnorm/seed=2; 1,600,000 in"),
        (config(schedule__warmup=0.1), "schedule.warmup differs: 0.1 in rmsnorm/seed=2; 0.05 in"),
        (config(optim__beta3=0.9), "optim.beta3 differs: 0.9 in rmsnorm/seed=2; unset in"),
        (config(train__grad_clip=None), "train.grad_clip differs: None in rmsnorm/seed=2; 1 in"),
    ],
)
def test_a_run_under_other_conditions_is_named_with_the_others(tmp_path: Path, plant: Plant, named: str) -> None:
    (warning,) = warnings_of(tmp_path, plant)
    assert warning.startswith(named)
    assert " in layernorm, rmsnorm/seed=1, rmsnorm/seed=3" in warning


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (earlier(device="H100"), "Sessions of one run differ in device: H100 then cpu in rmsnorm/seed=2; their speeds"),
        (earlier(git={"commit": "beef" * 9}), "Sessions of one run differ in commit: beefbeefbeef then 799d2f66f95e "),
        (earlier(**DIRTY), "The code had uncommitted changes: rmsnorm/seed=2. The commit does not identify the code."),
        (earlier(command=["train.py", FURTHER]), "Trained further with resume=: rmsnorm/seed=2. "),
        (config(resume="runs/ladder/rmsnorm/seed=2"), "Trained further with resume=: rmsnorm/seed=2. "),
        (config(data__seed=7), "data.seed differs between the runs of seed 2: 2 in layernorm; 7 in rmsnorm"),
    ],
)
def test_a_run_whose_sessions_or_seeds_were_other_ones_is_named(tmp_path: Path, plant: Plant, named: str) -> None:
    (warning,) = warnings_of(tmp_path, plant)
    assert warning.startswith(named)


@pytest.mark.parametrize(
    ("key", "value", "axes"),
    [
        ("model.norm.eps", 7, {"norm": "rmsnorm"}),
        ("schedule.warmup", 0.7, {"schedule": "cosine"}),
    ],
)
def test_an_arm_with_runs_of_two_models_is_named(tmp_path: Path, key: str, value: float, axes: dict[str, str]) -> None:
    (warning,) = warnings_of(tmp_path, in_runs(plant_config, **{key: value}), axes=dict.fromkeys(ARMS, axes))
    assert warning.startswith(f"Runs that are averaged as rmsnorm differ in {key}: {value} in rmsnorm/seed=2; ")
    assert warning.endswith(" in rmsnorm/seed=1, rmsnorm/seed=3.")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"seeds": (1,)}, "Only one seed: layernorm, rmsnorm; the variation over seeds is unknown."),
        ({"facts": dict.fromkeys(ARMS, DIRTY)}, "The code had uncommitted changes: layernorm, rmsnorm."),
        ({"facts": {"rmsnorm": {"attention_kernel": "eager"}}}, "Runs differ in attention kernel: sdpa in layernorm; "),
        (TUNED | {"tuned": False}, "Learning rates were chosen on the runs that are compared: layernorm, rmsnorm; p-"),
        ({"config": {"rmsnorm": {"train.ema": 0.9}}}, "train.ema differs: unset in layernorm; 0.9 in rmsnorm; the av"),
    ],
)
def test_what_all_runs_of_an_arm_have_is_named_once(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    (warning,) = warnings_of(tmp_path, **settings)
    assert warning.startswith(named)


@pytest.mark.parametrize(("seeds", "is_warned"), [((1, 2, 3), True), ((1,), False)])
def test_seeds_that_start_from_one_trained_model_are_said_to(
    tmp_path: Path, seeds: tuple[int, ...], is_warned: bool
) -> None:
    found = warnings_of(tmp_path, seeds=seeds, facts={arm: {"init_hash": "1" * 32} for arm in ARMS})
    said = "All runs start from the same trained weights: intervals leave out how much those vary from seed to seed."
    assert (said in found) == is_warned


@pytest.mark.parametrize("keys", [("data.seed", "model.seed"), ("model.seed",)])
def test_runs_of_different_seeds_that_share_one_are_one_sentence(tmp_path: Path, keys: tuple[str, ...]) -> None:
    assert warnings_of(tmp_path, config=dict.fromkeys(ARMS, dict.fromkeys(keys, 1))) == [
        f"Runs of different seeds have the same {' and '.join(keys)} in layernorm, rmsnorm; they are not independent, "
        "and intervals are too short."
    ]


def test_settings_of_names_and_places_and_a_resumed_run_may_differ(tmp_path: Path) -> None:
    free = dict.fromkeys(("train.prompt", "runs_dir", "name", "arm", "data.cache_dir", "logger.wandb"), "other")
    same = {"train.batch_size": 16.0, "resume": None}  # one number written in two ways

    def plant(run: Path) -> None:
        plant_config(run, **free, **same)
        plant_facts(run, command=["train.py", "resume=null"], earlier_sessions=[FACTS, FACTS])

    assert warnings_of(tmp_path, in_runs(plant)) == []


@pytest.mark.parametrize(
    ("design", "axis", "other"),
    [
        ("ladder", "schedule", {"schedule.warmup": 0.1}),
        ("comparison", "attention", {"model.n_kv_heads": 2, "model.attention.window": 64}),
        ("comparison", "size", {"model.dim": 256, "model.hidden_dim": 1024, "size.mlp_ratio": 3}),
        ("comparison", "arch", {"model.norm.eps": 1e-6, "model.hidden_dim": 1024}),
        ("comparison", "arm", {"model.dim": 256, "model.norm.eps": 1e-6}),
    ],
)
def test_axes_and_what_arms_are_grouped_by_may_differ(
    tmp_path: Path, design: str, axis: str, other: dict[str, Any]
) -> None:
    axes = {arm: {axis: arm} for arm in ARMS}
    assert warnings_of(tmp_path, design=design, axes=axes, config={"rmsnorm": other}) == []


def test_arms_of_a_comparison_that_differ_in_more_than_their_grouping_are_reported(tmp_path: Path) -> None:
    learned = {"_target_": "llama_lab.model.position.Learned", "_partial_": True, "std": 0.02}
    other = {"model.norm._target_": "llama_lab.model.norm.LayerNorm", "model.position": learned}
    other |= {"model.dim": 256, "model.hidden_dim": 1024}
    choices = {"layernorm": {"choices": {"norm": "layernorm", "position": "learned"}}}
    found = warnings_of(tmp_path, match="", facts=choices, config={"layernorm": other}, **GROUPED)
    (warning,) = [w for w in found if w.startswith("Arms")]
    assert warning == (
        "Arms differ in more than what they are grouped by: position: learned in layernorm; rope in rmsnorm; "
        "also in model.dim, model.hidden_dim."
    )


@pytest.mark.parametrize(("match", "is_reported"), [("", True), ("params", False)])
def test_widths_and_sizes_that_were_matched_may_differ(tmp_path: Path, match: str, is_reported: bool) -> None:
    def is_named(words: str, folder: str, **settings: Any) -> bool:
        return any(words in warning for warning in warnings_of(tmp_path / folder, match=match, **settings))

    wide, slightly = ({"rmsnorm": {"model.hidden_dim": width}} for width in (1024, 346))
    assert is_named("model.hidden_dim", "width", config=wide, **GROUPED) == is_reported
    larger = "Parameters without embeddings differ: rmsnorm 5.0% more than layernorm."
    assert is_named(larger, "5%", facts={"rmsnorm": {"params_non_embedding": 791680 * 1.05}}) == is_reported
    assert not is_named("", "0.5%", config=slightly)


def test_the_residual_of_matching_is_reported_above_half_a_percent(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0})
    first, second = study.arms
    for residual, is_reported in ((0.004, 0), (-0.006, 1)):
        changed = replace(study, arms=(first, replace(second, residual=residual)))
        found = [w for w in analyse(changed, tmp_path).warnings if w.startswith("Matching left")]
        assert len(found) == is_reported
    assert found[0].endswith("arms off in params: b \u22120.6%.")


# --- learning rates ---


def test_a_run_that_is_judged_at_another_rate_than_its_tuning_runs_choose_is_named(tmp_path: Path) -> None:
    (found,) = warnings_of(tmp_path, config(optim__lr=4e-3), **TUNED)
    assert found.endswith(" learning rate than their tuning runs choose: rmsnorm/seed=2 at 0.004 instead of 0.002.")


def test_an_arm_that_searched_fewer_learning_rates_is_named(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0}, rates=RATES, design="comparison")
    first, second = study.arms
    alone = tuple(replace(m, learning_rate=None) for m in second.members if m.learning_rate == 2e-3)
    found = analyse(replace(study, arms=(first, replace(second, members=alone))), tmp_path).warnings
    (warning,) = [w for w in found if w.startswith("Learning rates searched differ")]
    assert "0.002 in b; 0.001, 0.002, 0.004 in a;" in warning


def test_a_best_rate_at_the_end_of_its_grid_is_reported(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, best_rates={"rmsnorm": 4e-3}, **TUNED)
    assert warning.startswith("Best at an end of the grid of learning rates: rmsnorm at 0.004 of 0.001 to 0.004;")
    assert "study.extend_rates=true" in warning


def test_an_arm_whose_tuning_has_not_begun_had_no_rates_chosen(tmp_path: Path) -> None:
    study = write_study(tmp_path, dict.fromkeys(ARMS, 0.0), **TUNED)
    for member in study.arms[1].members:
        shutil.rmtree(tmp_path / member.folder)
    assert not [one for one in analyse(study, tmp_path).warnings if "were chosen" in one]


# --- runs that did not finish ---


def test_a_diverged_tuning_run_is_not_reported(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study, status: str) -> None:
        plant_end(run_folder(folder, study, "rmsnorm", 1002, 4e-3), status, "nan", 5)

    assert warnings_of(tmp_path / "diverged", partial(plant, status="diverged"), **TUNED) == []
    found, *_ = warnings_of(tmp_path / "failed", partial(plant, status="failed"), **TUNED)
    assert found == "1 run did not finish (failed): rmsnorm-lr=0.004/seed=1002."


def test_a_missing_run_is_named_with_the_seed_that_its_arm_lacks(tmp_path: Path) -> None:
    ended = {"missing": remove_run, "diverged": lambda run: plant_end(run, "diverged", "nan", 5)}
    for status, end in ended.items():
        found = warnings_of(tmp_path / status, in_runs(end, 3))
        assert found[0] == f"1 run did not finish ({status}): rmsnorm/seed=3."
        assert found[1] == "Seeds differ: rmsnorm lacks 3; these arms are compared over the others."
    change = in_runs(plant_end, 1, 2, 3, status="failed", message="out of memory", kept_rows=5)
    found = warnings_of(tmp_path / "all", change)
    assert found[0].startswith("3 runs did not finish (failed): rmsnorm/seed=1, ")
    assert found[1] == "No finished run: rmsnorm; not compared."


def test_unequal_training_below_equal_budgets_is_reported(tmp_path: Path) -> None:
    warning, disagreement = warnings_of(tmp_path, facts(tokens=1_000_000.0))
    assert disagreement.startswith("summary.json and metrics.csv disagree on the last values: tokens ")
    assert "Training tokens differ: 1,000,000 in rmsnorm/seed=2; 1,597,440 in layernorm" in warning
