"""`llama-lab-compare`: reports from any run folders."""

import csv
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from llama_lab.analysis.analyse import analyse
from llama_lab.cli import compare_command
from llama_lab.report.write import log_report, write_files
from llama_lab.runs.study import ArmSpeed, Study, StudySpeed
from tests.analysis.synthetic import BASE_LOSS, plant_config, write_run, write_study
from tests.conftest import Command, Ran
from tests.golden.files import RUNS

LAYERS = {"model.n_layers": 2}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain sweep: two norms, two seeds."""
    folder = tmp_path_factory.mktemp("swept")
    for norm, seed in product(("layernorm", "rmsnorm"), (1, 2)):
        facts = {"name": "plain", "choices": {"norm": norm, "ffn": "swiglu", "position": "rope"}}
        path = folder / "runs" / "plain" / f"norm={norm}" / f"seed={seed}"
        write_run(path, f"norm={norm}", seed, BASE_LOSS + 0.1 * seed * (norm == "rmsnorm"), facts=facts, config=LAYERS)
        (path / "overrides.yaml").write_text(f"- norm={norm}\n- seed={seed}\n")
    return folder


@pytest.fixture
def studied(tmp_path: Path) -> Path:
    """A ladder of two rungs."""
    folder = tmp_path / "runs" / "climb"
    write_study(folder, {"vanilla": 0.0, "+rmsnorm": -0.02}, (1, 2))
    return folder


@pytest.fixture
def compare(in_process: Callable[..., Ran]) -> Command:
    """Run the command in this process, in a fresh folder."""
    return lambda *arguments: in_process(compare_command, "llama-lab-compare", *map(str, arguments))


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "summary.csv").open(newline="") as file:
        return {row["arm"]: row for row in csv.DictReader(file)}


def test_runs_are_grouped_by_any_key_against_any_baseline(compare: Command, swept: Path) -> None:
    ran = compare(swept, "--group-by", "norm,model.n_layers", "--baseline", "norm=rmsnorm, model.n_layers=2")
    found = rows(ran.cwd / "comparison")
    assert set(found) == {"norm=layernorm, model.n_layers=2", "norm=rmsnorm, model.n_layers=2"}
    assert {row["axis:norm"] for row in found.values()} == {"layernorm", "rmsnorm"}
    layernorm, rmsnorm = (found[f"norm={norm}, model.n_layers=2"] for norm in ("layernorm", "rmsnorm"))
    expected = float(layernorm["val_loss_mean"]) - float(rmsnorm["val_loss_mean"])
    assert float(layernorm["to_baseline_nats_mean"]) == pytest.approx(expected)
    assert rmsnorm["to_baseline_nats_mean"] == ""


def test_equal_numbers_are_one_group_however_they_were_typed(compare: Command, tmp_path: Path) -> None:
    for seed, tokens in enumerate((2_000_000, 2e6)):
        write_run(tmp_path / f"seed={seed}", "base", seed, BASE_LOSS, config={"train.tokens": tokens})
    assert {*rows(compare(tmp_path, "--group-by", "train.tokens").cwd / "comparison")} == {"train.tokens=2000000"}


def test_a_study_alone_is_reported_on_where_it_is(compare: Command, tmp_path: Path) -> None:
    """As the command that trained it did, for which the golden study has a summary."""
    study = Path(shutil.copytree(RUNS / "study", tmp_path / "study"))
    before = {*rows(study)}
    (study / "summary.csv").unlink()
    ran = compare(study)
    assert (ran.code, ran.err) == (0, "")
    assert {*rows(study)} == before
    assert (study / "report.html").exists()
    assert not (ran.cwd / "comparison").exists()


@pytest.mark.slow
def test_a_study_against_another_baseline_goes_elsewhere(compare: Command, studied: Path) -> None:
    compare(studied)
    before = (studied / "summary.csv").read_text()
    ran = compare(studied, "--baseline", "+rmsnorm", "--out", "turned")
    assert (ran.code, (studied / "summary.csv").read_text()) == (0, before)
    delta, turned = (rows(path) for path in (studied, ran.cwd / "turned"))
    assert float(turned["vanilla"]["to_baseline_nats_mean"]) == -float(delta["+rmsnorm"]["to_baseline_nats_mean"])
    assert compare("turned").code == 0, "the comparison is a study that can be reported on again"


def test_studies_and_runs_of_different_folders_are_combined(compare: Command, studied: Path, swept: Path) -> None:
    ran = compare(studied, swept / "runs" / "plain")
    assert (ran.code, ran.err) == (0, "")
    assert {*rows(ran.cwd / "comparison")} == {
        "synthetic/vanilla",
        "synthetic/+rmsnorm",
        "norm=layernorm",
        "norm=rmsnorm",
    }


def test_tuned_studies_are_combined_over_their_seeds(compare: Command, tmp_path: Path) -> None:
    for name in ("one", "two"):
        study = write_study(tmp_path / name, {f"{name}-a": 0.0, f"{name}-b": 0.1}, rates=(1e-3, 2e-3), tuned=True)
        for seed, run in product((1, 2, 3), study.arms):
            plant_config(tmp_path / name / run.name / f"seed={seed}", optim__lr=1e-3 + 1e-4 * seed)
    ran = compare(tmp_path / "one", tmp_path / "two")
    assert {row["seeds"] for row in rows(ran.cwd / "comparison").values()} == {"3"}


def test_measured_speeds_stay_with_their_runs(compare: Command, studied: Path, tmp_path: Path) -> None:
    arms = {"vanilla": ArmSpeed([100.0], [1.0]), "+rmsnorm": ArmSpeed([777.0], [1.0])}
    StudySpeed("cpu", 1, "32-true", 2, "2.13.0", arms).save(studied)
    write_study(tmp_path / "other", {"vanilla": 0.0, "+rmsnorm": -0.1}, (1, 2))
    for paths, is_measured in (((studied, "--title", "T"), True), ((tmp_path / "other", "--title", "T"), False)):
        comparison = compare(*paths).cwd / "comparison"
        assert rows(comparison)["+rmsnorm"]["perf/tokens_per_second"].startswith(("777.0", "776.99")) == is_measured


def test_packages_are_trusted_by_name(compare: Command, studied: Path) -> None:
    for file in studied.rglob("resolved.yaml"):
        file.write_text(file.read_text().replace("llama_lab.model.norm.RMSNorm", "tests.analysis.synthetic.MyNorm"))

    def is_named(*trusted: str) -> bool:
        assert compare(studied, *trusted).code == 0
        text = (studied / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
        return "names tests.analysis.synthetic.MyNorm" in text

    assert is_named()
    assert not is_named("--trust", "tests")


def test_a_study_that_was_moved_is_still_found(compare: Command, studied: Path) -> None:
    studied.rename("moved")
    assert compare("moved").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["STUDY", "--baseline", "vanila"], "error: --baseline vanila: "),
        (["SWEEP", "--group-by", ",,,"], "error: --group-by ,,,: "),
        (["SWEEP", "--group-by", "ffn"], "separate them with --group-by "),
        (["SWEEP", "--out", "STUDY"], "holds a study, which the comparison would replace"),
        (["SCALING", "--baseline", "+rmsnorm"], "error: --baseline +rmsnorm: "),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    compare: Command, studied: Path, swept: Path, arguments: list[str], message: str
) -> None:
    scaling = Path(shutil.copytree(studied, studied.with_name("scaling")))
    replace(Study.load(scaling), design="scaling").save(scaling)
    paths = {"STUDY": str(studied), "SWEEP": str(swept), "SCALING": str(scaling)}
    ran = compare(*(paths.get(argument, argument) for argument in arguments))
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_a_comparison_has_its_own_title_or_that_of_its_baseline(compare: Command, tmp_path: Path) -> None:
    facts = {"near": {"choices": {"norm": "layernorm", "position": "rope"}}}
    write_study(tmp_path / "study", {"base": 0.0, "near": 0.0}, seeds=(1, 2), facts=facts)
    ran = compare(tmp_path / "study", "--group-by", "norm", "--title", "Two norms")
    assert (ran.code, ran.err) == (0, "")
    assert "Two norms" in ran.out
    assert "<h1>Two norms</h1>" in (ran.cwd / "comparison" / "report.html").read_text(encoding="utf-8")
    ran = compare(tmp_path / "study", "--group-by", "norm")
    assert Study.load(ran.cwd / "comparison").heading == "Comparison: norm=rmsnorm and 1 other arm"


def test_a_scaling_study_without_a_finished_run_has_its_report(studied: Path) -> None:
    for run in studied.glob("*/seed=*"):
        shutil.rmtree(run)
    study = replace(Study.load(studied), design="scaling")
    levels = {"size": "nano", "tokens_per_parameter": "5"}
    study = replace(study, arms=tuple(replace(arm, axes={"norm": arm.name, **levels}) for arm in study.arms))
    assert "not finish" in write_files(analyse(study, studied), studied).read_text(encoding="utf-8")


def test_a_study_without_a_run_is_logged_with_its_own_settings(studied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in studied.glob("*/seed=*"):
        shutil.rmtree(run)
    result, told = analyse(Study.load(studied), studied), []
    assert "Nothing can be compared" in result.answer[0]
    write_files(result, studied)
    fake = SimpleNamespace(log=told.append)
    monkeypatch.setattr("llama_lab.training.loggers.start_wandb", lambda *given, **_: told.append(given[-1]) or fake)
    monkeypatch.setattr("llama_lab.training.loggers.finish_wandb", told.append)
    log_report(result, studied, OmegaConf.create())
    config, logged, ended = told
    assert config == {"design": "ladder", "baseline": "vanilla", "match": "params"}
    assert {"arms", "report"} <= {*logged}
    assert ended is fake
