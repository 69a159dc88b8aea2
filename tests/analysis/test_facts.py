"""Every recorded fact is compared between runs, checked in a way of its own, or declared free in its record."""

import json
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.audit import impossible
from llama_lab.analysis.confounds import warnings
from llama_lab.analysis.environments import TITLES
from llama_lab.analysis.result import Result
from llama_lab.analysis.settings import FREE, TOKENS, different_settings
from llama_lab.analysis.unequal_settings import unequal_settings
from llama_lab.config import CONF_DIR
from llama_lab.config.schema import belongs, groups, keys_of, option_file, options
from llama_lab.runs.json_file import from_json
from llama_lab.runs.stored import COLUMNS, OF_THE_RUN, SIZES, Environment, RunMetadata, layer_metrics
from tests.analysis.synthetic import (
    FACTS,
    Plant,
    change_metrics,
    in_runs,
    plant_config,
    run_folder,
    warnings_of,
    write_study,
)

FAULTS: dict[str, Any] = {
    "arm": "other",
    "seed": 7,
    "choices": {"norm": "layernorm", "position": "rope"},
    "versions": FACTS["versions"] | {"datasets": "1", "hydra-core": "1"},
    "git": {"commit": FACTS["git"]["commit"], "dirty": True},
    "devices": 2,
    "revisions": {"wiki": "beef"},
    "epochs": {"wiki": 1.5},
    "gpus": ["NVIDIA H100"],
    "earlier_sessions": [FACTS | {"device": "cuda"}],
    "command": ["train.py", "x=1"],
    "data_hash": FACTS["data_hash"][:-1] + "0",
    "token_to_position_ratio": 0.1,
}
# What a report says of a fact that it does not compare as it is.
SAID = {
    "seed": "seed=7 instead of 2 in rmsnorm",
    "sharded": "2 shards",
    "init_hash": "init_from and the hash of the initial weights do not agree",
    "token_to_position_ratio": "Tokens over positions are",
    "metrics": "7 seq_len instead of 256",
    "versions": "Runs differ in hydra-core",
    "git": "The code had uncommitted changes",
    "earlier_sessions": "Sessions of one run differ in device",
}
OF_KIND = {"str": "other", "int": 7, "float": 0.7, "bool": True, "float | None": 0.7, "bool | None": True}


def fault_of(fact: Field[Any]) -> dict[str, Any]:
    """What environment.json and summary.json say of a run whose fact is another."""
    if fact.name == "metrics":
        return {"seq_len": 7}
    if fact.name == "sharded":
        return {"devices": 2, "sharded": True}
    value = FAULTS.get(fact.name)
    return {fact.name: OF_KIND[str(getattr(fact.type, "__name__", fact.type))] if value is None else value}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Two arms of two runs in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("clean")
    return analyse(write_study(folder, {"layernorm": 0.0, "rmsnorm": -0.02}, seeds=(1, 2)), folder)


@pytest.mark.parametrize("fact", fields(Environment), ids=lambda fact: fact.name)
def test_a_fault_in_any_fact_is_named_unless_the_fact_is_declared_free(clean: Result, fact: Field[Any]) -> None:
    assert len(fact.metadata.keys() & {"compared", "checked", "free"}) == 1
    assert fact.default is not MISSING or fact.default_factory is not MISSING
    before = {*warnings(clean)}
    said = SAID.get(fact.name, f"Runs differ in {TITLES.get(fact.name)}")
    fault = fault_of(fact)
    for seeds in ((2,), (1, 2)):  # in one run, then in one arm
        planted = []
        for run in clean.records:
            if run.arm == "rmsnorm" and run.seed in seeds:
                environment = from_json(Environment, run.environment.to_json() | fault)
                run = replace(run, seed=environment.seed, environment=environment, summary=run.summary | fault)
            planted.append(run)
        new = {*warnings(replace(clean, records=tuple(planted)))} - before
        assert any(said in warning for warning in new) or fact.metadata.get("free"), new


