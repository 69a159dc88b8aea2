"""`from=RUN`: what was typed for a run is the start of the next one."""

from pathlib import Path

import pytest

from llama_lab.config.grammar import to_hydra
from llama_lab.runs.folder import OVERRIDES, read_overrides
from llama_lab.training.prepare import with_recorded
from tests.composing import compose_config
from tests.conftest import Command
from tests.refusals import refusing
from tests.training.tiny import trained


@pytest.fixture
def run(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of a user's choices."""
    place = f"runs_dir={tmp_path_factory.mktemp('before')}"
    mine = [*tiny, "train.tokens=2560", "norm=layernorm", "optim.lr=2e-3", "seed=3", place]
    return trained(*mine, "name=mine", arm="first")


def test_what_was_typed_for_a_run_is_typed_again_but_for_its_folder_and_what_is_typed_now(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = with_recorded(to_hydra([f"from={run}", "norm=rmsnorm", "name=again"]))
    assert typed[-2:] == ["norm=rmsnorm", "name=again"]
    assert {"optim.lr=2e-3", "seed=3", "size=pico"} < {*typed}
    assert not [one for one in typed if one.startswith(("from=", "norm=layernorm", "name=mine", "runs_dir="))]
    assert capsys.readouterr().err == f"from={run}: {' '.join(typed[:-2])}\n"
    cfg = compose_config(*typed)
    assert (cfg.optim.lr, cfg.seed, cfg.name) == (2e-3, 3, "again")


def test_a_run_from_another_trains_in_a_folder_of_its_own_and_records_all_that_it_took(
    run: Path, command: Command
) -> None:
    ran = command(f"from={run}", "optim.lr=3e-3")
    assert ran.code == 0, ran.err
    assert f"from={run}: " in ran.err
    expected = [one for one in read_overrides(run) if not one.startswith(("runs_dir=", "optim.lr=", "name="))]
    assert read_overrides(ran.run) == [*expected, "optim.lr=3e-3"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [(["from=nowhere"], "from=nowhere: holds no run"), (["from=a", "from=b"], "from=b: settings come from one run")],
)
def test_a_start_that_is_no_run_is_refused(arguments: list[str], fault: str) -> None:
    with refusing(fault):
        with_recorded(arguments)


def test_an_edited_record_is_refused(run: Path) -> None:
    file = run / OVERRIDES
    file.write_text(file.read_text().replace("layernorm", "rmsnorm"))
    with refusing(f"run={run}: its overrides.yaml is damaged"):
        with_recorded(to_hydra([f"from={run}"]))
