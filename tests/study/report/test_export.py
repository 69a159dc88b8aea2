"""Exports for a paper: their files are complete and well-formed, and replace nothing else."""

import csv
import re
import string
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from llama_lab.cli import compare_command
from llama_lab.config.keys import groups, options
from llama_lab.errors import ConfigError
from llama_lab.formatting import UNKNOWN
from llama_lab.study.report import export, figures, references
from llama_lab.study.report.analysis import analyse
from llama_lab.study.report.export import CONTENTS, write_export
from llama_lab.study.report.markup import latex, latex_table, markdown_table
from llama_lab.study.report.methods import cited, methods, methods_latex, methods_markdown
from llama_lab.study.report.result import Result
from llama_lab.study.report.tables import Table, tables
from llama_lab.study.study import Study
from tests.conftest import Ran
from tests.study import results, synthetic

HOSTILE = "a_b & c% $x$"
UNFINISHED = "swiglu"
ARMS = {HOSTILE: 0.0, "rmsnorm": -0.05, "rope": -0.2, UNFINISHED: -0.3}
SEEDS = (1, 2, 3)
CITED = ("norm", "block", "position", "attention", "ffn", "embedding", "init", "arch", "size")  # of the model
CITED += ("tokenizer", "optim", "schedule")


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
    folder = tmp_path_factory.mktemp("export") / "paper"
    write_export(result, folder)
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def prose(result: Result) -> str:
    return methods_markdown(methods(result))


# --- runs ---


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
    study = synthetic.write_study(tmp_path, {"a": 0.0, "b": -0.1}, (1, 2), rates=(1e-3, 2e-3))
    synthetic.remove_run(synthetic.run_folder(tmp_path, study, "b", 2, 1e-3))
    export.write_runs(analysed(tmp_path), tmp_path / "runs.csv")
    found = rows(tmp_path / "runs.csv")
    assert [float(row["learning_rate"]) for row in found] == [1e-3, 2e-3] * 4
    assert [row["judged"] for row in found] == ["False", "True"] * 4
    (missing,) = [row for row in found if row["status"] == "missing"]
    assert (missing["arm"], missing["seed"], missing["learning_rate"], missing["device"]) == ("b", "2", "0.001", "")


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
    files = [*(paper / "tables").glob("*.tex"), paper / "methods.tex"]
    assert len(files) > 5
    for file in files:
        text = file.read_text(encoding="utf-8")
        check_latex(text)
        assert text.isascii(), "pdfTeX does not know the minus sign, for one"
    arms = (paper / "tables" / "arms.tex").read_text(encoding="utf-8")
    assert r"a\_b \& c\% \$x\$ &" in arms


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


# --- methods and references ---


def test_methods_say_what_the_records_say(result: Result) -> None:
    text = prose(result)
    for sentence in (
        "a ladder: each arm is the one before it with one more change",
        "It has 4 arms",
        "Seeds are 1, 2, 3; 9 of 12 runs finished (3 diverged).",
        "Seeds are paired",
        "Their norm is rmsnorm [@zhang2019rmsnorm].",
        "4 layers, 128 dimensions, 4 attention heads and a context of 256 tokens",
        "with the hash 9f4fcfe12c2f",
        "Its vocabulary has 4,096 tokens, which have 3.44 bytes on average.",
        "1,600,000 tokens, in batches of 16 sequences of 256 tokens, which are 390 steps",
        "AdamW (beta1 0.9, weight\\_decay 0.1), with a cosine schedule (warmup 0.05, final 0.1)",
        "The peak learning rate is 0.002; it was not tuned.",
        "max-t over the 2 steps [@hothorn2008simultaneous; @hasler2008heteroscedasticity]",
        "device cpu, precision 32-true",
        "torch 2.13.0+cpu",
    ):
        assert sentence in text
    for warning in result.warnings:
        assert latex(warning) in methods_latex(methods(result))


def test_methods_say_where_runs_differ(tmp_path: Path) -> None:
    study = synthetic.write_study(tmp_path, {"a": 0.0, "b": -0.1}, SEEDS)
    one = synthetic.run_folder(tmp_path, study, "b", 2)
    synthetic.plant_facts(one, device="NVIDIA H100")
    synthetic.plant_config(one, train__batch_size=32, data__seed=7)
    text = prose(analysed(tmp_path))
    assert "device (NVIDIA H100 in b/seed=2; cpu in a, b/seed=1, b/seed=3)" in text
    assert "batches of (32 in b/seed=2; 16 in a, b/seed=1, b/seed=3) sequences" in text
    assert "but data.seed or model.seed differs between runs of one seed" in text
    assert "Seeds are paired" not in text


