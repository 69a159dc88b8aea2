"""Every run of a designed study is checked against the axes of its arm, and a clean study has no warnings."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import LearningRates, Result
from llama_lab.analysis.settings import GROUPS, planned_settings
from llama_lab.analysis.unequal_settings import unequal_settings
from llama_lab.config.schema import flatten
from llama_lab.runs.folder import resolved
from llama_lab.runs.record import Record
from llama_lab.runs.study import Arm, Member, Study
from llama_lab.study.design.designs import (
    AddOne,
    Context,
    Depth,
    Design,
    Factorial,
    KVHeads,
    Ladder,
    LearningRate,
    LeaveOneOut,
    Recipes,
)
from tests.analysis.synthetic import planted_warnings, write_study
from tests.composing import compose_config
from tests.study.design.test_designs import CONFIGS

SEEDS = (1, 2)
composed = cache(compose_config)
Config = dict[str, Any]
PREFIXED = {"_target_": "llama_lab.model.attention.MultiHeadAttention", "_partial_": True, "prefix": 8}


def config_of(overrides: Sequence[str]) -> DictConfig:
    """The config of an arm: its recipe's with the options of other groups put in, as composing does (test_recipes)."""
    arch, *others = overrides
    cfg = composed("size=pico", arch).copy()
    for override in others:
        key, _, value = override.partition("=")
        if key not in GROUPS:
            OmegaConf.update(cfg, key, yaml.safe_load(value))
            continue
        donor = composed("size=pico", "arch=llama", override)
        for node in GROUPS[key]:
            OmegaConf.update(cfg, node, donor.model._get_node(node.removeprefix("model.")), merge=False)
    return cfg


@cache
def designed(name: str, match: str = "params") -> tuple[Study, dict[str, Config]]:
    """One of DESIGNS as planning records it, with the config of each arm; widths as if matching had found them."""
    design = DESIGNS[name]
    variants = design.variants(CONFIGS).arms
    configs = {variant.name: config_of(variant.overrides) for variant in variants}
    if match != "none":
        for width, config in enumerate(configs.values(), start=80):
            config.model.hidden_dim = width
    axes = {axis for variant in variants for axis in variant.axes}
    settings = planned_settings(axes, match, list(configs.values()))
    arms = tuple(
        Arm(v.name, v.axes, tuple(Member(f"{v.name}/seed={s}", s) for s in SEEDS), v.previous, settings=own)
        for v, own in zip(variants, settings, strict=True)
    )
    study = Study("designed", type(design).__name__.lower(), arms[0].name, arms, match)
    return study, {name: flatten(resolved(config)) for name, config in configs.items()}


def unrecorded(study: Study) -> Study:
    """The same study as it was written before plans were recorded."""
    return replace(study, arms=tuple(replace(arm, settings=None) for arm in study.arms))


def complaints(study: Study, configs: dict[str, Config], is_swept: bool = False, **planted: Config) -> list[str]:
    """The warnings about the runs of a study; `planted` changes settings of some arms."""
    records = []
    for arm in study.arms:
        for member in arm.members:
            own = {"seed": member.seed, "model.seed": member.seed, "data.seed": member.seed, "arm": arm.name}
            config = configs[arm.name] | own | planted.get(arm.name, {})
            path = Path(member.folder)
            records.append(Record(path, arm.name, member.seed, "done", config=config))
    swept = (LearningRates(study.baseline, [], [], [], 0.0, False, 0.0),) if is_swept else ()
    return list(unequal_settings(Result(study, records=tuple(records), learning_rates=swept)))


LINES = [("vanilla", "llama2"), ("ctrl", "bloom")]
DESIGNS: dict[str, Design] = {
    **{f"ladder {a} {b}": Ladder(a, b) for a, b in LINES},
    **{f"add_one {a} {b}": AddOne(a, b) for a, b in LINES},
    **{f"leave_one_out {a} {b}": LeaveOneOut(a, b) for a, b in LINES},
    "factorial": Factorial("vanilla", "llama2", ["position", "embedding", "norm"]),
    "fraction": Factorial("ctrl", "bloom", ["position", "embedding", "norm", "attention"], 0.5),
    "learning_rate": LearningRate(["vanilla", "llama2"]),
    "recipes": Recipes(["gpt2", "bloom", "gemma2", "mistral"], [1, 2]),
    "kv_heads": KVHeads("llama2"),
    "depth": Depth("llama", ["postnorm", "prenorm"], [2, 4], [0.0, 0.1]),
    "context": Context("vanilla", ["sinusoidal", "learned", "rope", "alibi", "relative", "none"], [1, 2]),
}


QUICK = ("factorial", "kv_heads")
of_any_design = pytest.mark.parametrize(
    "design", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.matrix]) for name in DESIGNS]
)


@of_any_design
def test_a_clean_study_of_any_design_is_accused_of_nothing(design: str) -> None:
    for match in ("params", "none"):
        study, configs = designed(design, match)
        assert complaints(study, configs) == []
        assert complaints(unrecorded(study), configs) == []


