"""Exports for a paper: their files are complete and well-formed, and replace nothing else."""

import csv
import io
import re
import string
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert
from PIL import Image

from llama_lab.analysis.analyse import analyse
from llama_lab.analysis.result import Result
from llama_lab.cli import compare_command
from llama_lab.report import export, figures
from llama_lab.report.export import CONTENTS, write_export
from llama_lab.report.markup import latex, latex_table, markdown_table
from llama_lab.report.tables import Table, tables
from llama_lab.runs.study import Study
from llama_lab.util.chart import SIZE, svg
from llama_lab.util.errors import ConfigError
from llama_lab.util.formatting import UNKNOWN
from tests.analysis import results, synthetic
from tests.conftest import Ran

HOSTILE = "a_b & c% $x$"
UNFINISHED = "swiglu"
ARMS = {HOSTILE: 0.0, "rmsnorm": -0.05, "rope": -0.2, UNFINISHED: -0.3}
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ladder whose last arm has no finished run."""
    folder = tmp_path_factory.mktemp("study") / "planted"
    study = synthetic.write_study(folder, ARMS, SEEDS, design="ladder", lengths=(256, 512))
    for seed in SEEDS:
        run = synthetic.run_folder(folder, study, UNFINISHED, seed)
        synthetic.plant_end(run, "diverged", "loss is nan at step 50", kept_rows=8)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> Result:
    return analysed(folder)


def analysed(folder: Path) -> Result:
    return analyse(Study.load(folder), folder)


@pytest.fixture(scope="module")
def paper(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export without figures, which take seconds."""
    folder = tmp_path_factory.mktemp("export") / "paper"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "FIGURES", {})
        write_export(result, folder)
    return folder


