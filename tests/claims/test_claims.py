"""Claims: files, the archive of their results, and the pages made from it."""

import shutil
from pathlib import Path

import pytest
import yaml

from llama_lab.analysis.analyse import analyse
from llama_lab.claims import __main__ as command
from llama_lab.claims.archive import changed_arms, pack, rows_of, unpack
from llama_lab.claims.book import write_pages
from llama_lab.claims.claim import Claim, all_claims
from llama_lab.runs.study import Study
from llama_lab.util.errors import ConfigError
from tests.golden.files import RUNS

TOP = Path(__file__).parents[2]
STATEMENT = {"text": "a", "source": "b", "arm": "new", "against": "old", "expects": "lower", "margin": 0.1}
CLAIM = {"title": "t", "study": ["study=options"], "statements": [STATEMENT]}
BAD = {
    "without a source": (CLAIM | {"statements": [STATEMENT | {"source": ""}]}, "a statement has no source"),
    "without a margin": ({**CLAIM, "statements": [{k: v for k, v in STATEMENT.items() if k != "margin"}]}, "margin"),
    "a margin of nothing": (CLAIM | {"statements": [STATEMENT | {"margin": 0.0}]}, "margin=0.0: must be positive"),
    "without a study": (CLAIM | {"study": []}, "statements need a study"),
    "of nothing": ({"title": "t"}, "it states nothing"),
    "without a title": ({key: value for key, value in CLAIM.items() if key != "title"}, "title"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_claim_that_lacks_a_part_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    content, problem = BAD[name]
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=problem) as error:
        Claim.load(tmp_path / "one.yaml")
    assert str(error.value).splitlines() == [str(error.value)]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder of a study with two arms and two seeds."""
    return Path(shutil.copytree(RUNS / "study", tmp_path / "study"))


def test_an_archive_has_what_judging_needs(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "claims" / "cpu.csv"
    pack(study, archive)
    unpack(archive, tmp_path / "again")
    ours, theirs = (analyse(Study.load(folder), folder) for folder in (tmp_path / "again", study))
    assert [arm.loss for arm in ours.arms] == [arm.loss for arm in theirs.arms]
    assert [arm.to_baseline for arm in ours.arms] == [arm.to_baseline for arm in theirs.arms]
    assert [arm.costs for arm in ours.arms] == [arm.costs for arm in theirs.arms]
    assert archive.stat().st_size < 20_000


def test_an_archive_keeps_the_runs_of_another_machine(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cpu.csv"
    pack(study, archive)
    before = [*rows_of(archive)]
    shutil.rmtree(study / before[0]["run"])
    pack(study, archive)
    assert [*rows_of(archive)] == before


def test_a_damaged_archive_is_named(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cpu.csv"
    pack(study, archive)
    archive.write_text(archive.read_text().replace('"done"', '"do', 1))
    with pytest.raises(ConfigError, match=r"cpu.csv: is damaged"):
        [*rows_of(archive)]


def test_settings_that_have_changed_make_an_arm_stale(study: Path, tmp_path: Path) -> None:
    archive = tmp_path / "cpu.csv"
    pack(study, archive)
    text = archive.read_text()
    row = next(row for row in rows_of(archive) if row["arm"] == "layernorm")
    archive.write_text(text.replace(row["config"], "00000000"))
    assert "layernorm" in changed_arms(archive)


def test_every_page_is_made_from_what_is_committed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(TOP)
    write_pages({name: (one, command.judged(one)) for name, one in all_claims(Path("claims")).items()}, tmp_path)
    pages = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert pages == {file.name: file.read_text() for file in (TOP / "docs" / "claims").iterdir()}


@pytest.mark.process
def test_a_killed_claim_goes_on_to_the_same_numbers_where_there_is_only_the_csv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text((TOP / "train.py").read_text())
    claim = Claim("tiny", "t", TINY, 0, [], [])
    command.run(claim, [])
    archive = command.archive_of(claim, "cpu")
    whole = [*rows_of(archive)]
    assert len(whole) == 4
    lines = archive.read_text().splitlines(keepends=True)
    archive.write_text("".join(lines[:3]))  # two runs have ended
    shutil.rmtree("runs")
    command.run(claim, [])
    again = [*rows_of(archive)]
    assert [row["last:val/loss"] for row in again] == [row["last:val/loss"] for row in whole]
    assert len([*Path("runs").rglob("last.ckpt")]) == 2, "the others were not trained again"


TINY = [
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
    "train.tokens=7680",
    "train.log_every=3",
]
