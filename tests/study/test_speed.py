"""Speeds are measured side by side when a study has ended, and not again until a run has been added."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_lab.cli import compare_command
from llama_lab.model import Decoder
from llama_lab.runs.study import StudySpeed
from llama_lab.study import measure
from tests.conftest import Command, Ran, RunTrain, unstamped
from tests.training.tiny import planned

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
def trained(run_train: RunTrain, tiny: list[str]) -> Path:
    """The folder of the finished study."""
    ran = run_train(*tiny, *LADDER)
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


def test_a_study_ends_with_the_speeds_of_its_arms_measured_in_turn(
    study: Callable[..., Ran], unmeasured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    training = measure.training_speed

    def noted(run: measure.Run, *rest: measure.Dataset) -> float:
        order.append(run.cfg.arm)
        return training(run, *rest)

    monkeypatch.setattr(measure, "training_speed", noted)
    ran = study()
    assert (ran.code, ran.err) == (0, "")
    there, back = ["vanilla", "+rmsnorm"], ["+rmsnorm", "vanilla"]
    assert order == [*there, *back, *there, *back, *there]
    found = StudySpeed.load(unmeasured)
    assert (found.device, found.devices, found.precision) == ("cpu", 1, "32-true")
    assert list(found.arms) == there
    for arm in found.arms.values():
        kinds = (arm.train, arm.decode, arm.decode_batch, arm.prefill)
        assert [len(rounds) for rounds in kinds] == [measure.ROUNDS] * 4
        assert min(speed for rounds in kinds for speed in rounds) > 0
        assert arm.memory == []  # of a process that holds much else
    assert not (unmeasured / "lightning_logs").exists()


def test_arms_of_two_budgets_are_measured_once(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(run: measure.Run, _: object) -> float:
        order.append(run.cfg.arm)
        return float(len(order))

    monkeypatch.setattr(measure, "training_speed", noted)
    monkeypatch.setattr(measure, "generation_speeds", lambda *_: {})
    arms = {"short": "train.tokens=5120", "long": "train.tokens=10240", "relu": "ffn=relu"}
    runs = {arm: planned(*tiny, f"arm={arm}", own, f"runs_dir={tmp_path}") for arm, own in arms.items()}
    found = measure.measure_in_turn(runs, None)  # type: ignore[arg-type]
    assert set(order) == {"short", "relu"}
    assert list(found) == list(arms)
    assert found["long"] == found["short"] != found["relu"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_round")
def test_speeds_are_measured_again_only_after_a_run(study: Callable[..., Ran], measured: Path) -> None:
    before = (measured / StudySpeed.FILE).read_bytes()
    study()
    assert (measured / StudySpeed.FILE).read_bytes() == before
    (measured / StudySpeed.FILE).unlink()
    study()
    assert list(json.loads((measured / StudySpeed.FILE).read_text())["arms"]) == ["vanilla", "+rmsnorm"]
    before = (measured / StudySpeed.FILE).read_bytes()
    study("study.seeds=[1,2]")
    assert (measured / StudySpeed.FILE).read_bytes() != before


def test_a_study_measures_nothing_if_measure_speed_is_false(study: Callable[..., Ran], unmeasured: Path) -> None:
    study("study.measure_speed=false")
    assert (unmeasured / "report.html").exists()
    assert not (unmeasured / StudySpeed.FILE).exists()


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
def test_models_that_cannot_decode_are_measured_in_training_alone(
    study: Callable[..., Ran], unmeasured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "decodes", False)
    assert study().code == 0
    for arm in StudySpeed.load(unmeasured).arms.values():
        assert (len(arm.train), arm.decode, arm.prefill) == (measure.ROUNDS, [], [])
    assert (unmeasured / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["measure=nowhere"], "measure=nowhere: holds no study"),
        (
            ["measure=runs/climb", "norm=layernorm"],
            "norm=layernorm: measure= trains what the study's runs have trained",
        ),
        (["trust=[mylab]"], "trust=['mylab']: is for configs that are stored"),
        (["study=ladder", "measure=x"], "measure=x: a study measures speeds at its end"),
    ],
)
def test_what_cannot_be_measured_is_reported_in_one_line(arguments: list[str], expected: str, command: Command) -> None:
    ran = command(*arguments)
    assert ran.code == 2
    assert expected in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.usefixtures("one_round")
def test_a_study_is_measured_by_a_command_but_not_with_foreign_code(command: Command, unmeasured: Path) -> None:
    ran = command("measure=runs/climb", "trainer=cpu")
    assert (ran.code, ran.err) == (0, "")
    assert StudySpeed.load(unmeasured) is not None
    config = unmeasured / "vanilla" / "seed=1" / "resolved.yaml"
    config.write_text(unstamped(config).replace("llama_lab.model.norm.LayerNorm", "os.system"))
    ran = command("measure=runs/climb", "trainer=cpu")
    assert ran.code == 2
    assert "names os.system, which" in ran.err


@pytest.mark.slow
def test_a_queue_measures_on_the_hardware_of_its_runs(run_train: RunTrain, tiny: list[str]) -> None:
    ran = run_train(
        *tiny, *LADDER, "hydra/launcher=local_gpus", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"
    )
    assert (ran.code, ran.err) == (0, "")
    found = StudySpeed.load(ran.cwd / "runs" / "climb")
    assert found.devices == 2
    assert "1 runs on" in ran.out


def change_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    content.pop("checksum", None)
    file.write_text(json.dumps(content))


def test_the_report_has_the_measured_speeds_and_their_faults(measured: Path, in_process: Callable[..., Ran]) -> None:
    def compared() -> tuple[str, dict[str, str]]:
        """What is printed, and the row of the first arm."""
        ran = in_process(compare_command, "llama-lab-compare", str(measured))
        assert ran.code == 0
        return " ".join(ran.out.split()), next(csv.DictReader((measured / "summary.csv").open()))

    def beside(runs: int) -> None:
        """Let the records say that so many runs trained at once."""
        for file in measured.rglob("environment.json"):
            change_json(file, runs_at_once=runs)

    vanilla = {"train": [100.0, 300.0, 200.0], "decode": [7.0, 8.0, 9.0], "decode_batch": [40.0, 50.0, 60.0]}
    arms = {"vanilla": vanilla, "+rmsnorm": {"train": [110.0, 120.0, 130.0], "decode": [1.0, 1.0, 1.0]}}
    change_json(measured / StudySpeed.FILE, arms=arms, device="NVIDIA H100")
    printed, row = compared()
    trained = "perf/tokens_per_second"
    found = [float(row[column]) for column in (trained, f"{trained}_low", f"{trained}_high")]
    assert found == pytest.approx([(100 * 300 * 200) ** (1 / 3), 100.0, 300.0])
    assert float(row["decode_tokens_per_second"]) == pytest.approx((7 * 8 * 9) ** (1 / 3))
    assert float(row["decode_batch_tokens_per_second"]) == pytest.approx((40 * 50 * 60) ** (1 / 3))
    assert "prefill_tokens_per_second" not in row  # which older versions did not measure
    assert "Speeds were measured on 1 x NVIDIA H100, 32-true" in printed
    assert "runs trained on other hardware: 1 x cpu, 32-true" in printed
    unquiet = printed.index("not quiet while speeds were measured, with rounds more than 1.5")
    assert "apart: vanilla." in printed[unquiet:]
    beside(1)
    change_json(measured / StudySpeed.FILE, arms={"vanilla": vanilla})
    assert "Speeds are as runs logged them, not measured with the others: +rmsnorm." in compared()[0]
    (measured / StudySpeed.FILE).unlink()
    _, row = compared()
    logged = json.loads((measured / "vanilla" / "seed=1" / "summary.json").read_text())[trained]
    assert (float(row[trained]), row[f"{trained}_low"]) == (logged, "")
    beside(2)
    assert compared()[1].get(trained, "") == "", "a run beside others says nothing about speed"
