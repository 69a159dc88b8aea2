"""A run that recomputes is the same run; on two devices: `test_world_size.py`; compiled: `test_telemetry.py`."""

from pathlib import Path

import pytest

from tests.training.tiny import identical, repeatable, trained, trained_state

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
