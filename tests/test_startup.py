"""What a command imports before it answers, counted in modules, since seconds are the machine's."""

import subprocess
import sys
from pathlib import Path

import pytest

from llama_lab.data.open import open_dataset
from tests.conftest import RunTrain
from tests.training.tiny import planned

ROOT = Path(__file__).parents[1]
HELP = """
import sys
from llama_lab.cli import convert_command, eval_command, train_command

for command, names in ((train_command, []), (eval_command, []), (convert_command, []), (train_command, ["attention"])):
    sys.argv = ["train.py", "--help", *names]
    try:
        command()
    except SystemExit as stop:
        assert not stop.code
print(*sys.modules, sep="\\n", file=sys.stderr)
"""
FIRST_STEP = """
import os, sys
from llama_lab.cli import train_command
from llama_lab.training.module import LanguageModel

step = LanguageModel.training_step

def first_step(self, *arguments):
    step(self, *arguments)
    print(*sys.modules, sep="\\n", file=sys.stderr, flush=True)
    os._exit(0)

LanguageModel.training_step = first_step
train_command()
"""
# Large packages that no run needs that writes a CSV alone. PyTorch's optimizers import torch._dynamo, and so SymPy.
NEEDLESS = ["pandas", "sklearn", "datasets", "pyarrow", "tensorboard", "torch.utils.tensorboard", "wandb", "ray"]
NEEDLESS += ["hypothesis", "IPython", "torchvision", "torch._inductor.compile_fx", "benchmarks", "llama_lab.estimate"]
NEEDLESS += ["llama_lab.analysis", "llama_lab.report", "llama_lab.study", "llama_lab.launching.engine"]
NEEDLESS += ["llama_lab.evaluation.plot", "vl_convert"]
TORCHMETRICS = ["torchmetrics", "PIL", "scipy", "transformers", "jinja2"]  # it imports the rest, if there


def imported(found: set[str], packages: list[str]) -> list[str]:
    return [package for package in packages if package in found]


@pytest.mark.process
def test_the_help_imports_neither_pytorch_nor_anything_else_that_is_large() -> None:
    ran = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, check=True, capture_output=True, text=True)
    found = {*ran.stderr.splitlines()}
    assert ran.stdout.count("norm=") > 1
    assert "hydra" in found
    assert imported(found, ["torch", "numpy", "lightning", "rich", "tokenizers", *TORCHMETRICS, *NEEDLESS]) == []
    assert len(found) < 420, "357 on 2026-11-23, half of them Python's"


def test_a_run_imports_nothing_large_that_it_does_not_need(
    tiny: list[str], run_train: RunTrain, tmp_path: Path
) -> None:
    open_dataset(planned(*tiny, f"runs_dir={tmp_path}").cfg)  # so that its tokens are there
    script = tmp_path / "first_step.py"
    script.write_text(FIRST_STEP)
    ran = run_train(*tiny, script=script, fresh=True, PYTHONPATH=str(ROOT))
    found = {*ran.err.splitlines()}
    assert "torch" in found, ran.err
    assert imported(found, NEEDLESS) == []
    assert len(found) < 4100, (
        "3,902 on 2026-11-23 with torch 2.13 for CPUs: 1,500 are of it and SymPy, 1,300 TorchMetrics'"
    )
