"""Training on a GPU: near float32, repeatable, resumable, sharded, compiled, within the memory of its estimate."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu_training import estimate_error, measure_ladder, train_steps
from llama_lab.evaluation.evaluate import evaluate
from llama_lab.runs.stored import Status, Summary
from llama_lab.runs.study import StudySpeed
from llama_lab.training.checkpointing import Checkpointing
from llama_lab.training.module import LanguageModel
from tests.composing import eval_settings
from tests.conftest import RunTrain
from tests.training.stopping import at, cut, stopped
from tests.training.tiny import identical, logged, pieces, repeatable, trained, trained_state

pytestmark = pytest.mark.gpu

RUN = ["train.tokens=10240", "train.micro_batch_size=4", "train.log_every=3", "train.checkpoint_every=4"]


@pytest.fixture(autouse=True)
def own_ranks() -> Iterator[None]:
    """Lightning leaves a rank in the environment."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def settings(tiny: list[str], tmp_path: Path) -> list[str]:
    """A tiny run in a folder of its own."""
    return [*tiny, *RUN, f"runs_dir={tmp_path / 'runs'}"]


AT_STEP_13 = at(Checkpointing, "on_train_batch_end", 13)
losses = partial(logged, metric="train/loss")


def test_a_gpu_trains_in_bf16_by_default(settings: list[str], gpu: torch.device) -> None:
    summary = Summary.load(trained(*settings))
    assert (summary.precision, summary.device) == ("bf16-mixed", torch.cuda.get_device_name())


def test_losses_in_float32_are_those_of_a_cpu(settings: list[str], tmp_path: Path) -> None:
    ours = losses(trained(*settings, "trainer.precision=32-true"))
    expected = losses(trained(*settings, "trainer=cpu", f"runs_dir={tmp_path / 'cpu'}"))
    assert ours == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_bf16_losses_are_near_float32_s(arch: str, precision: str, settings: list[str], tmp_path: Path) -> None:
    common = [*settings, f"arch={arch}"]
    full = losses(trained(*common, "trainer.precision=32-true"))
    ours = losses(trained(*common, f"trainer.precision={precision}", f"runs_dir={tmp_path / 'bf16'}"))
    assert ours == pytest.approx(full, abs=0.05 if precision == "bf16-mixed" else 0.15)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("arch", ["llama", "llama3", "gpt2"])
def test_training_twice_gives_the_same_curve(arch: str, settings: list[str], tmp_path: Path) -> None:
    common = [*settings, f"arch={arch}", "model.dropout=0.1"]
    first, second = (trained(*common, f"runs_dir={tmp_path / name}") for name in ("first", "second"))
    assert repeatable(first) == repeatable(second)
    assert identical(trained_state(first)["state_dict"], trained_state(second)["state_dict"])


@pytest.mark.usefixtures("deterministic")
def test_a_run_that_was_killed_goes_on_to_the_last_bit(settings: list[str], tmp_path: Path) -> None:
    whole = trained(*settings, f"runs_dir={tmp_path / 'whole'}")
    stopped(AT_STEP_13, cut, *settings)
    resumed = trained(*settings)
    assert repeatable(resumed) == repeatable(whole)
    assert identical(trained_state(resumed), trained_state(whole))


class NeverWaits(LanguageModel):
    """A model whose training steps may not wait for the device: it should be given work ahead."""

    def training_step(self, *batch: Any) -> None:
        first = self.trainer.global_step < 2  # which allocates and chooses kernels
        torch.cuda.set_sync_debug_mode("default" if first else "error")
        try:
            super().training_step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bloom", "mistral", "gemma2", "olmo2"])
def test_no_training_step_waits_for_the_device(arch: str, settings: list[str]) -> None:
    assert pieces(*settings, f"arch={arch}", kind=NeverWaits).fit() == "done"


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_shards_on_one_device_log_the_losses_of_one_device(arch: str, settings: list[str], tmp_path: Path) -> None:
    common = [*settings, f"arch={arch}", "trainer.devices=1", "trainer.precision=32-true"]
    one = trained(*common)
    sharded = trained(*common, "trainer.strategy=fsdp", f"runs_dir={tmp_path / 'fsdp'}")
    assert Summary.load(sharded).sharded
    assert losses(sharded) == pytest.approx(losses(one), abs=2e-3)


