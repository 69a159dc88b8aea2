"""Runs of a study, or of a pattern, are evaluated in one go, and the study's report includes it."""

import shutil
from pathlib import Path

import pytest

from llama_lab.runs.folder import RunFolder
from llama_lab.runs.record import read_record
from llama_lab.study.evaluate_all import found_runs
from tests.conftest import Command
from tests.refusals import refusing
from tests.study.planning import conducted

ARMS = ("vanilla", "+rmsnorm")


@pytest.fixture(scope="module")
def trained(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two arms with two seeds each, of ten steps."""
    settings = (
        "study=ladder",
        "study.learning_rates=null",
        "study.axes=[norm]",
        "study.seeds=[1,2]",
        "name=climb",
        "train.tokens=2560",
        "study.measure_speed=false",
    )
    ran = conducted(tmp_path_factory.mktemp("climb"), environment, *tiny, *settings)
    assert ran.code == 0, ran.err
    return ran.cwd / "runs/climb"


@pytest.fixture
def climb(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, below the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, "runs/climb"))


@pytest.mark.slow
def test_a_study_is_evaluated_in_one_go_and_its_report_is_written_again(climb: Path, evaluating: Command) -> None:
    before = (climb / "report.html").read_text()
    ran = evaluating(f"run={climb}", "eval.parts=[length]", "eval.lengths=[2]")
    assert (ran.code, ran.err) == (0, "")
    for arm in ARMS:
        for seed in (1, 2):
            record = read_record(climb / arm / f"seed={seed}")
            assert [entry.length for entry in record.evaluation.lengths] == [32, 64]
    order = [line.removesuffix(": length") for line in ran.out.splitlines() if line.endswith(": length")]
    assert order == [str(climb / arm / f"seed={seed}") for seed in (1, 2) for arm in ARMS], "arms take turns"
    assert "run 4 of 4" in ran.out
    assert f"the report is {climb / 'report.html'}" in ran.out
    after = (climb / "report.html").read_text()
    assert after != before
    assert "context" in after


@pytest.mark.slow
def test_a_run_that_cannot_be_evaluated_is_named_and_the_others_go_on(climb: Path, evaluating: Command) -> None:
    RunFolder(climb / "vanilla/seed=1").write_status("interrupted", "stopped")
    shutil.rmtree(climb / "+rmsnorm/seed=2")
    (climb / "report.html").unlink()
    ran = evaluating(f"run={climb}", "eval.parts=[loss]")
    assert ran.code == 1
    assert ran.err.splitlines()[0] == f"{climb}: 1 of its 4 runs never began"
    assert f"error: run={climb / 'vanilla/seed=1'}: is interrupted (stopped), and its losses" in ran.err
    assert ran.err.splitlines()[-1] == "1 of 3 runs could not be evaluated, see above"
    assert {str(file.parent) for file in climb.rglob("eval.json")} == {
        str(climb / "vanilla/seed=2"),
        str(climb / "+rmsnorm/seed=1"),
    }
    assert (climb / "report.html").exists()


def fake_run(path: Path) -> Path:
    """What is enough to be taken for a run."""
    path.mkdir(parents=True)
    for name in ("status.json", "resolved.yaml", "environment.json"):
        (path / name).write_text("{}")
    return path


def test_patterns_and_folders_name_the_runs_below_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [fake_run(Path(f"runs/{name}/base/seed={seed}")) for name in "ab" for seed in (1, 2)]
    Path("runs/notes").mkdir()
    Path("runs/a.txt").write_text("no run")
    assert found_runs("runs") == found_runs("runs/*") == found_runs("runs/**") == found_runs(".") == runs
    assert found_runs("runs/*/*/seed=1") == [runs[0], runs[2]]
    assert found_runs("runs/[b]") == runs[2:]
    assert found_runs(str(runs[0])) == [runs[0]]
    for nothing in ("runs/c", "runs/c*", "runs/notes", "runs/a.txt", ""):
        with refusing(f"run={nothing}: "):
            found_runs(nothing)


def test_a_folder_that_looks_like_a_pattern_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = fake_run(Path("runs/[a]"))
    assert found_runs("runs/[a]") == [run]