PUBLISHED = {"data__path": "owner/name", "data__val_split": "validation", "data__val_fraction": None}
MIXED = {"data__mix__stdlib": 0.7, "data__mix__mine": 0.3, "data__val_fraction": None}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (PUBLISHED, ("the dataset owner/name at commit 0123456789ab, with", "Validation is on its split validation; ")),
        (MIXED, ("a mixture of stdlib (70.0%) and mine (30.0%), with", "held-out text of every part, in the same")),
    ],
)
def test_methods_describe_published_datasets_and_mixtures(
    settings: dict[str, object], said: tuple[str, ...], tmp_path: Path
) -> None:
    study = synthetic.write_study(tmp_path, {"a": 0.0, "b": -0.1}, (1,))
    for arm in study.arms:
        run = synthetic.run_folder(tmp_path, study, arm.name, 1)
        synthetic.plant_config(run, **settings)
        synthetic.plant_facts(run, revisions={"owner/name": "0123456789abcdef"})
    text = prose(analysed(tmp_path))
    assert all(sentence in text for sentence in said), text


def test_methods_describe_tuned_learning_rates(tmp_path: Path) -> None:
    synthetic.write_study(tmp_path, {"a": 0.0, "b": -0.1}, SEEDS, rates=(1e-3, 2e-3, 4e-3), best_rates={"b": 4e-3})
    text = prose(analysed(tmp_path))
    assert "each of the learning rates 0.001, 0.002, 0.004." in text
    assert "0.002 for a; 0.004 for b" in text
    assert "not tuned" not in text


def test_methods_describe_tuning_seeds(tmp_path: Path) -> None:
    best = {"b": 4e-3}
    synthetic.write_study(tmp_path, {"a": 0, "b": 0}, SEEDS, rates=(1e-3, 2e-3, 4e-3), best_rates=best, tuned=True)
    text = prose(analysed(tmp_path))
    assert "Seeds are 1, 2, 3; 24 of 24 runs finished." in text
    assert "on a tuning seed of its own" in text
    assert "The rates 0.001, 0.002, 0.004 were tried; the chosen ones are 0.002 for a; 0.004 for b." in text


def test_methods_of_runs_that_never_began_claim_nothing_of_them(tmp_path: Path) -> None:
    study = synthetic.write_study(tmp_path, {"a": 0.0, "b": -0.1}, (1,))
    for arm in study.arms:
        synthetic.remove_run(synthetic.run_folder(tmp_path, study, arm.name, 1))
    found = methods(analysed(tmp_path))
    assert {paragraph.title for paragraph in found} == {"Design", "Not controlled"}


def test_the_bibliography_has_what_the_methods_cite_and_nothing_else(paper: Path, result: Result) -> None:
    keys = re.findall(r"^@\w+\{(\S+),$", (paper / "references.bib").read_text(), flags=re.MULTILINE)
    text = (paper / "methods.tex").read_text(encoding="utf-8")
    in_text = {key for found in re.findall(r"\\cite\{([^}]+)\}", text) for key in found.split(",")}
    assert sorted(in_text) == keys == sorted(cited(methods(result)))


@pytest.mark.parametrize("group", CITED)
def test_every_option_has_its_sources_or_is_listed_as_having_none(group: str) -> None:
    assert set(references.SOURCES[group]) == set(options(group))


def test_no_group_of_options_is_forgotten() -> None:
    assert set(references.SOURCES) == set(CITED)
    assert set(groups()) - set(CITED) == {"data", "pattern", "trainer", "logger", "study"}


def test_every_entry_of_the_bibliography_is_complete_and_cited() -> None:
    lists = [*(keys.split() for found in references.SOURCES.values() for keys in found.values())]
    lists += [*references.DESIGNS.values(), references.MAX_T, references.MODERATION, references.DEGREES_OF_FREEDOM]
    lists += [references.EQUIVALENCE, references.SENSITIVITY, references.Z_LOSS, references.RANKS]
    found = references.entries()
    assert {key for keys in lists for key in keys} == set(found)
    assert len(found) == references.FILE.read_text().count("\n@")
    for entry in found.values():
        assert entry.isascii()
        assert entry.count("{") == entry.count("}")
        assert {"author", "title", "year"} <= set(re.findall(r"^  (\w+) = \{", entry, flags=re.MULTILINE))