def test_a_fact_of_the_summary_that_the_environment_denies_is_named(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"layernorm": 0.0, "rmsnorm": -0.02}, seeds=(1, 2))
    result = analyse(study, tmp_path)
    alone = replace(result, records=result.records[-1:])
    file = run_folder(tmp_path, study, "rmsnorm", 2) / "summary.json"
    whole = json.loads(file.read_text())
    for fact in (fact for fact in fields(RunMetadata) if fact.name != "metrics"):  # these are recomputed
        file.write_text(json.dumps(whole | fault_of(fact)))
        (found,) = impossible(alone)
        assert found.startswith("summary.json and environment.json state other facts: rmsnorm"), fact.name


def settings() -> list[str]:
    """The keys of the config of a run, of all packaged options."""
    files = [option_file(group, option) for group in groups() if group != "study" for option in options(group)]
    keys = {key for file in (CONF_DIR / "config.yaml", *files) for key in keys_of(file)}
    return sorted(key for key in keys if not belongs(key, (*FREE, TOKENS, "hydra")))


@pytest.mark.matrix
@pytest.mark.parametrize(("design", "axis"), [("comparison", "norm"), ("ladder", "arm")])
def test_a_fault_in_any_setting_is_named_unless_it_is_declared_free(tmp_path: Path, design: str, axis: str) -> None:
    arms = {"layernorm": 0.0, "rmsnorm": -0.02}
    study = write_study(tmp_path, arms, (1, 2), design=design, axes={name: {axis: name} for name in arms})
    result = analyse(study, tmp_path)
    assert not [*unequal_settings(result)]
    assert all(FREE.values()), "every free setting says why"
    for key in settings():
        value = [{"norm": 7}] if key == "model.layers" else 7
        for seeds in ((2,), (1, 2)):
            planted = [
                replace(run, config=run.config | {key: value}) if run.arm == "rmsnorm" and run.seed in seeds else run
                for run in result.records
            ]
            shown = [*unequal_settings(replace(result, records=tuple(planted)))]
            if len(seeds) == 2:  # the table of settings compares the first runs of two arms
                shown += different_settings(planted[0], planted[2], is_swept=False)
            assert any(key in text for text in shown), (key, seeds)


def test_a_fault_in_any_metric_of_a_summary_is_named_unless_the_metric_is_declared_free(clean: Result) -> None:
    *others, record = clean.records
    unlogged = ("val/loss/wiki", *layer_metrics(1), "perf/compile_seconds")
    for key in dict.fromkeys((*record.costs, *COLUMNS, *unlogged)):
        planted = replace(record, summary=record.summary | {key: 7.0})
        found = warnings(replace(clean, records=(*others, planted)))
        assert any(SIZES.get(key, key) in text for text in found) or OF_THE_RUN.get(key), key


def changed(**values: float) -> Plant:
    """A run whose metrics are these in every row that has them, / for __."""
    new = {key.replace("__", "/"): value for key, value in values.items()}

    def change(row: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in new.items() if key in row or "kv" in key}

    return in_runs(lambda run: change_metrics(run, change))


def cut_out(run: Path) -> None:
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[:20] + lines[24:]))


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (changed(optim__lr=1e-3), "metrics.csv has learning rates that are not those of the schedule: rmsnorm/seed=2."),
        (changed(val__bits_per_byte=1.0), "metrics.csv has bits per byte that are not those of its losses: rmsnorm/se"),
        (changed(val__loss=0.0, val__bits_per_byte=0.0), "A loss is not a positive number: rmsnorm/seed=2."),
        (
            changed(tokens=9.0),
            "metrics.csv has tokens that are not in proportion to steps, or a clock that goes back: ",
        ),
        (changed(kv_cache__bytes=9.0), "metrics.csv has a KV cache of another size than the record: rmsnorm/seed=2."),
        (in_runs(cut_out), "metrics.csv lacks rows: rmsnorm/seed=2."),
        (in_runs(plant_config, init_from="x"), "init_from and the hash of the initial weights do not agree: rmsnorm/s"),
    ],
)
def test_a_curve_that_contradicts_itself_is_named(tmp_path: Path, plant: Plant, sentence: str) -> None:
    found = warnings_of(tmp_path, plant)
    assert any(warning.startswith(sentence) for warning in found), found
