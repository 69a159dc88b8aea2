"""Seeds that are added after a report: the level that reports share, what is refused, and the arms that go on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_lab.cli import compare_command
from llama_lab.runs.study import Study
from llama_lab.study.design.plan import with_next_seed
from llama_lab.study.execute import with_reports
from tests.analysis.synthetic import write_study
from tests.conftest import Command, Ran
from tests.golden.files import RUNS
from tests.refusals import check_refused, refusing
from tests.study.planning import planned_study

# The second arm is within the margin at two seeds; the third is better by far more, which takes a third seed to show.
STUDY = (
    *("study=options", "study.axis=optim.lr", "study.options=[1e-3,1.001e-3,3e-2]", "match=none", "name=rates"),
    *("study.seeds=[1,2]", "study.measure_speed=false", "train.tokens=2560", "train.evaluations=2"),
)
SHARED = ("study.max_seeds=4", "study.margin=1")
NEAR, FAR = "lr=0.001001", "lr=0.03"


@pytest.fixture
def study(command: Command, tiny: list[str]) -> Callable[..., Ran]:
    """Run STUDY inside this process."""
    return partial(command, *tiny, *STUDY)


def seeds_of(folder: Path) -> dict[str, list[int]]:
    """The judged seeds of each arm, as study.yaml lists them."""
    return {arm.name: [member.seed for member in arm.judged] for arm in Study.load(folder).arms}


def trained(folder: Path) -> dict[Path, int]:
    """When each run ended."""
    return {file: file.stat().st_mtime_ns for file in folder.glob("*/*/summary.json")}


@pytest.mark.slow
def test_a_study_adds_seeds_to_undecided_arms_and_its_reports_share_one_level(
    study: Callable[..., Ran], in_process: Callable[..., Ran], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "rates"
    first = study(*SHARED)
    assert "Tested at 0.025 for 2 of at most 4 seeds (study.max_seeds)" in " ".join(first.out.split())
    assert Study.load(folder).reported_seeds == (2,)
    table, before = (folder / "summary.csv").read_text(), trained(folder)
    assert in_process(compare_command, "llama-lab-compare", "runs/rates").code == 0
    assert (folder / "summary.csv").read_text() == table, "at the same seeds it is the same report"

    check_refused(study("study.max_seeds=5"), "study.max_seeds=5: the first report of runs/rates had 4")
    check_refused(study(), "study.max_seeds=null")
    ran = study(*SHARED, "study.add_seeds=true")
    assert (ran.code, ran.err) == (0, "")
    assert seeds_of(folder) == {"lr=0.001": [1, 2, 3], NEAR: [1, 2], FAR: [1, 2, 3]}
    assert Study.load(folder).reported_seeds == (2, 3)
    assert "Tested at 0.025 for 2 and 0.0125 for 3 of at most 4 seeds" in " ".join(ran.out.split())
    after = trained(folder)
    assert {file: time for file, time in after.items() if file in before} == before

    table = (folder / "summary.csv").read_text()
    assert study(*SHARED, "study.add_seeds=true").code == 0
    assert (trained(folder), (folder / "summary.csv").read_text()) == (after, table)


def test_an_added_seed_has_a_tuning_seed_of_its_own_or_takes_its_turn(tiny: list[str]) -> None:
    rates = ("study.learning_rates=[1e-3,3e-3]", "study.axis=norm", "study.options=[rmsnorm,layernorm]")
    for given, expected in {"null": [1001, 1002, 1003], "[7]": [7]}.items():
        settings = (*SHARED, "study.add_seeds=true", f"study.tuning_seeds={given}")
        plan = planned_study(*tiny, *STUDY, *rates, *settings)
        assert plan.command.further_seeds == (3, 4)
        plan = with_next_seed(plan, ["layernorm"])
        rmsnorm, layernorm = plan.study.arms
        assert [member.seed for member in rmsnorm.judged] == [1, 2]
        assert [member.seed for member in layernorm.judged] == [1, 2, 3]
        assert sorted({member.seed for member in layernorm.tuning}) == expected
        assert {member.seed for member in rmsnorm.tuning} == {*expected} - {1003}


def test_a_report_of_version_0_4_is_the_first_of_its_study(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RUNS / "study", tmp_path / "study"))
    before = Study.load(folder)
    assert (before.max_seeds, before.reported_seeds, before.level_share(2)) == (None, None, 1)
    plan = SimpleNamespace(folder=folder, study=replace(before, reported_seeds=()))
    assert with_reports(plan).reported_seeds == (2,)
    with refusing("study.max_seeds=4"):
        with_reports(SimpleNamespace(folder=folder, study=replace(before, max_seeds=4)))
    (folder / "summary.csv").unlink()
    assert with_reports(plan).reported_seeds == (), "nobody has seen a report"


def test_max_seeds_may_change_until_a_report_has_tested(tmp_path: Path) -> None:
    study = replace(write_study(tmp_path, {"base": 0.0, "arm": 0.0}), reported_seeds=(), max_seeds=5)
    study.save(tmp_path)
    plan = SimpleNamespace(folder=tmp_path, study=replace(study, max_seeds=8))
    assert with_reports(plan).max_seeds == 8
    replace(study, reported_seeds=(3,)).save(tmp_path)
    with refusing("study.max_seeds=8"):
        with_reports(plan)
