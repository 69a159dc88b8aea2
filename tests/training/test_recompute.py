"""A run that recomputes is the same run, on any number of devices."""

from pathlib import Path

import pytest
import torch

from tests.conftest import RunTrain, needs_compiler
from tests.training.tiny import LOOPBACK, identical, repeatable, trained, trained_state

RUN = [
    "model.dropout=0.1",
    "model.attention.window=16",
    "train.tokens=5120",
    "train.micro_batch_size=4",
    "train.evaluations=2",
    "train.log_every=2",
    "train.ema=0.9",
]


@pytest.mark.slow
def test_a_run_that_recomputes_is_the_same_to_the_last_bit(tiny: list[str], tmp_path: Path) -> None:
    parts = ("none", "attention", "block")
    plain, *others = (trained(*tiny, *RUN, f"train.recompute={p}", f"runs_dir={tmp_path / p}") for p in parts)
    for again in others:
        assert identical(trained_state(again), trained_state(plain))
        assert repeatable(again) == repeatable(plain)
        assert (again / "sample.txt").read_bytes() == (plain / "sample.txt").read_bytes()


@pytest.mark.slow
def test_one_shard_that_recomputes_is_the_same_shard(tiny: list[str], tmp_path: Path) -> None:
    sharded = [*tiny, *RUN, "trainer=fsdp", "trainer.accelerator=cpu", "trainer.precision=bf16-mixed"]
    plain, again = (trained(*sharded, f"train.recompute={p}", f"runs_dir={tmp_path / p}") for p in ("none", "block"))
    assert repeatable(again) == repeatable(plain)


@pytest.mark.slow
def test_two_devices_that_recompute_give_the_same_numbers(tiny: list[str], run_train: RunTrain) -> None:
    several = [*tiny, *RUN, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    plain, again = (run_train(*several, f"train.recompute={p}", **LOOPBACK) for p in ("none", "block"))
    assert (plain.code, again.code, again.err) == (0, 0, "")
    assert repeatable(again.run) == repeatable(plain.run)


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_recomputes_blocks(tiny: list[str], tmp_path: Path) -> None:
    common = [*tiny, *RUN, "model.dropout=0"]
    plain = trained(*common, f"runs_dir={tmp_path / 'plain'}")
    again = trained(*common, "trainer.compile=true", "train.recompute=block", f"runs_dir={tmp_path / 'compiled'}")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    for ours, theirs in zip(repeatable(again), repeatable(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