@of_any_design
@pytest.mark.parametrize(("key", "value"), [("model.dropout", 0.1), ("model.n_layers", 3), ("model.norm.eps", 1e-4)])
def test_what_no_axis_permits_is_named_in_any_design(design: str, key: str, value: object) -> None:
    study, configs = designed(design)
    last = study.arms[-1].name
    (warning,) = complaints(study, configs, **{last: {key: value}})
    assert f"{key}: " in warning
    assert f"{value} in {last}" in warning or f"{value} instead of {configs[last][key]} in {last}" in warning
    axes = {axis for arm in study.arms for axis in arm.axes}
    if key.rpartition(".")[2] not in axes and not {"norm", "arch"} & axes:
        (warning,) = complaints(unrecorded(study), configs, **{last: {key: value}})
        assert warning.startswith(f"Arms differ in more than their axes: {key}: ")
        assert f"{value} in {last}" in warning


AMPLITUDE = "model.position.amplitude"


def test_positions_follow_the_embedding_they_are_added_to_and_nothing_else() -> None:
    study, configs = designed("factorial")
    changed = [arm.name for arm in study.arms if arm.axes["position"] == "sinusoidal"][-1]
    (warning,) = complaints(study, configs, **{changed: {AMPLITUDE: 0.5}})
    planned = configs[changed][AMPLITUDE]
    assert warning == (
        f"Runs have other settings than the study planned: {AMPLITUDE}: 0.5 instead of {planned:g} in {changed}."
    )
    (warning,) = complaints(unrecorded(study), configs, **{changed: {AMPLITUDE: 0.5}})
    assert warning.startswith(f"Arms of the same embedding, position differ in {AMPLITUDE}: ")
    assert f"0.5 in {changed}" in warning


def test_arms_of_one_level_have_one_value() -> None:
    study, configs = designed("ladder vanilla llama2")
    (warning,) = complaints(unrecorded(study), configs, **{"+swiglu": {"model.norm.eps": 1e-4}})
    assert warning.startswith("Arms of the same norm differ in model.norm.eps: 0.0001 in +swiglu; 1e-05 in +rmsnorm, ")


def test_what_an_option_changes_outside_its_group_is_excused_by_no_plan() -> None:
    plain, leaky = (compose_config("size=pico", f"ffn={option}") for option in ("gelu", "swiglu"))
    leaky.model.dropout, leaky.train.z_loss = 0.1, 1e-4
    settings = planned_settings(["ffn"], "none", [plain, leaky])
    assert settings[1].keys() >= {"model.hidden_dim", "model.ffn._target_", "model.ffn.gate_bias"}
    assert not {"model.dropout", "train.z_loss"} & (settings[0].keys() | settings[1].keys())


def test_what_a_users_option_computes_from_another_group_is_part_of_the_plan() -> None:
    configs = [compose_config("size=pico", f"ffn={option}") for option in ("gelu", "swiglu")]
    for cfg in configs:
        cfg.model.dropout = "${lab.power:${model.hidden_dim},-0.5}"
    first, second = planned_settings(["ffn"], "none", configs)
    assert first["model.dropout"] != second["model.dropout"]


def test_what_a_plan_computes_outside_the_model_is_no_departure() -> None:
    study, configs = designed("kv_heads")
    key, decays = "optim.weight_decay", {arm.name: 0.1 * i for i, arm in enumerate(study.arms)}
    arms = tuple(replace(arm, settings=(arm.settings or {}) | {key: decays[arm.name]}) for arm in study.arms)
    planted = {name: {key: decay} for name, decay in decays.items()}
    assert complaints(replace(study, arms=arms), configs, **planted) == []
    (warning,) = complaints(study, configs, **planted)
    assert warning.startswith(f"{key} differs: ")


def test_a_swept_rate_is_no_departure() -> None:
    study, configs = designed("learning_rate")
    assert complaints(study, configs, is_swept=True, llama2={"optim.lr": 1e-3}) == []
    assert complaints(study, configs, llama2={"optim.lr": 1e-3}) == [
        "optim.lr differs: 0.012 in vanilla; 0.001 in llama2."
    ]


def test_the_pattern_of_a_recipe_is_part_of_the_model_that_arms_compare(tmp_path: Path) -> None:
    axes = {name: {"arch": name} for name in ("llama", "gemma2")}
    config = {"gemma2": {"pattern.global.at": "1::2", "model.layers": [{"at": [1]}]}}
    study = write_study(tmp_path, {"llama": 0.0, "gemma2": -0.02}, axes=axes, config=config)
    assert planted_warnings(analyse(study, tmp_path)) == []


@pytest.mark.parametrize(
    "setting", [{"model.attention.prefix": 8}, {"model.layers": [{"at": [1], "attention": PREFIXED}]}], ids=str
)
def test_arms_that_predict_other_tokens_are_never_compared_in_silence(setting: Config, tmp_path: Path) -> None:
    """Not even by an axis: the first tokens of a window are the hardest."""
    axes = {name: {"arch": name} for name in ("llama", "gemma2")}
    config = {"gemma2": {"pattern.a.at": 1} | setting}
    study = write_study(tmp_path, {"llama": 0.0, "gemma2": -0.02}, axes=axes, config=config)
    (warning,) = planted_warnings(analyse(study, tmp_path))
    assert warning.startswith("Losses are of different tokens, since those of an attention.prefix are not predicted")
    assert "all but the first 1 in llama" in warning
    assert "all but the first 8 in gemma2" in warning
