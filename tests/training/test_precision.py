"""`trainer.precision=auto` on a CPU: decided once for a run and for a study, told, recorded and kept."""

from pathlib import Path

import pytest

from llama_lab.devices import hardware
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Environment
from llama_lab.util.errors import ConfigError
from llama_lab.util.version import __version__
from tests.study.planning import planned_study
from tests.training.tiny import planned, trained

WIDE = f"model.dim={hardware.LEAST_WIDTH}"


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bf16."""
    monkeypatch.setattr(hardware, "has_native_bf16", lambda: True)


@pytest.mark.usefixtures("native")
def test_a_run_says_and_records_its_precision_and_goes_on_in_it_on_another_processor(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [*tiny, WIDE, f"runs_dir={tmp_path}", "schedule=constant"]
    folder = RunFolder(trained(*mine, "train.tokens=2560"))
    assert "trainer.precision=auto: bf16-mixed, since this processor has native bf16\n" in capsys.readouterr().out
    recorded = folder.environment
    assert (recorded.precision, recorded.attention_kernel) == ("bf16-mixed", "blocks")

    monkeypatch.setattr(hardware, "has_native_bf16", lambda: False)
    assert planned(*mine, "name=other", arm="other").hardware.precision == "32-true"
    further = [f"resume={folder.path}", "train.tokens=5120"]
    with pytest.raises(ConfigError, match=r"trainer\.precision=32-true"):
        trained(*mine, *further, "trainer.precision=32-true")
    trained(*mine, *further)
    assert folder.environment.precision == "bf16-mixed"
    assert planned(*mine, "overwrite=true").hardware.precision == "32-true"


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("sizes", "begun", "precision"),
    [("pico,nano", "", "32-true"), ("nano,pico", "", "bf16-mixed"), ("pico,nano", "bf16-mixed", "bf16-mixed")],
)
def test_a_study_takes_the_precision_of_its_first_runs_or_else_of_its_baseline(
    sizes: str, begun: str, precision: str, tiny: list[str], tmp_path: Path
) -> None:
    arms = [
        "study=scaling",
        f"study.sizes=[{sizes}]",
        "study.budgets=[1]",
        "study.axis=ffn",
        "study.options=[relu,swiglu]",
    ]
    shared = [override for override in tiny if not override.startswith(("size=", "train.tokens="))]
    study = [*shared, *arms, "study.learning_rates=null", f"runs_dir={tmp_path}", "name=mine"]
    if begun:
        earlier = tmp_path / "mine" / "arm" / "seed=1"
        earlier.mkdir(parents=True)
        Environment(precision=begun, versions={"llama-lab": __version__}).save(earlier)
    runs = [planned.run for planned in planned_study(*study).runs]
    assert {run.hardware.precision for run in runs} == {precision}
    own = {"pico": "32-true", "nano": "bf16-mixed"}
    for run in runs:
        is_told = own[run.choices["size"]] != precision
        assert (f"trainer.precision={precision}" in run.overrides) == is_told