# --- figures ---


def test_figures_are_pictures_of_the_width_of_a_column(paper: Path) -> None:
    pictures = list((paper / "figures").glob("*.png"))
    assert {file.stem for file in pictures} >= {"steps", "validation_loss", "kv_cache_front", "context_lengths"}
    captions = (paper / "figures" / "captions.md").read_text(encoding="utf-8")
    for file in pictures:
        assert f"**{file.stem}** " in captions
        width, _ = struct.unpack(">II", file.read_bytes()[16:24])
        assert width == round(3.35 * 300)


def test_figures_are_sound_svg_with_the_names_of_the_arms(paper: Path) -> None:
    drawn = {file.stem: " ".join(ElementTree.parse(file).getroot().itertext()) for file in paper.rglob("*.svg")}
    assert all(name in drawn["validation_loss"] for name in ARMS), "an arm that diverged has a curve, as far as it came"
    finished = [name for name in ARMS if name != UNFINISHED]
    assert all(name in drawn["kv_cache_front"] for name in finished)
    assert UNFINISHED not in drawn["kv_cache_front"]
    assert "rmsnorm" in drawn["steps"]


def drawn(result: Result) -> dict[str, Figure]:
    """The figures, laid out."""
    with matplotlib.rc_context(figures.RC):
        found = {draw.__name__: figure for draw in figures.FIGURES if (figure := draw(result))}
        for figure in found.values():
            figure.draw_without_rendering()
    return found


def test_there_is_a_figure_for_everything_that_a_result_has() -> None:
    assert set(drawn(results.everything())) == {draw.__name__ for draw in figures.FIGURES}
    assert set(drawn(results.ladder())) == {
        "steps",
        "differences",
        "difference_curves",
        "validation_loss",
        "training_loss",
        "kv_cache_front",
        "speed_front",
    }


@pytest.mark.parametrize("draw", [results.unknown, results.unfinished])
def test_there_is_no_figure_without_data(draw: Callable[[], Result]) -> None:
    assert drawn(draw()) == {}


@pytest.mark.parametrize("n_arms", [2, 60])
def test_all_text_stays_inside_its_figure(n_arms: int) -> None:
    names = [f"attention=gqa,model.n_kv_heads={i},position=rope_yarn,embedding=a_long_one_{i}" for i in range(n_arms)]
    found = drawn(results.result({name: 3.9 - 0.01 * i for i, name in enumerate(names)}, points=20))
    assert set(found) >= {"steps", "validation_loss", "speed_front"}
    for slug, figure in found.items():
        box = figure.get_tightbbox()
        assert box.x0 > -0.02, slug
        assert box.y0 > -0.02, slug
        assert box.x1 < figures.WIDTH + 0.02, slug
        assert box.y1 < figure.get_figheight() + 0.02, slug


def test_arms_look_as_in_the_report() -> None:
    ladder = results.ladder()
    (panel,) = drawn(ladder)["validation_loss"].axes
    colours = [line.get_color() for line in panel.get_lines()]
    assert colours == [look.colour for look in figures.charts.style.styles(ladder).values()]


def test_an_arm_without_a_cache_is_at_the_left_edge_of_the_figure_of_caches() -> None:
    (panel,) = drawn(results.without_cache("ffn=swiglu"))["kv_cache_front"].axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0 B", "1 KiB", "2 KiB"]
    assert 512 in {bars.lines[0].get_xdata()[0] for bars in panel.containers}


def test_a_factorial_has_an_interaction_plot_of_the_means_of_its_cells() -> None:
    (panel,) = drawn(results.factorial())["interactions"].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in panel.get_lines()}
    assert lines == {"relu": [3.9, 3.884], "swiglu": [3.862, 3.87]}
    assert [label.get_text() for label in panel.get_xticklabels()] == ["layernorm", "rmsnorm"]


def test_an_interval_that_would_squeeze_all_others_ends_in_an_arrow() -> None:
    ladder = results.ladder()
    wide = results.comparison("attention=gqa", "ffn=swiglu", 9.0)
    arms = tuple(replace(arm, to_previous=wide) if arm.name == wide.arm else arm for arm in ladder.arms)
    (panel,) = drawn(replace(ladder, arms=arms))["steps"].axes
    least, most = panel.get_xlim()
    assert most - least < 1
    assert [line.get_marker() for line in panel.get_lines()].count(">") == 1


