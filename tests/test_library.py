"""`import llama_lab`: the library, and the notebook that shows it."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path

import nbformat
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

import llama_lab
from llama_lab.cli import compare_command
from llama_lab.model import measure_cost
from llama_lab.report.write import PAGE
from tests.composing import decoder
from tests.conftest import Ran
from tests.notebook import LARGEST, NOTEBOOK, executed
from tests.refusals import refusing
from tests.study.planning import conducted
from tests.training.tiny import identical


@pytest.fixture(scope="module")
def swept(tiny: list[str], environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two norms, two seeds."""
    sweep = ("--multirun", *tiny, "train.tokens=2560", "norm=layernorm,rmsnorm", "seed=1,2")
    ran = conducted(tmp_path_factory.mktemp("swept"), environment, *sweep)
    assert ran.code == 0, ran.err
    return ran.cwd / "runs"


@pytest.mark.process
def test_importing_it_imports_neither_pytorch_nor_pandas() -> None:
    code = "import llama_lab, sys; print([m for m in ('torch', 'pandas', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=NOTEBOOK.parents[1], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_every_name_is_there_and_documented() -> None:
    for name in llama_lab.__all__:
        assert getattr(llama_lab, name).__doc__
    assert {*llama_lab.__all__} <= {*dir(llama_lab)}
    with pytest.raises(AttributeError, match="has no attribute 'lead'"):
        llama_lab.lead  # noqa: B018


def test_a_config_and_its_model_are_those_of_the_command() -> None:
    cfg = llama_lab.load_config(["arch=gpt2", "size=pico", "tokenizer=byte", "seed=3"])
    assert (cfg.model.dim, cfg.model.seed, "hydra" in cfg) == (32, 3, False)
    expected = decoder("arch=gpt2", "size=pico", "tokenizer=byte", "seed=3", vocab_size=257)
    assert identical(llama_lab.build_model(cfg).state_dict(), expected.state_dict())
    model = llama_lab.build_model(cfg, vocab_size=50)
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 50)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["norm=rmsnrm"], "norm=rmsnrm"),
        (["model.n_heads=5"], "model.n_heads=5"),
        (["norm=[a"], "norm=[a"),
        (["seed=1", "seed=2"], "seed=2"),
        (["bias=false"], "bias=false"),
        (["norm=rmsnorm,layernorm"], "norm=rmsnorm,layernorm"),
        ("arch=llama", "overrides='arch=llama'"),
    ],
)
def test_what_the_command_refuses_is_an_error_in_one_line(overrides: Sequence[str], fault: str) -> None:
    with refusing(fault):
        llama_lab.load_config(overrides)
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.slow
def test_a_run_to_resume_brings_its_settings_as_in_the_command(swept: Path) -> None:
    folder = llama_lab.read_runs(f"{swept}/*/norm=layernorm*/seed=2").path[0]
    cfg = llama_lab.load_config([f"resume={folder}", "train.tokens=1e4"])
    assert (cfg.seed, cfg.model.norm._target_, cfg.train.tokens) == (2, "llama_lab.model.norm.LayerNorm", 1e4)


def test_options_of_the_user_s_own_are_found(tmp_path: Path) -> None:
    (tmp_path / "my conf" / "norm").mkdir(parents=True)
    option = "# @package model.norm\n_target_: llama_lab.model.norm.RMSNorm\n_partial_: true\neps: 0.5\n"
    (tmp_path / "my conf" / "norm" / "mine.yaml").write_text(option)
    assert llama_lab.load_config(["norm=mine"], config_dir=tmp_path / "my conf").model.norm.eps == 0.5
    with refusing("config_dir=nowhere"):
        llama_lab.load_config(["norm=mine"], config_dir="nowhere")


