"""Speeds are measured side by side when a study has ended, and not again until a run has been added."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobStatus

from llama_lab.cli import compare_command
from llama_lab.model import Decoder
from llama_lab.runs.study import StudySpeed
from llama_lab.study import measure
from llama_lab.study.execute import measure as measure_plan
from tests.conftest import Command, Ran, RunTrain, unstamped
from tests.refusals import check_refused
from tests.study.planning import conducted, planned_study

LADDER = (
    "study=ladder",
    "study.learning_rates=null",
    "study.axes=[norm]",
    "study.seeds=[1]",
    "name=climb",
    "train.tokens=2560",
)


@pytest.fixture
def study(command: Command, tiny: list[str]) -> Callable[..., Ran]:
    """Run a tiny study inside this process."""
    return lambda *arguments: command(*tiny, *LADDER, *arguments)


@pytest.fixture(scope="module")
def trained(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the finished study."""
    ran = conducted(tmp_path_factory.mktemp("trained"), environment, *tiny, *LADDER)
    assert (ran.code, ran.err) == (0, "")
    return ran.cwd / "runs" / "climb"


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure less, where what is measured does not matter."""
    monkeypatch.setattr(measure, "ROUNDS", 1)


@pytest.fixture
def measured(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, which the next command finds."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "climb"))


@pytest.fixture
def unmeasured(measured: Path) -> Path:
    """The same, before its speeds are measured."""
    for name in (StudySpeed.FILE, "report.html"):
        (measured / name).unlink()
    return measured


@pytest.mark.slow
def test_a_study_ends_with_the_speeds_of_its_arms_measured_in_turn(
    study: Callable[..., Ran], unmeasured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    training = measure.training_speed

    def noted(run: measure.Run, *rest: measure.Dataset) -> float:
        order.append(run.cfg.arm)
        return training(run, *rest)

    monkeypatch.setattr(measure, "training_speed", noted)
    monkeypatch.setattr(measure, "ROUNDS", 3)
    ran = study()
    assert (ran.code, ran.err) == (0, "")
    there, back = ["vanilla", "+rmsnorm"], ["+rmsnorm", "vanilla"]
    assert order == [*there, *back, *there]
    found = StudySpeed.load(unmeasured)
    assert (found.device, found.devices, found.precision) == ("cpu", 1, "32-true")
    assert list(found.arms) == there
    for arm in found.arms.values():
        for rounds in (arm.train, arm.decode, arm.decode_batch, arm.prefill):
            assert len(rounds) == 3
            assert min(rounds) > 0
    assert not (unmeasured / "lightning_logs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_speeds_are_measured_again_only_after_a_run(study: Callable[..., Ran], measured: Path) -> None:
    before = (measured / StudySpeed.FILE).read_bytes()
    study()
    assert (measured / StudySpeed.FILE).read_bytes() == before
    study("study.seeds=[1,2]")
    assert (measured / StudySpeed.FILE).read_bytes() != before


@pytest.mark.slow
def test_a_study_measures_nothing_if_measure_speed_is_false(study: Callable[..., Ran], unmeasured: Path) -> None:
    study("study.measure_speed=false")
    assert (unmeasured / "report.html").exists()
    assert not (unmeasured / StudySpeed.FILE).exists()


@pytest.mark.slow
def test_a_measurement_that_fails_is_reported_and_the_report_written(
    study: Callable[..., Ran], unmeasured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no clock")

    monkeypatch.setattr(measure, "training_speed", broken)
    ran = study()
    assert "the arms' speeds could not be measured: no clock" in ran.err
    assert (unmeasured / "report.html").exists()


@pytest.mark.usefixtures("one_round")
@pytest.mark.slow
def test_models_that_cannot_decode_are_measured_in_training_alone(
    study: Callable[..., Ran], unmeasured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "decodes", False)
    assert study().code == 0
    for arm in StudySpeed.load(unmeasured).arms.values():
        assert (len(arm.train), arm.decode, arm.prefill) == (measure.ROUNDS, [], [])
    assert (unmeasured / "report.html").exists()


@pytest.mark.parametrize(
    ("typed", "fault"),
    {
        "measure=nowhere": "measure=nowhere",
        "measure=runs/climb norm=layernorm": "norm=layernorm",
        "trust=[mylab]": "trust=['mylab']",
        "study=ladder measure=x": "measure=x",
    }.items(),
)
def test_what_cannot_be_measured_is_reported_in_one_line(typed: str, fault: str, command: Command) -> None:
    check_refused(command(*typed.split()), fault)


@pytest.mark.usefixtures("one_round")
@pytest.mark.slow
def test_a_study_is_measured_by_a_command_but_not_with_foreign_code(command: Command, unmeasured: Path) -> None:
    ran = command("measure=runs/climb", "trainer=cpu")
    assert (ran.code, ran.err) == (0, "")
    assert StudySpeed.load(unmeasured) is not None
    config = unmeasured / "vanilla" / "seed=1" / "resolved.yaml"
    config.write_text(unstamped(config).replace("llama_lab.model.norm.LayerNorm", "os.system"))
    check_refused(command("measure=runs/climb", "trainer=cpu"), "measure=runs/climb")


@pytest.mark.slow
def test_a_study_asks_its_launcher_for_a_measurement_on_the_hardware_of_its_runs(
    unmeasured: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unmeasured.parents[1])
    asked: list[list[str]] = []

    def launch(jobs: list[list[str]], initial_job_idx: int) -> list[Any]:
        asked.extend(jobs)
        return [SimpleNamespace(status=JobStatus.COMPLETED)]

    devices = ("hydra/launcher=local_gpus", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    measure_plan(planned_study(*tiny, *LADDER, *devices), SimpleNamespace(launch=launch))
    assert {"measure=runs/climb", "trainer.devices=2", "trainer.accelerator=cpu"} <= {*asked[0]}


@pytest.mark.matrix
def test_speeds_are_measured_on_several_devices(run_train: RunTrain, unmeasured: Path) -> None:
    ran = run_train(f"measure={unmeasured}", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    assert (ran.code, ran.err) == (0, "")
    assert StudySpeed.load(unmeasured).devices == 2


def change_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    content.pop("checksum", None)
    file.write_text(json.dumps(content))


@pytest.mark.slow
def test_the_report_has_the_measured_speeds_and_their_faults(measured: Path, in_process: Callable[..., Ran]) -> None:
    def compared(runs_at_once: int, **speeds: object) -> tuple[str, dict[str, str]]:
        """What is printed, and the row of the first arm, where so many runs trained at once."""
        for file in measured.rglob("environment.json"):
            change_json(file, runs_at_once=runs_at_once)
        if speeds:
            change_json(measured / StudySpeed.FILE, **speeds)
        ran = in_process(compare_command, "llama-lab-compare", str(measured))
        assert ran.code == 0
        return " ".join(ran.out.split()), next(csv.DictReader((measured / "summary.csv").open()))

    vanilla = {"train": [100.0, 300.0, 200.0], "decode": [7.0, 8.0, 9.0]}
    arms = {"vanilla": vanilla, "+rmsnorm": {"train": [110.0, 120.0, 130.0], "decode": [1.0, 1.0, 1.0]}}
    printed, row = compared(1, arms=arms, device="NVIDIA H100")
    trained = "perf/tokens_per_second"
    found = [float(row[column]) for column in (trained, f"{trained}_low", f"{trained}_high")]
    assert found == pytest.approx([(100 * 300 * 200) ** (1 / 3), 100.0, 300.0])
    assert "prefill_tokens_per_second" not in row  # which older versions did not measure
    assert "runs trained on other hardware: 1 x cpu, 32-true" in printed
    assert "apart: vanilla." in printed.partition("not quiet while speeds were measured")[2]
    printed, _ = compared(1, arms={"vanilla": vanilla})
    assert "Speeds are as runs logged them, not measured with the others: +rmsnorm." in printed
    (measured / StudySpeed.FILE).unlink()
    _, row = compared(1)
    logged = json.loads((measured / "vanilla" / "seed=1" / "summary.json").read_text())[trained]
    assert (float(row[trained]), row[f"{trained}_low"]) == (logged, "")
    _, row = compared(2)
    assert row.get(trained, "") == "", "a run beside others says nothing about speed"