@pytest.fixture(scope="module")
def pictures(result: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of some figures."""
    folder = tmp_path_factory.mktemp("figures")
    some = ("steps", "validation_loss", "kv_cache_front", "context_lengths")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in some})
        figures.write_figures(result, folder)
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


# --- runs ---


@pytest.mark.slow
def test_runs_csv_has_every_run_with_its_numbers(paper: Path, result: Result) -> None:
    found = rows(paper / "runs.csv")
    assert [(row["arm"], int(row["seed"])) for row in found] == [(arm, seed) for arm in ARMS for seed in SEEDS]
    for row, record in zip(found, result.records, strict=True):
        assert row["axis:arm"] == record.arm
        assert row["status"] == record.status
        assert float(row["learning_rate"]) == synthetic.BEST_RATE
        for metric in ("val/loss", "val/bits_per_byte", "train/loss", "tokens", "perf/tokens_per_second"):
            assert row[metric] == (str(record.summary[metric]) if record.done else "")
        for fact in ("params", "flops_per_token", "kv_cache/bytes", "data_hash", "tokenizer_hash", "device"):
            assert row[fact] == str(record.environment.to_json()[fact])
        assert (row["torch"], row["commit"]) == ("2.13.0+cpu", "799d2f66f95e")


def test_runs_csv_has_every_learning_rate_and_says_which_are_judged(tmp_path: Path) -> None:
    synthetic.write_study(tmp_path, {"a": 0.0, "b": -0.1}, (1, 2), rates=(1e-3, 2e-3))
    export.write_runs(analysed(tmp_path), tmp_path / "runs.csv")
    found = rows(tmp_path / "runs.csv")
    assert [float(row["learning_rate"]) for row in found] == [1e-3, 2e-3] * 4
    assert [row["judged"] for row in found] == ["False", "True"] * 4


@pytest.mark.slow
def test_curves_csv_has_what_every_run_logged(paper: Path, result: Result) -> None:
    found = rows(paper / "curves.csv")
    for record in result.records:
        for metric in ("train/loss", "val/loss", "val/bits_per_byte", "optim/lr"):
            logged = [(row["tokens"], row[metric]) for row in record.metrics if metric in row]
            wanted = {"arm": record.arm, "seed": str(record.seed), "metric": metric}
            of_run = [row for row in found if wanted.items() <= row.items()]
            assert [(float(row["tokens"]), float(row["value"])) for row in of_run] == logged


# --- tables ---


def test_tables_have_the_cells_of_the_report(paper: Path, result: Result) -> None:
    found = tables(result)
    assert {file.stem for file in (paper / "tables").iterdir()} == set(found)
    for slug, table in found.items():
        with (paper / "tables" / f"{slug}.csv").open(newline="", encoding="utf-8") as file:
            assert list(csv.reader(file)) == [table.head, *table.rows]


def test_tables_are_sound_latex(paper: Path, result: Result) -> None:
    files = [*(paper / "tables").glob("*.tex")]
    assert len(files) > 5
    for file in files:
        text = file.read_text(encoding="utf-8")
        check_latex(text)
        assert text.isascii(), "pdfTeX does not know the minus sign, for one"
    arms = (paper / "tables" / "arms.tex").read_text(encoding="utf-8")
    assert r"a\_b \& c\% \$x\$ &" in arms


def test_a_table_of_scaling_laws_is_sound_latex() -> None:
    text = latex_table(tables(replace(results.ladder(), scaling=results.scaling()))["laws"], "laws")
    check_latex(text)
    assert r"$\alpha$" in text
    assert text.isascii()


def test_special_characters_are_escaped_in_latex() -> None:
    table = Table("a caption_", ["Arm", "Value"], [[f"{one}x{one}--", f"{one}\n{one}"] for one in string.punctuation])
    check_latex(latex_table(table, "label"))
    assert all(latex(one) != one for one in r"\{}$&#^_%~<>|")
    assert latex("\\a{b}") == r"\textbackslash{}a\{b\}"


def test_a_cell_is_not_read_as_an_argument_of_the_line_before() -> None:
    text = latex_table(Table("", ["Arm", "Value"], [["*", "[1]\n[2]"], ["[x]", "1"]]), "label")
    assert not re.search(r"\\\\\s*[\[*]", text)


def test_special_characters_are_escaped_in_markdown() -> None:
    row = markdown_table(Table("", ["Arm", "Loss"], [["a|b*c_d<e>`f`", "1\np = 0.1"]])).splitlines()[2]
    assert row == r"| a\|b\*c\_d\<e\>\`f\` | 1<br>p = 0.1 |"


def check_latex(text: str) -> None:
    """Assert that environments and braces nest, special characters are escaped, and rows have equal length."""
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    bare = re.sub(r"\\[\\{}$&#_%]", "", "\n".join(lines))  # without escaped characters and ends of rows
    assert not set(bare) & set('#%_^"\u2212\u00d7') - set("_" if r"\label" in bare or r"\cite" in bare else "")
    assert bare.count("$") % 2 == 0
    opened: list[str] = []
    for found in re.finditer(r"\\(begin|end)\{(\w+\*?)\}|([{}])", bare):
        kind, name, brace = found.groups()
        if kind == "begin" or brace == "{":
            opened.append(name or "{")
        else:
            assert opened.pop() == (name or "{")
    assert not opened
    body = [line for line in lines if re.search(r"(?<!\\)&", line)]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in body}) <= 1
    assert all(line.endswith(r"\\") for line in body)


# --- figures ---


@pytest.mark.slow
def test_figures_are_pictures_of_the_width_of_a_column(pictures: Path) -> None:
    files = list(pictures.glob("*.png"))
    assert {file.stem for file in files} == {"steps", "validation_loss", "kv_cache_front", "context_lengths"}
    captions = (pictures / "captions.md").read_text(encoding="utf-8")
    for file in files:
        assert f"**{file.stem}** " in captions
        width, _ = struct.unpack(">II", file.read_bytes()[16:24])
        assert width == pytest.approx(3.35 * 300, abs=1)


@pytest.mark.slow
def test_figures_are_sound_svg_with_the_names_of_the_arms(pictures: Path) -> None:
    drawn = {file.stem: " ".join(ElementTree.parse(file).getroot().itertext()) for file in pictures.glob("*.svg")}
    assert all(name in drawn["validation_loss"] for name in ARMS), "an arm that diverged has a curve, as far as it came"
    finished = [name for name in ARMS if name != UNFINISHED]
    assert all(name in drawn["kv_cache_front"] for name in finished)
    assert UNFINISHED not in drawn["kv_cache_front"]
    assert "rmsnorm" in drawn["steps"]


def drawn(result: Result) -> dict[str, str]:
    """The figures as SVG."""
    specs = {name: figures.figure(draw(result)) for name, draw in figures.FIGURES.items()}
    return {name: svg(spec) for name, spec in specs.items() if spec}


def texts(figure: str) -> list[str]:
    """The texts in an SVG."""
    return [text for text in ElementTree.fromstring(figure).itertext() if text.strip()]


@pytest.mark.parametrize("draw", [results.unknown, results.unfinished])
def test_there_is_no_figure_without_data(draw: Callable[[], Result]) -> None:
    assert drawn(draw()) == {}


@pytest.mark.slow
@pytest.mark.parametrize("n_arms", [2, 40])
def test_all_text_stays_inside_its_figure(n_arms: int) -> None:
    names = [f"attention=gqa,model.n_kv_heads={i},position=rope_yarn,embedding=a_long_one_{i}" for i in range(n_arms)]
    found = drawn(results.result({name: 3.9 - 0.01 * i for i, name in enumerate(names)}, points=20))
    assert set(found) >= {"steps", "validation_loss", "speed_front"}
    for slug, figure in found.items():
        size = SIZE.search(figure)
        assert float(size[1]) == pytest.approx(figures.PIXELS, abs=2), slug
        pixels = np.asarray(Image.open(io.BytesIO(vl_convert.svg_to_png(figure))).convert("L"))
        edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
        assert all((edge == 255).all() for edge in edges), f"{slug}: something is cut off"


# --- the folder ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures, which take seconds."""
    monkeypatch.setattr(figures, "FIGURES", {})


@pytest.mark.usefixtures("quick")
def test_the_command_exports_a_study_and_says_what_it_wrote(in_process: Callable[..., Ran], folder: Path) -> None:
    ran = in_process(compare_command, "llama-lab-compare", str(folder), "--export", "paper")
    assert (ran.code, ran.err) == (0, "")
    listed = (ran.cwd / "paper" / CONTENTS).read_text().splitlines()
    assert {"runs.csv", "curves.csv", "summary.csv"} <= set(listed)
    assert all((ran.cwd / "paper" / name).is_file() for name in listed)
    assert f"exported {len(listed)} files to paper, which {CONTENTS} lists" in ran.out


@pytest.mark.parametrize(
    "arguments",
    [["STUDY", "--overwrite"], ["STUDY", "--export", "OTHERS", "--overwrite"], ["STUDY", "--export", "FILE"]],
)
def test_an_export_that_would_replace_something_else_is_refused_in_one_line(
    in_process: Callable[..., Ran], folder: Path, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "others").mkdir()
    mine = tmp_path / "others" / "mine.txt"
    mine.write_text("mine")
    paths = {"STUDY": str(folder), "OTHERS": str(tmp_path / "others"), "FILE": str(mine)}
    ran = in_process(compare_command, "llama-lab-compare", *(paths.get(one, one) for one in arguments))
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: --")
    assert mine.read_text() == "mine"


@pytest.mark.usefixtures("quick")
def test_overwrite_replaces_an_export_and_nothing_else(result: Result, tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    write_export(result, folder)
    (folder / "runs.csv").write_text("changed")
    with pytest.raises(ConfigError, match="--overwrite"):
        write_export(result, folder)
    write_export(result, folder, overwrite=True)
    assert (folder / "runs.csv").read_text() != "changed"
    (folder / "tables" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=re.escape("tables/mine.txt")):
        write_export(result, folder, overwrite=True)
    assert (folder / "tables" / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]


@pytest.mark.usefixtures("quick")
def test_an_export_goes_where_a_link_leads(result: Result, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    write_export(result, tmp_path / "link")
    write_export(result, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "runs.csv").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


@pytest.mark.usefixtures("quick")
def test_a_failed_export_leaves_what_was_there(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_export(result, tmp_path / "paper")
    before = (tmp_path / "paper" / "runs.csv").read_text()

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(export, "write_figures", fail)
    for folder in ("paper", "new"):
        with pytest.raises(RuntimeError, match="broken"):
            write_export(result, tmp_path / folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]
    assert (tmp_path / "paper" / "runs.csv").read_text() == before


@pytest.mark.usefixtures("quick")
def test_an_empty_folder_is_filled(result: Result, tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    (tmp_path / ".paper.tmp").mkdir()  # of an export that was killed
    write_export(result, tmp_path / "paper")
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]
    assert (tmp_path / "paper" / "runs.csv").exists()


def test_an_average_of_the_weights_has_a_column_where_runs_keep_one(tmp_path: Path) -> None:
    study = synthetic.write_study(tmp_path, {"base": 0.0, "arm": -0.1})
    for seed, loss in ((1, 3.5), (2, 3.6), (3, 3.7)):
        for arm in ("base", "arm"):
            synthetic.plant_config(synthetic.run_folder(tmp_path, study, arm, seed), train__ema=0.99)
        synthetic.plant_facts(synthetic.run_folder(tmp_path, study, "arm", seed), **{"val/ema_loss": loss})
    result = analyse(study, tmp_path)
    column = tables(result)["losses"].cells("Of averaged weights")
    assert column[0].endswith(UNKNOWN)
    assert column[1].startswith("arm 3.60 [3.35")