@pytest.mark.slow
def test_an_edited_option_is_read_again_as_a_part_of_a_mixture(tmp_path: Path) -> None:
    option = tmp_path / "data" / "mine.yaml"
    option.parent.mkdir()
    found = []
    for characters in (500, 700):
        option.write_text(f"# @package data\ndefaults: [text, _self_]\nfiles: [a.txt]\ndocument_chars: {characters}\n")
        mix = ["data=mix", "data.mix={mine: 0.5, stdlib: 0.5}"]
        cfg = llama_lab.load_config(mix, config_dir=tmp_path)
        found.append(cfg.data.sources.mine.document_chars)
    assert found == [500, 700]


@pytest.mark.slow
def test_costs_of_a_config_are_those_of_its_model_and_take_no_memory() -> None:
    cfg = llama_lab.load_config(["size=pico", "tokenizer=byte"])
    assert llama_lab.cost(cfg) == llama_lab.cost(llama_lab.build_model(cfg)) == measure_cost(decoder(vocab_size=257))
    assert llama_lab.cost(llama_lab.load_config(["arch=llama3", "size=llama3_405b"])).params > 4e11


@pytest.mark.slow
def test_runs_are_a_table(swept: Path) -> None:
    runs = llama_lab.read_runs(swept)
    found = {(row.run, row.seed, row.status) for row in runs.itertuples()}
    assert found == {(f"norm={norm}", seed, "done") for norm in ("layernorm", "rmsnorm") for seed in (1, 2)}
    assert {*runs["norm"]} == {"layernorm", "rmsnorm"}
    assert {*runs["train.tokens"]} == {2560}
    assert runs["val/loss"].between(1, 7).all()
    assert llama_lab.read_runs(f"{swept}/*/*/seed=1").seed.tolist() == [1, 1]
    with refusing("nowhere"):
        llama_lab.read_runs("nowhere")


@pytest.mark.slow
def test_text_is_that_of_eval_py(swept: Path, evaluating: Callable[..., Ran]) -> None:
    folder = llama_lab.read_runs(swept).path[0]
    text = llama_lab.generate(llama_lab.load(folder), "def f", max_new_tokens=12, top_k=5, seed=4)
    ran = evaluating(f"run={folder}", "prompt=def f", "max_new_tokens=12", "top_k=5", "seed=4")
    assert ran.out == f"{text}\n"
    assert text.startswith("def f")
    with refusing("temperature=-1"):
        llama_lab.generate(llama_lab.load(folder), temperature=-1)


@pytest.mark.slow
def test_a_comparison_is_that_of_the_command(swept: Path, in_process: Callable[..., Ran], tmp_path: Path) -> None:
    comparison = llama_lab.compare(swept, group_by=["norm"], baseline="norm=rmsnorm")
    command = ("--group-by=norm", "--baseline=norm=rmsnorm")
    assert in_process(compare_command, "llama-lab-compare", str(swept), *command).code == 0
    comparison.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "summary.csv").read_bytes() == (tmp_path / "comparison" / "summary.csv").read_bytes()
    assert {*comparison.table.index} == {"norm=layernorm", "norm=rmsnorm"}
    assert comparison.result.verdict in repr(comparison)
    page = (tmp_path / "saved" / PAGE).read_text(encoding="utf-8")
    shown = unescape(comparison._repr_html_()).replace("\r\n", "\n")
    assert page[:500] in shown
    for fault, wrong in {
        "--baseline layernorm": {"baseline": "layernorm"},
        "group_by='norm'": {"group_by": "norm"},
    }.items():
        with refusing(fault):
            llama_lab.compare(swept, **wrong)


@pytest.mark.process
@pytest.mark.slow
def test_the_notebook_runs_and_ends_with_the_report(tmp_path: Path, environment: dict[str, str]) -> None:
    notebook = executed(nbformat.read(NOTEBOOK, as_version=4), tmp_path, environment)
    (shown,) = notebook.cells[-1].outputs
    assert shown.data["text/html"].startswith("<iframe srcdoc=")
    assert "norm=layernorm" in shown.data["text/plain"]


def test_the_notebook_is_committed_with_its_outputs_which_are_small() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], "run `python -m tests.notebook`"
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert NOTEBOOK.stat().st_size < LARGEST
