"""TorchMetrics is imported when someone needs more of it than Lightning does, and Matplotlib when one draws."""

import subprocess
import sys
from pathlib import Path

from llama_lab.deferred import defer_torchmetrics

SCRIPT = """
import llama_lab, lightning.pytorch.core.module as module, sys, torch
print("torchmetrics.metric" in sys.modules, "torchmetrics.functional" in sys.modules)
import torchmetrics
print(torchmetrics.__version__)
accuracy = torchmetrics.Accuracy(task="binary")
accuracy(torch.tensor([1, 0]), torch.tensor([1, 1]))
print("matplotlib" in sys.modules)
import matplotlib
matplotlib.use("agg")
figure, axes = accuracy.plot()
print(axes.get_ylabel() or type(figure).__name__, len(axes.lines))
both = torchmetrics.MetricCollection([accuracy, torchmetrics.Recall(task="binary")])
both(torch.tensor([1, 0]), torch.tensor([1, 1]))
print(len(both.plot()), torchmetrics.ConfusionMatrix(task="binary").plot.__name__)
print(float(accuracy.compute()), isinstance(accuracy, module.Metric), torchmetrics.functional.accuracy.__name__)
"""


def test_lightning_is_imported_without_metrics_which_are_there_for_whoever_asks_for_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True
    )
    imported, version, drawn, one, several, found = done.stdout.splitlines()
    assert imported == "True False"
    assert version.startswith("1.")
    assert drawn == "False", "Matplotlib is imported before anything is drawn"
    assert one.endswith(" 1")
    assert several == "2 plot"
    assert found == "0.5 True accuracy"


def test_what_has_been_imported_before_stays_as_it_is() -> None:
    import torchmetrics

    defer_torchmetrics()
    assert sys.modules["torchmetrics"] is torchmetrics
