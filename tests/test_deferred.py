"""TorchMetrics is imported when someone needs more of it than Lightning does."""

import subprocess
import sys
from pathlib import Path


def printed(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_lightning_is_imported_without_the_metrics_of_torchmetrics() -> None:
    names = "{'torchmetrics.metric', 'torchmetrics.functional'}"
    script = f"import llama_lab, sys, lightning; print({names} & {{*sys.modules}})"
    assert printed(script) == "{'torchmetrics.metric'}"


def test_the_metrics_are_there_for_whoever_asks_for_one() -> None:
    script = """
import llama_lab, lightning.pytorch.core.module as module, torch, torchmetrics
print(torchmetrics.__version__)
accuracy = torchmetrics.Accuracy(task="binary")
accuracy(torch.tensor([1, 0]), torch.tensor([1, 1]))
print(float(accuracy.compute()), isinstance(accuracy, module.Metric), torchmetrics.functional.accuracy.__name__)
"""
    version, rest = printed(script).splitlines()
    assert version.startswith("1.")
    assert rest == "0.5 True accuracy"


def test_what_has_been_imported_before_stays_as_it_is() -> None:
    script = (
        "import torchmetrics, sys; import llama_lab; print(sys.modules['torchmetrics'].functional.accuracy.__name__)"
    )
    assert printed(script) == "accuracy"