def test_shards_go_on_from_their_own_checkpoint(settings: list[str], tmp_path: Path) -> None:
    common = [*settings, "trainer=fsdp", "trainer.devices=1"]
    whole = trained(*common, f"runs_dir={tmp_path / 'whole'}")
    stopped(AT_STEP_13, cut, *common)
    torch.distributed.destroy_process_group()
    assert losses(trained(*common)) == pytest.approx(losses(whole), abs=0.02)


def test_two_gpus_train_the_curve_of_one(settings: list[str], run_train: RunTrain, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    common = [*settings, "trainer.precision=32-true"]
    one = trained(*common, "trainer.devices=1")
    for strategy in ("ddp", "fsdp"):
        runs_dir = f"runs_dir={tmp_path / strategy}"
        ran = run_train(*common, runs_dir, f"trainer={strategy}", "trainer.devices=2", fresh=True)
        assert ran.code == 0, ran.err
        (status,) = (tmp_path / strategy).rglob(Status.FILE)
        assert losses(status.parent) == pytest.approx(losses(one), abs=2e-3)


def test_a_compiled_model_trains_the_curve_of_an_eager_one(settings: list[str], tmp_path: Path) -> None:
    common = [*settings, "trainer.precision=32-true", "trainer.devices=1"]
    eager = losses(trained(*common, "trainer.compile=false"))
    compiled = losses(trained(*common, "trainer.compile=true", f"runs_dir={tmp_path / 'compiled'}"))
    assert compiled == pytest.approx(eager, abs=2e-3)


@pytest.mark.parametrize("overrides", [["arch=llama"], ["arch=gpt2"]], ids=str)
def test_the_estimate_is_near_the_allocators_peak(overrides: list[str], tiny: list[str], gpu: torch.device) -> None:
    model = [*tiny, *overrides, "model.dim=512", "model.n_layers=8", "model.n_heads=8", "model.vocab_size=32768"]
    sizes = [*model, "model.max_seq_len=512", "train.batch_size=16"]
    peak = train_steps(gpu, 5, *sizes, "trainer.compile=false").peak_bytes
    error, _ = estimate_error(gpu, sizes, peak)
    assert error.outcome == "met", error


def test_a_run_is_evaluated_on_the_gpu(settings: list[str]) -> None:
    path = trained(*settings)
    found = evaluate(path, eval_settings("eval.parts=[loss,cache,speed,sample]", "eval.rounds=1"))
    assert found.metrics["val/loss"] == pytest.approx(Summary.load(path).metrics["val/loss"], abs=1e-3)
    assert json.loads((path / "eval.json").read_text())["device"] == torch.cuda.get_device_name()


def test_a_ladder_runs_in_slots_of_one_gpu(tiny: list[str], gpu: torch.device) -> None:
    found = {finding.name: finding for finding in measure_ladder(gpu, {"tiny": [*tiny, "study.axes=[norm]"]}, slots=2)}
    assert found["ladder at tiny: runs that are done"].value == 2
    assert found["ladder at tiny: reports"].value == 1


def test_a_study_measures_the_memory_that_training_each_arm_allocates(run_train: RunTrain, tiny: list[str]) -> None:
    recipes = ("study=recipes", "study.recipes=[gpt2,llama2]", "study.learning_rates=null", "study.extend_rates=false")
    ran = run_train(*tiny, *recipes, "study.seeds=[1]", "train.tokens=2560", "name=pick", fresh=True)
    assert (ran.code, ran.err) == (0, "")
    for arm in StudySpeed.load(ran.cwd / "runs" / "pick").arms.values():
        assert len(arm.memory) == len(arm.train)
        assert 0 < max(arm.memory) < 1.1 * min(arm.memory)
