"""Probes from the command line: trained, resumed, shared by devices, evaluated, compared."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from llama_lab.data.open import open_dataset
from llama_lab.evaluation.answers import answers_text
from llama_lab.evaluation.load import load_run
from llama_lab.model import Sampling
from llama_lab.model.loss import IGNORE
from llama_lab.runs.evaluation import Evaluation
from llama_lab.runs.stored import Summary
from llama_lab.training.command import train_run
from tests.conftest import Command
from tests.selection import first
from tests.training.tiny import planned, rows

RUN = ["size=pico", "train.batch_size=8", "train.tokens=5120", "logger=none", "train.evaluations=2"]  # 20 steps
INDUCTION = [*RUN, "data=induction", "data.val_sequences=21"]
# Settings with which one of each probe is solved.
# In float32, so that processors do not differ in what is learnt.
SOLVING = [
    *("size=pico", "model.dim=64", "model.n_heads=1", "train.batch_size=32", "optim.lr=3e-3", "logger=none"),
    "trainer.precision=32-true",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a probe, evaluated at twice its context."""
    made = planned(*INDUCTION, "train.eval_lengths=[2]", f"runs_dir={tmp_path_factory.mktemp('runs')}")
    assert train_run(made) == "done"
    return made.folder.path


def test_accuracy_and_loss_are_those_of_the_answers_alone(run: Path) -> None:
    loaded = load_run(run)
    windows = open_dataset(loaded.cfg).val_windows(32)
    paid, right = [], []
    for i in range(len(windows)):
        inputs, targets = (torch.from_numpy(side) for side in windows[i])
        with torch.no_grad():
            logits = loaded.model(inputs[None])[0].double()
        for position in (targets != IGNORE).nonzero().flatten().tolist():
            paid.append(-logits[position].log_softmax(-1)[targets[position]].item())
            right.append(logits[position].argmax().item() == targets[position].item())
    assert len(paid) == 21 * (32 - 17)
    summary = Summary.load(run)
    assert summary.metrics["val/loss"] == pytest.approx(sum(paid) / len(paid), abs=1e-5)
    assert summary.metrics["val/accuracy"] == pytest.approx(sum(right) / len(right))
    assert summary.entropy_floor == 0.0
    assert rows(run)[-1]["val/accuracy"] == summary.metrics["val/accuracy"]
    of_sequences = [all(right[i : i + 15]) for i in range(0, len(right), 15)]
    assert summary.metrics["val/exact_match"] == sum(of_sequences) / 21
    trained, longer = Evaluation.load(run).lengths
    assert trained.accuracy == pytest.approx(summary.metrics["val/accuracy"])
    assert min(trained.positions) == 17, "no answer comes before"
    assert sum(longer.tokens) == 21 * (64 - 17)


def test_a_sample_shows_every_answer_and_the_right_one_beside_a_wrong_one(run: Path) -> None:
    shown = (run / "sample.txt").read_text().split()
    loaded = load_run(run)
    data = open_dataset(loaded.cfg)
    inputs, targets = data.val_windows(32)[0]
    assert len(shown) == 32
    assert [symbol.partition("(")[0] for symbol in shown[:17]] == [f"s{i}" for i in inputs[1:18]]
    assert all(symbol.endswith((f"s{t})", f"s{t}")) for symbol, t in zip(shown[17:], targets[17:], strict=True))
    assert answers_text(loaded.model, data, 0, Sampling(temperature=0), seed=1) == "", "of no symbols it is empty"


@pytest.mark.slow
def test_a_run_is_evaluated_in_all_its_parts(evaluating: Command, run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "copied")
    ran = evaluating(f"run={copied}", "eval.parts=[length,cache,sample]", "eval.lengths=[2]")
    assert (ran.code, ran.err) == (0, "")
    assert "accuracy" in ran.out
    assert "nats/answer" in ran.out
    found = json.loads((copied / "eval.json").read_text())
    assert found["val/accuracy"] == pytest.approx(Summary.load(run).metrics["val/accuracy"])
    written = evaluating(f"run={copied}", 'prompt="s1 s2 s3 s1"', "max_new_tokens=3")
    assert written.code == 0
    assert written.out.startswith("s1 s2 s3 s1")
    assert "no id for 'hello'" in evaluating(f"run={copied}", "prompt=hello").err


