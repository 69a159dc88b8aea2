"""The wheel: it carries the configs, and its command works far from any checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import Ran, last_of_each

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


def run(installed: Path, command: str, *arguments: str, cwd: Path, environment: dict[str, str]) -> Ran:
    """Run an installed command, with the packages in `cwd` importable, as a user's own would be."""
    path = os.pathsep.join([str(installed), str(cwd)])
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / command), *arguments],
        cwd=cwd,
        env={**environment, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return Ran(done.returncode, done.stdout, done.stderr, cwd)


def test_the_wheel_carries_every_config_and_every_module_and_nothing_else(wheel: Path) -> None:
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    configs = {f"llama_lab/{path.relative_to(CHECKOUT)}" for path in (CHECKOUT / "conf").rglob("*.yaml")}
    sources = [*CHECKOUT.glob("llama_lab/**/*"), *CHECKOUT.glob("hydra_plugins/**/*")]
    modules = {str(path.relative_to(CHECKOUT)) for path in sources if path.suffix in (".py", ".j2")}
    assert len(configs) > 100
    assert carried - {"llama_lab/py.typed"} == configs | modules


def test_the_installed_command_shows_its_config_outside_the_checkout(
    installed: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    ran = run(installed, "llama-lab-train", "--cfg", "job", "arch=gpt2", cwd=tmp_path, environment=environment)
    assert (ran.code, ran.err) == (0, "")
    assert "llama_lab.model.norm.LayerNorm" in ran.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_installed_command_finds_studies_and_recipes_of_the_user_s_own(
    installed: Path, tmp_path: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    (tmp_path / "my_conf" / "arch").mkdir(parents=True)
    recipe = (CHECKOUT / "conf" / "arch" / "llama2.yaml").read_text().replace("ffn: swiglu", "ffn: geglu")
    (tmp_path / "my_conf" / "arch" / "mine.yaml").write_text(recipe)
    study = ("study=add_one", "study.base=llama2", "study.target=mine", "study.seeds=[1]", "train.tokens=2560")
    quick = ("name=ours", "study.measure_speed=false", "train.evaluations=1", "train.sample_tokens=0")
    command = ("llama-lab-train", "--config-dir", "my_conf", *last_of_each([*tiny, *study, *quick]))
    ran = run(installed, *command, cwd=tmp_path, environment=environment)
    assert (ran.code, ran.err) == (0, "")
    report = (tmp_path / "runs" / "ours" / "report.html").read_text(encoding="utf-8")
    assert "llama2+geglu" in report


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


@pytest.mark.slow
def test_the_installed_command_trains_a_component_of_the_user_s_own_package(
    installed: Path, tmp_path: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "norm.py").write_text(NORM)
    (tmp_path / "my_conf" / "norm").mkdir(parents=True)
    (tmp_path / "my_conf" / "norm" / "mine.yaml").write_text(OPTION)
    ran = run(
        installed,
        "llama-lab-train",
        "--config-dir",
        "my_conf",
        "norm=mine",
        *last_of_each([*tiny, "train.tokens=2560"]),
        "model.norm.floor=0.01",
        cwd=tmp_path,
        environment=environment,
    )
    assert (ran.code, ran.err) == (0, "")
    norm = OmegaConf.load(ran.run / "resolved.yaml").model.norm
    assert norm == {"_target_": "mylab.norm.Mine", "_partial_": True, "floor": 0.01}
    evaluated = run(
        installed,
        "llama-lab-eval",
        f"run={ran.run}",
        "eval.parts=[loss]",
        "trust=[mylab]",
        cwd=tmp_path,
        environment=environment,
    )
    assert (evaluated.code, evaluated.err) == (0, "")
    assert "after 10 steps" in evaluated.out


LIBRARY = """
import llama_lab
from llama_lab.config.trust import Trust

cfg = llama_lab.load_config(["arch=ours", "size=pico", "tokenizer=byte"], config_dir="my_conf")
runs = llama_lab.read_runs("runs/*").sort_values("norm")
loaded = llama_lab.load(runs.path.iloc[0], Trust(("mylab",)))
kv_bytes = [llama_lab.cost(of).kv_bytes for of in (loaded.model, cfg)]
print(runs.run.tolist(), runs.norm.tolist(), kv_bytes[0] == kv_bytes[1])
print(llama_lab.generate(loaded, "def", max_new_tokens=3).startswith("def"))
print(llama_lab.load("imported").model.dim)
print(llama_lab.compare("runs/ours", baseline="llama2", trust=["mylab"]).save("saved"))
"""


@pytest.mark.slow
def test_a_second_project_imports_weights_studies_its_component_and_uses_the_library(
    installed: Path, tmp_path: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "norm.py").write_text(NORM)
    for group in ("norm", "arch"):
        (tmp_path / "my_conf" / group).mkdir(parents=True)
    (tmp_path / "my_conf" / "norm" / "mine.yaml").write_text(OPTION)
    recipe = (CHECKOUT / "conf" / "arch" / "llama2.yaml").read_text()
    (tmp_path / "my_conf" / "arch" / "ours.yaml").write_text(re.sub("norm: rmsnorm.*", "norm: mine", recipe))
    study = ("study=add_one", "study.base=llama2", "study.target=ours", "study.seeds=[1]", "name=ours")
    overrides = last_of_each([*tiny, *study, "train.tokens=2560", "study.measure_speed=false"])
    mine = ("llama-lab-train", "--config-dir", "my_conf")
    trained = run(installed, *mine, *overrides, cwd=tmp_path, environment=environment)
    assert (trained.code, trained.err) == (0, "")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes)).save_pretrained(tmp_path / "theirs")
    shutil.copy(trained.cwd / "runs/ours/llama2/seed=1/tokenizer.json", tmp_path / "theirs")
    convert = ("llama-lab-convert", "import", "theirs", "imported")
    imported = run(installed, *convert, cwd=tmp_path, environment=environment)
    assert imported.code == 0, imported.err
    theirs = OmegaConf.to_container(OmegaConf.load(tmp_path / "imported" / "overrides.yaml"))
    warm = ("init_from=imported", "tokenizer=hf", "tokenizer.path=imported", "norm=mine", "runs_dir=warm")
    overrides = last_of_each([*tiny, *theirs, *warm, "model.max_seq_len=32", "train.tokens=2560"])
    started = run(installed, *mine, *overrides, cwd=tmp_path, environment=environment)
    assert (started.code, started.err) == (0, "")
    (start,) = (tmp_path / "warm").rglob("warm_start.json")
    assert "embedding.tokens.weight" in json.loads(start.read_text())["taken"]
    used = subprocess.run(
        [sys.executable, "-c", LIBRARY],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(installed), str(tmp_path)])},
        capture_output=True,
        text=True,
    )
    assert used.returncode == 0, used.stderr
    names, text, dim, saved = used.stdout.splitlines()
    assert names == "['llama2+mine', 'llama2'] ['mine', 'rmsnorm'] True"
    assert (text, dim, saved) == ("True", "16", "saved/report.html")


def test_the_user_s_option_is_known_to_the_help_and_to_the_messages(
    installed: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "my_conf" / "norm").mkdir(parents=True)
    (tmp_path / "my_conf" / "norm" / "mine.yaml").write_text(OPTION)
    mine = ["llama-lab-train", "--config-dir", "my_conf"]
    shown = run(installed, *mine, "--help", cwd=tmp_path, environment=environment)
    assert ", mine, " in shown.out
    ran = run(installed, *mine, "norm=mime", cwd=tmp_path, environment=environment)
    assert ran.code == 2
    assert ran.err.startswith("error: norm=mime: no such option (did you mean mine?); choose ")


def test_the_installed_package_does_not_reach_into_the_checkout(
    installed: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    code = "import llama_lab.config.components as c; print(c.CONF_DIR)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(installed / "llama_lab" / "conf")
    assert shutil.which("llama-lab-train", path=str(installed / "bin"))
