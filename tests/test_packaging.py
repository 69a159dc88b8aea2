"""The wheel: it carries the configs, and its command works far from any checkout."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import Ran, last_of_each
from tests.refusals import check_refused

pytestmark = pytest.mark.process

CHECKOUT = Path(__file__).parents[1]


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without isolation where the build backend is at hand."""
    folder = tmp_path_factory.mktemp("wheel")
    backend_is_here = ["--no-build-isolation"] if find_spec("hatchling") else []
    pip("wheel", "--quiet", "--no-deps", *backend_is_here, "--wheel-dir", str(folder), str(CHECKOUT))
    (file,) = folder.glob("llama_lab-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--quiet", "--no-deps", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path, environment: dict[str, str]) -> Callable[..., Ran]:
    """Run Python or an installed command in `tmp_path`, where a user's own packages can be imported."""

    def started(command: str, *arguments: str) -> Ran:
        script = [] if command == "python" else [str(installed / "bin" / command)]
        done = subprocess.run(
            [sys.executable, *script, *arguments],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": os.pathsep.join([str(installed), str(tmp_path)])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return Ran(done.returncode, done.stdout, done.stderr, tmp_path)

    return started


def test_the_wheel_carries_every_config_and_every_module_and_nothing_else(wheel: Path) -> None:
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    configs = {f"llama_lab/{path.relative_to(CHECKOUT)}" for path in (CHECKOUT / "conf").rglob("*.yaml")}
    sources = [*CHECKOUT.glob("llama_lab/**/*"), *CHECKOUT.glob("hydra_plugins/**/*")]
    modules = {str(path.relative_to(CHECKOUT)) for path in sources if path.suffix in (".py", ".j2")}
    assert len(configs) > 100
    assert carried - {"llama_lab/py.typed"} == configs | modules


def test_the_installed_command_needs_no_checkout(run: Callable[..., Ran], tmp_path: Path) -> None:
    ran = run("llama-lab-train", "--cfg", "job", "arch=gpt2")
    assert (ran.code, ran.err) == (0, "")
    assert "llama_lab.model.norm.LayerNorm" in ran.out
    assert list(tmp_path.iterdir()) == []


NORM = """
from torch import nn


class Mine(nn.Module):
    def __init__(self, dim, floor):
        super().__init__()
        self.floor = floor

    def forward(self, x):
        return x / x.abs().amax(-1, keepdim=True).clamp(min=self.floor)
"""

OPTION = """# @package model.norm
# Divides by the largest value
_target_: mylab.norm.Mine
_partial_: true
floor: 1e-3
"""


PROJECT = """
import shutil, sys
from omegaconf import OmegaConf
import llama_lab
from llama_lab import cli
from llama_lab.config.components import CONF_DIR
from llama_lab.config.trust import Trust

def train(*overrides):
    last = {one.partition("=")[0]: one for one in (*tiny, *overrides)}
    run(cli.train_command, "--config-dir", "my_conf", *last.values())

def run(command, *arguments):
    sys.argv = ["llama-lab", *arguments]
    try:
        command()
    except SystemExit as stop:
        assert not stop.code, arguments

tiny = sys.argv[1:]
study = ["study=add_one", "study.base=llama2", "study.target=ours", "study.seeds=[1]", "study.measure_speed=false"]
train(*study, "name=ours", "hydra/launcher=basic", "train.tokens=2560")
shutil.copy("runs/ours/llama2/seed=1/tokenizer.json", "theirs")
run(cli.convert_command, "import", "theirs", "imported")
theirs = OmegaConf.to_container(OmegaConf.load("imported/overrides.yaml"))
warm = ["init_from=imported", "tokenizer=hf", "tokenizer.path=imported", "norm=mine", "runs_dir=warm", "arm=a"]
train(*theirs, *warm, "model.norm.floor=0.01", "model.max_seq_len=32", "train.tokens=2560", "name=warm")
run(cli.eval_command, "run=warm/warm/a/seed=1", "eval.parts=[loss]", "trust=[mylab]")

cfg = llama_lab.load_config(["arch=ours", "size=pico", "tokenizer=byte"], config_dir="my_conf")
runs = llama_lab.read_runs("runs/*").sort_values("norm")
loaded = llama_lab.load(runs.path.iloc[0], Trust(("mylab",)))
assert llama_lab.cost(loaded.model).kv_bytes == llama_lab.cost(cfg).kv_bytes
assert llama_lab.generate(loaded, "def", max_new_tokens=3).startswith("def")
print(CONF_DIR, *runs.run, *runs.norm, llama_lab.load("imported").model.dim)
print(llama_lab.compare("runs/ours", baseline="llama2", trust=["mylab"]).save("saved"))
"""


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """A package with a norm, an option and a recipe of its own, and the command that knows them."""
    for folder in ("mylab", "my_conf/norm", "my_conf/arch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mylab" / "norm.py").write_text(NORM)
    (tmp_path / "my_conf" / "norm" / "mine.yaml").write_text(OPTION)
    recipe = (CHECKOUT / "conf" / "arch" / "llama2.yaml").read_text()
    (tmp_path / "my_conf" / "arch" / "ours.yaml").write_text(re.sub("norm: rmsnorm.*", "norm: mine", recipe))
    return ["llama-lab-train", "--config-dir", "my_conf"]


@pytest.mark.slow
@pytest.mark.usefixtures("mine")
def test_a_second_project_imports_weights_trains_and_studies_its_component_and_uses_the_library(
    run: Callable[..., Ran], installed: Path, tmp_path: Path, tiny: list[str]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).save_pretrained(tmp_path / "theirs")
    ran = run("python", "-c", PROJECT, *last_of_each(tiny))
    assert (ran.code, ran.err) == (0, "")
    assert "after 10 steps" in ran.out
    conf = installed / "llama_lab" / "conf"
    assert ran.out.splitlines()[-2:] == [f"{conf} llama2+mine llama2 mine rmsnorm 16", "saved/report.html"]
    assert "cannot be checked" not in (tmp_path / "runs" / "ours" / "report.html").read_text()
    start = tmp_path / "warm" / "warm" / "a" / "seed=1"
    assert "embedding.tokens.weight" in json.loads((start / "warm_start.json").read_text())["taken"]
    norm = OmegaConf.load(start / "resolved.yaml").model.norm
    assert norm == {"_target_": "mylab.norm.Mine", "_partial_": True, "floor": 0.01}


def test_the_user_s_option_is_known_to_the_help_and_to_the_messages(mine: list[str], run: Callable[..., Ran]) -> None:
    assert ", mine, " in run(*mine, "--help").out
    check_refused(run(*mine, "norm=mime"), "norm=mime: no such option (did you mean mine?)")
