"""Claims: files, the archive of their results, and the pages made from it."""

import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from llama_lab.analysis.analyse import analyse
from llama_lab.api import load_config
from llama_lab.claims import __main__ as command
from llama_lab.claims.archive import changed_arms, configs_of, curve, pack, rows_of, unpack
from llama_lab.claims.book import Judged, write_pages
from llama_lab.claims.claim import Claim, Statement, all_claims
from llama_lab.claims.judging import WORDS
from llama_lab.claims.planning import all_flops, changed_loss, plan_of
from llama_lab.cli import train_command
from llama_lab.runs.evaluation import Evaluation, LengthLoss
from llama_lab.runs.record import read_record
from llama_lab.runs.study import Study
from llama_lab.study.design.designs import Composer
from llama_lab.util.errors import ConfigError
from tests.conftest import enter, exit_code
from tests.golden.files import RUNS
from tests.refusals import check_line, refusing

TOP = Path(__file__).parents[2]
STATEMENT = {"text": "a", "source": "b", "arm": "new", "against": "old", "expects": "lower", "margin": 0.1}
CLAIM = {"title": "t", "study": ["study=options"], "statements": [STATEMENT]}
FIGURE = {"text": "a", "source": "b", "says": 1, "within": 0, "fact": "rope_angle", "of": [1]}
BAD = {
    "without a source": CLAIM | {"statements": [STATEMENT | {"source": ""}]},
    "a margin of nothing": CLAIM | {"statements": [STATEMENT | {"margin": 0.0}]},
    "without a study": CLAIM | {"study": []},
    "of nothing": {"title": "t"},
    "with a key that nothing reads": CLAIM | {"hours": 2},
    "an unknown fact": {"title": "t", "figures": [FIGURE | {"fact": "angle"}]},
    "a fact of nothing": {"title": "t", "figures": [FIGURE | {"of": []}]},
    "without a title": {key: value for key, value in CLAIM.items() if key != "title"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_claim_that_lacks_a_part_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(BAD[name]))
    with pytest.raises(ConfigError) as error:
        Claim.load(tmp_path / "one.yaml")
    assert str(error.value).startswith(str(tmp_path / "one.yaml"))
    assert "\n" not in str(error.value)


TINY = Claim(
    "tiny",
    "t",
    [
        "study=options",
        "study.axis=norm",
        "study.options=[rmsnorm,layernorm]",
        "study.seeds=[1,2]",
        "study.measure_speed=false",
        "size=pico",
        "model.dim=16",
        "train.batch_size=8",
        "train.evaluations=2",
        "logger=none",
        "trainer=cpu",
        "data=recall",
        "train.tokens=2560",
        "train.log_every=3",
    ],
    [],
    [],
)


SINCE = (  # defaults that the golden run was trained before
    *("model.init.std", "model.embedding.std", "optim.lr"),
    *("size.batch_size", "size.embedding_std", "size.init_std", "size.learning_rate"),
)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder of a study with two arms and two seeds."""
    return Path(shutil.copytree(RUNS / "study", tmp_path / "study"))


def test_an_archive_has_what_judging_needs(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "claims" / "cpu.csv"
    pack(study, archive)
    unpack(archive, tmp_path / "again")
    ours, theirs = (analyse(Study.load(folder), folder) for folder in (tmp_path / "again", study))
    for kind in ("loss", "to_baseline", "costs"):
        assert [getattr(arm, kind) for arm in ours.arms] == [getattr(arm, kind) for arm in theirs.arms]
    for kind in ("environment", "summary"):
        assert [getattr(run, kind) for run in ours.records] == [getattr(run, kind) for run in theirs.records]
    assert archive.stat().st_size < 20_000


def test_an_archive_has_the_losses_of_longer_windows(study: Path, tmp_path: Path) -> None:
    run = study / Study.load(study).arms[0].members[0].folder
    step = int(read_record(run).summary["step"])
    Evaluation(step=step, lengths=[LengthLoss(32, 5.0), LengthLoss(64, 5.5, [1.0], [5.5], [64])]).save(run)
    pack(study, tmp_path / "cpu.csv")
    unpack(tmp_path / "cpu.csv", tmp_path / "again")
    again = read_record(tmp_path / "again" / run.relative_to(study))
    assert [(one.length, one.loss) for one in again.evaluation.lengths] == [(32, 5.0), (64, 5.5)]


def test_an_unpacked_run_differs_from_one_that_was_trained_here_in_no_setting(study: Path, tmp_path: Path) -> None:
    pack(study, tmp_path / "cpu.csv")
    shutil.rmtree(here := study / "rmsnorm" / "seed=1")
    unpack(tmp_path / "cpu.csv", study)
    was, now = (read_record(one).config for one in (RUNS / "study" / "rmsnorm" / "seed=1", here))
    changed = {key for key in now if was.get(key) != now[key]}
    assert changed == {*SINCE}, "what the defaults of that run's version were"


def test_an_archive_keeps_the_runs_of_another_machine(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cpu.csv"
    pack(study, archive)
    before = rows_of(archive)
    shutil.rmtree(study / before[0]["run"])
    pack(study, archive)
    assert rows_of(archive) == before


def test_a_damaged_archive_is_named(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cpu.csv"
    pack(study, archive)
    archive.write_text(archive.read_text().replace('"done"', '"do', 1))
    with refusing(f"{archive}: is damaged"):
        rows_of(archive)


def test_settings_that_have_changed_make_an_arm_stale(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cpu.csv"
    pack(study, archive)
    text = archive.read_text()
    row = next(row for row in rows_of(archive) if row["environment.arm"] == "layernorm")
    archive.write_text(text.replace(row["config"], "00000000"))
    assert "layernorm" in changed_arms(archive)


def test_a_claim_that_has_changed_is_stale(study: Path, tmp_path: Path) -> None:
    pack(study, archive := tmp_path / "cpu.csv")
    file = tmp_path / "cpu.study.yaml"
    ran = yaml.safe_load(file.read_text()) | {"command": shlex.join(["python", "train.py", *TINY.study, "name=tiny"])}
    file.write_text(yaml.safe_dump(ran))
    assert "was run with" not in command.stale(replace(TINY, study=[*TINY.study, "logger=all"]), archive)
    longer = replace(TINY, study=[*TINY.study, "model.dropout=0.1"])
    assert command.stale(longer, archive) == "its study was run without model.dropout=0.1"
    unset = replace(TINY, study=[one for one in TINY.study if one != "train.tokens=2560"])
    assert command.stale(unset, archive) == "its study was run with train.tokens=2560"


@pytest.mark.parametrize("word", ["model.dropout=0.1", "runs_dir=other"])
def test_an_override_that_decides_results_or_where_they_are_is_refused(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(TOP)
    monkeypatch.setattr(sys, "argv", ["claims", "norms", "hydra/launcher=slurm", "trainer=cpu", word])
    with pytest.raises(SystemExit):
        command.main()
    check_line(capsys.readouterr().err.removeprefix("error: ").removesuffix("\n"), word)


ALL = all_claims(TOP / "claims")
FEW = ("figures", "kernels", "depths_gpu")  # of calculations, of a study, and of one that has not been run
PAGES = [pytest.param(name, marks=() if name in FEW else pytest.mark.matrix) for name in ALL]
COMMITTED = TOP / "docs" / "claims"


def rows_in(page: str) -> list[str]:
    """The rows of the table of all on a page, whose links have no folder."""
    return re.findall(r"^\| .+\.md\) \|.+$", page.replace("](docs/claims/", "]("), re.M)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_from_what_is_committed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(TOP)
    write_pages(
        {name: (ALL[name], command.judged(ALL[name]))}, tmp_path / "claims", Path(shutil.copy("README.md", tmp_path))
    )
    made = {file.name: file.read_text() for file in (tmp_path / "claims").iterdir()}
    assert set(rows_in(made.pop("README.md"))) <= set(rows_in((COMMITTED / "README.md").read_text()))
    assert made == {file.name: file.read_text() for file in COMMITTED.iterdir() if file.stem.split("-")[0] == name}
    for archive in Path("claims", name).glob("*.csv"):
        assert f"## On a {archive.stem.upper()}\n" in made[f"{name}.md"]
        assert rows_of(archive)[0]["environment.cpu"] in made[f"{name}.md"]


def test_the_table_of_all_has_every_statement_in_the_order_of_verdicts() -> None:
    rows = rows_in((COMMITTED / "README.md").read_text())
    devices = {name: len([*(TOP / "claims" / name).glob("*.csv")]) for name in ALL}
    assert len(rows) == sum(len(one.statements) * max(1, devices[n]) for n, one in ALL.items())
    words = [re.sub(" on a (CPU|GPU)$", "", row.split(" | ")[0].removeprefix("| ")) for row in rows]
    assert words == sorted(words, key=WORDS.index)
    front = (TOP / "README.md").read_text().partition("<!-- the claims -->")[2].partition("<!-- their end -->")[0]
    assert rows_in(front) == [row for row in rows if not row.startswith("| not run |")][:4]
    assert {file.stem.split("-")[0] for file in COMMITTED.iterdir()} == {"README", "older", *ALL}


def test_claims_that_start_from_one_run_train_it_alike() -> None:
    sources = {tuple(claim.source) for claim in ALL.values() if claim.source}
    names = Counter(next(one for one in source if one.startswith("name=")) for source in sources)
    assert max(names.values()) == 1


STUDIES = [
    pytest.param(name, marks=pytest.mark.slow if name == "heads" else pytest.mark.matrix)
    for name, claim in ALL.items()
    if claim.study and not claim.source
]
TWO_HOURS = 2 * 3600 * 5e10  # FLOPs of two cores


@pytest.mark.parametrize("name", STUDIES)
def test_a_claim_has_its_arms_and_takes_at_most_two_hours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TOP)
    plan = plan_of(Claim.load(Path("claims", f"{name}.yaml")))
    assert (all_flops(plan) < TWO_HOURS) == (name != "ladder" and not name.endswith("_gpu"))


def test_a_statement_on_an_arm_that_the_study_lacks_is_refused() -> None:
    with refusing("tiny: its study has no arm rms"):
        plan_of(replace(TINY, statements=[Statement("a", "b", "rms", "layernorm", "lower", 0.1)]))


@pytest.mark.slow
def test_a_statement_on_a_pair_that_the_study_does_not_test_is_refused() -> None:
    three = [one.replace("layernorm]", "layernorm,rmsnorm_plain]") for one in TINY.study]
    said = Statement("a", "b", "rmsnorm_plain", "layernorm", "lower", 0.1)
    with refusing("tiny: its study does not compare rmsnorm_plain with layernorm"):
        plan_of(replace(TINY, study=three, statements=[said]))
    assert plan_of(replace(TINY, study=three, statements=[replace(said, quantity="longest")]))


def test_a_study_that_cannot_be_composed_is_refused_in_a_line() -> None:
    with refusing("norm=nome"):
        plan_of(replace(TINY, study=["study=options", "norm=nome"]))


def test_a_device_too_small_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llama_lab.study.design.memory_fit.device_memory", lambda _: 100_000)
    with refusing("tiny: this device is too small for rmsnorm"):
        command.run(TINY, [])
    assert [*tmp_path.iterdir()] == []


def test_a_claim_for_a_gpu_is_left_out_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    large = replace(TINY, device="gpu")
    command.run(large, [])
    assert capsys.readouterr().out == "tiny: is for a GPU, and left out here\n"
    assert [*tmp_path.iterdir()] == []
    assert command.state(large, [], check=False) == "tiny: t\n    not run on a GPU"


@pytest.mark.parametrize(
    ("words", "here", "device"),
    [
        ([], False, "cpu"),
        (["trainer=fsdp"], True, "gpu"),
        (["trainer.accelerator=gpu", "trainer=fsdp"], False, "gpu"),
        (["trainer=gpu", "trainer=cpu"], True, "cpu"),
    ],
)
def test_results_are_of_the_device_that_is_named_or_here(
    words: list[str], here: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    assert command.device_of(words) == device


def test_runs_of_an_arm_are_composed_once(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(study, archive := tmp_path / "cpu.csv")
    rows, composed, compose = rows_of(archive), [], Composer.compose
    monkeypatch.setattr(Composer, "compose", lambda *given: composed.append(given) or compose(*given))
    overrides = [row["overrides"] for row in rows]
    assert configs_of(overrides, None) == [load_config(given) for given in overrides]
    assert len(composed) == len({row["environment.arm"] for row in rows}) < len(rows)


@contextmanager
def training_here(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Inside, claims are run in a folder, and their studies train in this process."""
    with pytest.MonkeyPatch.context() as patch:

        def train(words: list[str], check: bool) -> SimpleNamespace:
            launcher = ["hydra/launcher=basic"] if "study=options" in words else []
            return SimpleNamespace(returncode=exit_code(train_command, [*words[1:], *launcher], patch))

        enter(folder, environment, patch)
        patch.setattr(command, "subprocess", SimpleNamespace(run=train))
        yield


@pytest.fixture(scope="module")
def ran(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which TINY has run."""
    folder = tmp_path_factory.mktemp("claims")
    with training_here(folder, environment):
        command.run(TINY, [])
    return folder


@pytest.fixture
def trained(ran: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """The archive of TINY, which has run; its folder of runs is the working directory's."""
    with training_here(Path(shutil.copytree(ran, tmp_path / "ran")), environment):
        yield command.archive_of(TINY, "cpu")


@pytest.mark.slow
def test_a_killed_claim_goes_on_to_the_same_numbers_where_there_is_only_the_csv(trained: Path) -> None:
    whole = rows_of(trained)
    assert len(whole) == 4
    lines = trained.read_text().splitlines(keepends=True)
    trained.write_text("".join(lines[:3]))  # two runs have ended
    shutil.rmtree("runs")
    command.run(TINY, [])
    again = rows_of(trained)
    assert [row["summary.val/loss"] for row in again] == [row["summary.val/loss"] for row in whole]
    assert len([*Path("runs").rglob("last.ckpt")]) == 2, "the others were not trained again"


@pytest.mark.slow
def test_what_has_ended_is_kept_at_ctrl_c(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows_of(trained)
    shutil.rmtree(trained.parent)
    shutil.rmtree(Path("runs/claims-tiny-cpu", whole[-1]["run"]))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.run(TINY, [])
    assert rows_of(trained) == whole[:-1]


@pytest.mark.process
def test_ctrl_c_is_left_to_the_study_which_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"  # a terminal sends it to both
        "time.sleep(1)\n"
        "pathlib.Path('saved').touch()\n"
        "sys.exit(130)\n"
    )
    with refusing("tiny: its study ended with status 130"):
        command.train(TINY, "study", [])
    assert Path("saved").exists()


@pytest.mark.slow
def test_results_of_other_data_are_refused(trained: Path) -> None:
    plan = plan_of(TINY)
    assert command.stale(TINY, trained, plan) == ""
    trained.write_text(trained.read_text().replace(rows_of(trained)[0]["environment.data_hash"], "0" * 32))
    assert command.stale(TINY, trained, plan) == "its results are of other data than is here"
    with refusing(f"{trained}: is stale"):
        command.run(TINY, [])


@pytest.mark.slow
def test_losses_of_the_first_steps_that_have_changed_make_it_stale(trained: Path) -> None:
    assert changed_loss(trained, None) == ""
    loss = next(str(row["train/loss"]) for row in curve(rows_of(trained)[0]) if row["step"] == 6)
    trained.write_text(trained.read_text().replace(loss, f"{1.01 * float(loss)}"))
    found = changed_loss(trained, None)
    assert found == f"its loss was {1.01 * float(loss):.4f} at step 6, and is {float(loss):.4f} now"


@pytest.mark.slow
def test_a_claim_may_start_from_a_run_that_is_trained_first(trained: Path) -> None:
    settings = [one for one in TINY.study if not one.startswith("study")]
    source = [*settings, "norm=rmsnorm", "arch=llama", "name=source", "arm=base"]
    start = ["init_from=runs/source/base/seed=1", "match=none"]
    claim = replace(TINY, name="changed", study=[*TINY.study, *start], source=source)
    assert "would take" not in command.state(claim, [], check=False)
    command.run(claim, [])
    rows = rows_of(command.archive_of(claim, "cpu"))
    assert {row["environment.init_hash"] for row in rows} != {""}
    command.run(claim, [])  # goes on: its source, which train.py would refuse as finished, is not trained again
    assert changed_arms(command.archive_of(claim, "cpu")) == []
    stated = command.state(claim, [Judged("cpu", [], hours=0.3)], check=True)
    assert "its first steps are of trained weights, and not run again" in stated


@pytest.mark.slow
def test_a_claim_is_listed_with_what_it_costs_and_as_partial_while_judged_runs_are_missing(trained: Path) -> None:
    line = command.state(TINY, [], check=False)
    assert re.fullmatch(r"tiny: t\n    not run on a CPU, would take [\d.]+ (s|min) here; not run on a GPU", line)
    assert "partial" not in command.state(TINY, command.judged(TINY), check=False)
    trained.write_text("".join(trained.read_text().splitlines(keepends=True)[:3]))  # two runs have ended
    assert "; partial, 2 of 4 judged runs are missing; " in command.state(TINY, command.judged(TINY), check=False)