def test_equal_results_give_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "FIGURES", {figures.steps: "A caption."})
    texts = []
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        figures.write_figures(results.ladder(), tmp_path / name)
        texts.append([file.read_bytes() for file in sorted((tmp_path / name).iterdir())])
    assert texts[0] == texts[1]


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
    assert {"runs.csv", "curves.csv", "summary.csv", "methods.md", "methods.tex", "references.bib"} <= set(listed)
    assert all((ran.cwd / "paper" / name).is_file() for name in listed)
    assert "exported to paper:" in ran.out
    assert "methods.md|.tex" in ran.out
    assert "tables/ (.csv, .md, .tex): arms, " in ran.out
    again = in_process(compare_command, "llama-lab-compare", str(folder), "--export", "paper", "--overwrite")
    assert (again.code, again.err) == (0, "")


def test_a_folder_that_is_not_empty_is_refused_before_anything_is_read(
    in_process: Callable[..., Ran], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    ran = in_process(compare_command, "llama-lab-compare", "nowhere", "--export", str(tmp_path))
    assert ran.code == 2
    assert ran.err == f"error: --export {tmp_path}: is not empty; name another folder, or add --overwrite\n"


def test_overwrite_without_export_is_refused(in_process: Callable[..., Ran], folder: Path) -> None:
    ran = in_process(compare_command, "llama-lab-compare", str(folder), "--overwrite")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "name its folder with --export" in ran.err


@pytest.mark.usefixtures("quick")
def test_overwrite_replaces_an_export_and_nothing_else(result: Result, tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    write_export(result, folder)
    (folder / "runs.csv").write_text("changed")
    with pytest.raises(ConfigError, match="is not empty; name another folder, or add --overwrite"):
        write_export(result, folder)
    write_export(result, folder, overwrite=True)
    assert (folder / "runs.csv").read_text() != "changed"
    (folder / "tables" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=re.escape("holds tables/mine.txt, which no export wrote")):
        write_export(result, folder, overwrite=True)
    assert (folder / "tables" / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["paper"]


def test_overwrite_replaces_no_folder_that_holds_no_export(result: Result, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no export that --overwrite could replace; name another folder"):
        write_export(result, tmp_path, overwrite=True)


@pytest.mark.usefixtures("quick")
def test_an_export_goes_where_a_link_leads(result: Result, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    write_export(result, tmp_path / "link")
    write_export(result, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "runs.csv").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_a_file_in_the_place_of_the_folder_is_refused(result: Result, tmp_path: Path) -> None:
    (tmp_path / "paper").write_text("mine")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        write_export(result, tmp_path / "paper")


@pytest.mark.usefixtures("quick")
def test_an_export_that_fails_leaves_what_was_there(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_one_seed_is_exported(tmp_path: Path) -> None:
    synthetic.write_study(tmp_path / "study", {"a": 0.0, "b": -0.1}, (1,))
    found = analysed(tmp_path / "study")
    write_export(found, tmp_path / "paper")
    assert len(rows(tmp_path / "paper" / "runs.csv")) == 2
    assert "were not tested" in (tmp_path / "paper" / "methods.md").read_text(encoding="utf-8")
    assert (tmp_path / "paper" / "figures" / "differences.svg").exists()


def test_an_average_of_the_weights_has_a_column_where_runs_keep_one(tmp_path: Path) -> None:
    study = synthetic.write_study(tmp_path, {"base": 0.0, "arm": -0.1})
    assert "Of averaged weights" not in tables(analyse(study, tmp_path))["losses"].head
    for seed, loss in ((1, 3.5), (2, 3.6), (3, 3.7)):
        for arm in ("base", "arm"):
            synthetic.plant_config(synthetic.run_folder(tmp_path, study, arm, seed), train__ema=0.99)
        synthetic.plant_facts(synthetic.run_folder(tmp_path, study, "arm", seed), **{"val/ema_loss": loss})
    result = analyse(study, tmp_path)
    column = tables(result)["losses"].cells("Of averaged weights")
    assert column[0].endswith(UNKNOWN)
    assert column[1].startswith("arm 3.60 [3.35")
    assert "moving average of the weights with a decay of 0.99" in methods_markdown(methods(result))
