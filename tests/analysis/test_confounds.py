"""Every planted confound is named, with its runs and its values; a clean study has none."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.runs.study import Study
from tests.analysis.synthetic import (
    FACTS,
    in_runs,
    plant_config,
    plant_end,
    plant_facts,
    remove_run,
    run_folder,
    warnings_of,
    write_study,
)

VERSIONS = FACTS["versions"]
ONE_RATE = "One learning rate for all arms, 0.002: an arm with another optimum is at a disadvantage."


def test_a_clean_study_has_only_a_note_that_the_learning_rate_is_not_swept(tmp_path: Path) -> None:
    result = analyse(write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02}), tmp_path)
    assert (result.warnings, result.notes) == ((), (ONE_RATE,))


RATES = (1e-3, 2e-3, 4e-3)


def test_a_clean_study_of_learning_rates_has_no_warning(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02}, rates=RATES, tuned=True, design="learning_rate")
    result = analyse(study, tmp_path)
    assert (list(result.warnings), ONE_RATE in result.notes) == ([], False)


def test_a_diverged_tuning_run_is_not_reported(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study, status: str) -> None:
        plant_end(run_folder(folder, study, "rmsnorm", 1002, 4e-3), status, "nan", 5)

    tuned = partial(warnings_of, rates=RATES, tuned=True, design="learning_rate")
    assert tuned(tmp_path / "diverged", partial(plant, status="diverged")) == []
    found, *_ = tuned(tmp_path / "failed", partial(plant, status="failed"))
    assert found == "1 run did not finish (failed): rmsnorm-lr=0.004/seed=1002."


def test_rates_that_were_chosen_on_the_runs_that_are_compared_are_named(tmp_path: Path) -> None:
    (found,) = warnings_of(tmp_path, rates=RATES, design="learning_rate")
    assert found.startswith("The learning rate of layernorm, rmsnorm was chosen on the runs that are compared,")


def test_a_run_that_is_judged_at_another_rate_than_its_tuning_runs_choose_is_named(tmp_path: Path) -> None:
    change = in_runs(plant_config, optim__lr=4e-3)
    (found,) = warnings_of(tmp_path, change, rates=RATES, tuned=True, design="learning_rate")
    assert found == "rmsnorm/seed=2 is judged at the learning rate 0.004, where its tuning runs choose 0.002."


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, ("device", "NVIDIA H100 80GB HBM3", "cpu")),
        ({"data_hash": "0123456789abcdef"}, ("data", "0123456789ab", "9f4fcfe12c2f", "different texts")),
        ({"tokenizer_hash": "fedcba9876543210"}, ("tokenizer", "fedcba987654", "c06e3e215dc6", "nats per token")),
        ({"devices": 4, "sharded": True}, ("devices", "4 shards", "1")),
        ({"versions": VERSIONS | {"torch": "2.12.0"}}, ("torch", "2.12.0", "2.13.0+cpu")),
        ({"versions": VERSIONS | {"datasets": "4.0"}}, ("datasets", "4.0", "unknown")),
        ({"versions": VERSIONS | {"llama-lab": "0.4.1"}}, ("llama-lab", "0.4.1", "0.4.0", "code may differ")),
        ({"git": {"commit": "beefbeefbeefbeef", "dirty": False}}, ("commit", "beefbeefbeef", "799d2f66f95e")),
        ({"git": None}, ("commit", "unknown", "799d2f66f95e")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_runs_on_other_hardware_software_or_data_are_named(
    tmp_path: Path, facts: dict[str, Any], words: tuple[str, ...]
) -> None:
    (warning,) = warnings_of(tmp_path, in_runs(plant_facts, **facts))
    assert warning.startswith(f"Runs differ in {words[0]}: {words[1]} in rmsnorm/seed=2; {words[2]} in layernorm, ")
    assert "rmsnorm/seed=1, rmsnorm/seed=3" in warning
    assert all(word in warning for word in words)


def test_an_arm_all_of_whose_runs_differ_is_named_once(tmp_path: Path) -> None:
    found = warnings_of(tmp_path, facts={"rmsnorm": {"attention_kernel": "eager"}})
    assert any("attention kernel: sdpa in layernorm; eager in rmsnorm; their speeds" in w for w in found)


def test_uncommitted_changes_are_reported_even_if_all_runs_have_them(tmp_path: Path) -> None:
    dirty = {"git": {"commit": "799d2f66f95e0a9b71f6541347342cf7e5404c08", "dirty": True}}
    both = dict.fromkeys(("layernorm", "rmsnorm"), dirty)
    (warning,) = warnings_of(tmp_path, facts=both)
    assert warning.startswith("The code had uncommitted changes: layernorm, rmsnorm.")


def test_unequal_budgets_are_reported_once(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, in_runs(plant_config, train__tokens=3e6))
    assert "Training tokens differ: 3,000,000 in rmsnorm/seed=2; 1,600,000 in layernorm" in warning


def test_unequal_training_below_equal_budgets_is_reported(tmp_path: Path) -> None:
    warning, disagreement = warnings_of(tmp_path, in_runs(plant_facts, tokens=1_000_000.0))
    assert disagreement.startswith("summary.json and metrics.csv disagree on the last tokens of rmsnorm/seed=2: ")
    assert "Training tokens differ: 1,000,000 in rmsnorm/seed=2; 1,597,440 in layernorm" in warning


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("train__batch_size", 32, "train.batch_size differs: 32 in rmsnorm/seed=2; 16 in"),
        ("schedule__warmup", 0.1, "schedule.warmup differs: 0.1 in rmsnorm/seed=2; 0.05 in"),
        ("optim__weight_decay", 0.0, "optim.weight_decay differs: 0 in rmsnorm/seed=2; 0.1 in"),
        ("optim__beta3", 0.9, "optim.beta3 differs: 0.9 in rmsnorm/seed=2; unset in"),
        ("model__max_seq_len", 512, "model.max_seq_len differs: 512 in rmsnorm/seed=2; 256 in"),
        ("train__grad_clip", None, "train.grad_clip differs: None in rmsnorm/seed=2; 1 in"),
        ("optim__lr", 1e-3, "optim.lr differs: 0.001 in rmsnorm/seed=2; 0.002 in"),
        ("data__seed", 7, "data.seed differs between the runs of seed 2: 2 in layernorm; 7 in rmsnorm"),
    ],
)
def test_unequal_settings_are_named(tmp_path: Path, key: str, value: object, shown: str) -> None:
    (warning,) = warnings_of(tmp_path, in_runs(plant_config, **{key: value}))
    assert warning.startswith(shown)


def test_settings_of_known_consequences_are_named_with_them(tmp_path: Path) -> None:
    config = {"rmsnorm": {"trainer.compile": True, "train.ema": 0.99}}
    assert warnings_of(tmp_path, config=config) == [
        "train.ema differs: unset in layernorm; 0.99 in rmsnorm; the average takes time and memory, and leaves the "
        "losses of the last weights as they are.",
        "trainer.compile differs: unset in layernorm; True in rmsnorm; their speeds and last digits differ for another "
        "reason than their architecture.",
    ]


@pytest.mark.parametrize("key", ["train__prompt", "logger__wandb", "runs_dir", "name", "arm", "data__cache_dir"])
def test_settings_of_names_and_places_may_differ(tmp_path: Path, key: str) -> None:
    assert warnings_of(tmp_path, in_runs(plant_config, **{key: "other"})) == []


def test_one_number_written_in_two_ways_is_one_number(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, in_runs(plant_config, train__batch_size=16.0)) == []


def test_what_is_an_axis_of_the_study_may_differ(tmp_path: Path) -> None:
    arms = {"short": 0.0, "long": -0.02}
    axes = {"short": {"warmup": "0"}, "long": {"warmup": "0.1"}}
    config = {"short": {"schedule.warmup": 0.0}, "long": {"schedule.warmup": 0.1}}
    assert warnings_of(tmp_path / "a", arms=arms, axes=axes, config=config) == []
    axes = {"short": {"schedule": "none"}, "long": {"schedule": "cosine"}}
    assert warnings_of(tmp_path / "b", arms=arms, axes=axes, config=config) == []


@pytest.mark.parametrize(
    ("key", "value", "axes"),
    [
        ("model__dim", 7, {"arm": "rmsnorm"}),
        ("model__norm__eps", 7, {"norm": "rmsnorm"}),
        ("size__mlp_ratio", 7, {"arm": "rmsnorm"}),
        ("schedule__warmup", 0.7, {"schedule": "cosine"}),
    ],
)
def test_an_arm_whose_runs_are_not_of_one_model_is_named(
    tmp_path: Path, key: str, value: float, axes: dict[str, str]
) -> None:
    levels = dict.fromkeys(("layernorm", "rmsnorm"), axes)
    (warning,) = warnings_of(tmp_path, in_runs(plant_config, **{key: value}), axes=levels)
    dotted = key.replace("__", ".")
    assert warning.startswith(f"Runs that are averaged as rmsnorm differ in {dotted}: {value} in rmsnorm/seed=2; ")
    assert warning.endswith(" in rmsnorm/seed=1, rmsnorm/seed=3.")


def test_of_many_settings_in_which_an_arms_runs_differ_a_few_are_named(tmp_path: Path) -> None:
    other = {"model__dim": 256, "model__n_layers": 6, "model__n_heads": 8, "model__norm__eps": 1e-6}
    other |= {"model__attention__window": 64, "size__n_kv_heads": 4}
    (warning,) = warnings_of(tmp_path, in_runs(plant_config, **other))
    assert "model.n_layers, model.norm.eps, and 1 more." in warning


GROUPED = {"layernorm": {"norm": "layernorm"}, "rmsnorm": {"norm": "rmsnorm"}}


def test_arms_of_a_comparison_that_differ_in_more_than_their_grouping_are_reported(tmp_path: Path) -> None:
    choices = {"norm": "layernorm", "position": "learned"}
    found = warnings_of(
        tmp_path,
        design="comparison",
        match="",
        axes=GROUPED,
        facts={"layernorm": {"choices": choices}},
        config={
            "layernorm": {
                "model.norm._target_": "llama_lab.model.norm.LayerNorm",
                "model.position": {"_target_": "llama_lab.model.position.Learned", "_partial_": True, "std": 0.02},
                "model.dim": 256,
                "model.hidden_dim": 1024,
            }
        },
    )
    (warning,) = [w for w in found if w.startswith("Arms")]
    assert warning == (
        "Arms differ in more than what they are grouped by: position: learned in layernorm; rope in rmsnorm; "
        "also in model.dim, model.hidden_dim."
    )


@pytest.mark.parametrize(
    ("axis", "config"),
    [
        ("norm", {"model.norm.eps": 1e-6}),
        ("attention", {"model.n_kv_heads": 2, "model.attention.window": 64}),
        ("size", {"model.dim": 256, "model.hidden_dim": 1024, "size.mlp_ratio": 3}),
        ("arch", {"model.norm.eps": 1e-6, "model.hidden_dim": 1024}),
        ("model.dim", {"model.dim": 256}),
        ("arm", {"model.dim": 256, "model.norm.eps": 1e-6}),
    ],
)
def test_what_a_comparison_is_grouped_by_may_differ(tmp_path: Path, axis: str, config: dict[str, Any]) -> None:
    axes = {"layernorm": {axis: "a"}, "rmsnorm": {axis: "b"}}
    found = warnings_of(tmp_path, design="comparison", axes=axes, config={"rmsnorm": config})
    assert found == []


@pytest.mark.parametrize(("match", "is_reported"), [("", True), ("params", False), ("flops", False), ("none", True)])
def test_widths_that_were_matched_may_differ(tmp_path: Path, match: str, is_reported: bool) -> None:
    config = {"rmsnorm": {"model.hidden_dim": 1024}}
    found = warnings_of(tmp_path, design="comparison", match=match, axes=GROUPED, config=config)
    assert any("model.hidden_dim" in warning for warning in found) == is_reported


@pytest.mark.parametrize("keys", [("data.seed", "model.seed"), ("data.seed",), ("model.seed",)])
def test_runs_of_different_seeds_that_share_one_are_reported_in_one_sentence(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    both = {name: dict.fromkeys(keys, 1) for name in ("layernorm", "rmsnorm")}
    assert warnings_of(tmp_path, config=both) == [
        f"Runs of different seeds have the same {' and '.join(keys)} in layernorm, rmsnorm; they are not independent, "
        "and intervals are too short."
    ]


def test_an_arm_that_searched_fewer_learning_rates_is_named(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0}, rates=(1e-3, 2e-3, 4e-3), design="comparison")
    first, second = study.arms
    alone = tuple(replace(m, learning_rate=None) for m in second.members if m.learning_rate == 2e-3)
    found = analyse(replace(study, arms=(first, replace(second, members=alone))), tmp_path).warnings
    (warning,) = [w for w in found if w.startswith("Learning rates searched differ")]
    assert "0.002 in b; 0.001, 0.002, 0.004 in a;" in warning


def test_a_missing_run_is_named_with_the_seed_that_its_arm_lacks(tmp_path: Path) -> None:
    ended = {"missing": remove_run, "diverged": lambda run: plant_end(run, "diverged", "nan", 5)}
    for status, end in ended.items():
        found = warnings_of(tmp_path / status, in_runs(end, 3))
        assert found[0] == f"1 run did not finish ({status}): rmsnorm/seed=3."
        assert found[1] == "rmsnorm lacks seed 3: it is compared over the others."


def test_an_arm_without_any_finished_run_is_named(tmp_path: Path) -> None:
    change = in_runs(plant_end, 1, 2, 3, status="failed", message="out of memory", kept_rows=5)
    found = warnings_of(tmp_path, change)
    assert found[0].startswith("3 runs did not finish (failed): rmsnorm/seed=1, ")
    assert found[1] == "rmsnorm has no finished run, and is not compared."


def test_one_seed_is_reported(tmp_path: Path) -> None:
    found = warnings_of(tmp_path, seeds=(1,))
    assert found[0] == "Only one seed: layernorm, rmsnorm. The variation over seeds is unknown."


def test_the_residual_of_matching_is_reported_above_half_a_percent(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"a": 0.0, "b": 0.0})
    first, second = study.arms
    for residual, is_reported in ((0.004, 0), (-0.006, 1)):
        changed = replace(study, arms=(first, replace(second, residual=residual)))
        found = [w for w in analyse(changed, tmp_path).warnings if w.startswith("Matching left b")]
        assert len(found) == is_reported
    assert "0.6% off in params" in found[0]


@pytest.mark.parametrize(("match", "is_reported"), [("none", True), ("", True), ("params", False)])
def test_unequal_sizes_are_reported_where_nothing_was_matched(tmp_path: Path, match: str, is_reported: bool) -> None:
    found = warnings_of(tmp_path / "5%", match=match, facts={"rmsnorm": {"params_non_embedding": 791680 * 1.05}})
    assert ("rmsnorm has 5.0% more parameters without embeddings than layernorm." in found) == is_reported
    assert warnings_of(tmp_path / "0.5%", match=match, config={"rmsnorm": {"model.hidden_dim": 346}}) == []


def test_a_best_rate_at_the_end_of_its_grid_is_reported(tmp_path: Path) -> None:
    best = {"rmsnorm": 4e-3}
    (warning,) = warnings_of(tmp_path, rates=RATES, tuned=True, best_rates=best, design="learning_rate")
    assert warning.startswith("rmsnorm is best at 0.004, an end of the grid from 0.001 to 0.004")
    assert "study.extend_rates=true" in warning


def test_where_rates_are_swept_a_run_is_named_with_its_rate(tmp_path: Path) -> None:
    def plant(folder: Path, study: Study) -> None:
        plant_facts(run_folder(folder, study, "rmsnorm", 2, 4e-3), device="cuda")

    warning = warnings_of(tmp_path, plant, rates=RATES, design="learning_rate")[0]
    assert "cuda in rmsnorm-lr=0.004/seed=2; cpu in layernorm, rmsnorm-lr=0.001/seed=1" in warning