@pytest.mark.slow
def test_a_study_reports_the_accuracy(command: Command, tmp_path: Path) -> None:
    study = ("study=kv_heads", "study.seeds=[1,2]", "study.kv_heads=[1,2]", "study.measure_speed=false", "name=heads")
    ran = command(*RUN, "data=recall", "data.val_sequences=9", "data.noise=0.5", *study)
    assert ran.code == 0, ran.err
    folder = ran.cwd / "runs" / "heads"
    with (folder / "summary.csv").open() as file:
        arms = list(csv.DictReader(file))
    summaries = [Summary.load(path.parent) for path in (folder / arms[0]["arm"]).rglob("summary.json")]
    accuracy = [summary.metrics["val/accuracy"] for summary in summaries]
    assert float(arms[0]["val_accuracy_mean"]) == pytest.approx(sum(accuracy) / 2)
    assert float(arms[0]["entropy_floor"]) == summaries[0].entropy_floor > 1
    report = (folder / "report.html").read_text()
    for text in (report, ran.out):
        assert "nats per answer" in text
        assert "nats per token" not in text.lower()


SOLVED = {
    # Two layers find what followed the last occurrence; one has no head that reads the symbol before (Olsson 2022).
    "induction": (["data=induction", "train.tokens=300000"], ["model.n_layers=1"], 0.4),
    # A head copies from a fixed distance; the window hides the first half from both layers.
    "copy": (["data=copy", "train.tokens=150000"], ["model.attention.window=4"], 0.15),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first(1, ["copy", "induction"]))
def test_what_can_be_solved_is_and_what_theory_excludes_is_not(name: str, tmp_path: Path) -> None:
    probe, change, most = SOLVED[name]
    accuracies = []
    for i, overrides in enumerate([[], change]):
        made = planned(*SOLVING, *probe, *overrides, f"runs_dir={tmp_path / str(i)}", "train.evaluations=1")
        assert train_run(made) == "done"
        accuracies.append(Summary.load(made.folder.path).metrics["val/accuracy"])
    solved, failed = accuracies
    assert solved >= 0.99
    assert failed <= most


@pytest.mark.matrix
@pytest.mark.parametrize(("objective", "least"), [("next_token", 1), ("prefix", 0.99)])
def test_reversing_is_learnt_for_words_that_were_held_out(objective: str, least: float, tmp_path: Path) -> None:
    settings = [one for one in SOLVING if one != "model.n_heads=1"]
    task = ["data=reverse", f"objective={objective}", "model.max_seq_len=32", "train.tokens=1000000"]
    made = planned(*settings, *task, f"runs_dir={tmp_path}", "train.evaluations=1")
    assert train_run(made) == "done"
    assert Summary.load(made.folder.path).metrics["val/accuracy"] >= least


@pytest.mark.matrix
def test_the_transformer_of_2017_reverses_every_word_that_was_held_out(tmp_path: Path) -> None:
    """By its own schedule, optimizer and label smoothing."""
    sizes = ["size=pico", "model.dim=64", "model.n_heads=4", "model.max_seq_len=16", "train.batch_size=64"]
    schedule = ["optim=adam", "optim.lr=2e-3", "schedule=noam", "schedule.warmup=0.2", "train.label_smoothing=0.1"]
    rest = ["train.tokens=1.5e6", "train.evaluations=1", "logger=none", f"runs_dir={tmp_path}"]
    exact = "trainer.precision=32-true"  # in bf16 a word in fifty is wrong
    made = planned("arch=transformer2017", "data=reverse", *sizes, *schedule, *rest, exact)
    assert train_run(made) == "done"
    assert Summary.load(made.folder.path).metrics["val/exact_match"] == 1
    sample = (made.folder.path / "sample.txt").read_text().split()
    assert sample[7] == "|"
    assert sample[:7] == sample[:7:-1]
