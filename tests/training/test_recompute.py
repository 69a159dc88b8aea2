"""A run that recomputes is the same run, on any number of devices."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from llama_lab.training.command import train_run
from llama_lab.util.errors import ConfigError
from tests.conftest import RunTrain, needs_compiler
from tests.training.tiny import identical, planned, repeatable, trained_state

RUN = [
    "model.dropout=0.1",
    "model.attention.window=16",
    "train.tokens=5120",
    "train.micro_batch_size=4",
    "train.evaluations=2",
    "train.log_every=2",
    "train.ema=0.9",
]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def ran(tmp_path: Path, *overrides: str) -> Path:
    """The folder of a finished run."""
    run = planned(*overrides, f"runs_dir={tmp_path}")
    with patch.dict(os.environ, LOOPBACK):  # Lightning leaves a rank in it
        assert train_run(run) == "done"
    return run.folder.path


@pytest.mark.slow
def test_a_run_that_recomputes_leaves_the_same_weights_and_rows_to_the_last_bit(
    tiny: list[str], tmp_path: Path
) -> None:
    plain, *others = (ran(tmp_path / p, *tiny, *RUN, f"train.recompute={p}") for p in ("none", "attention", "block"))
    for again in others:
        assert identical(trained_state(again), trained_state(plain))
        assert repeatable(again) == repeatable(plain)
        assert (again / "sample.txt").read_bytes() == (plain / "sample.txt").read_bytes()


@pytest.mark.slow
def test_one_shard_that_recomputes_is_the_same_shard(tiny: list[str], tmp_path: Path) -> None:
    sharded = [*tiny, *RUN, "trainer=fsdp", "trainer.accelerator=cpu", "trainer.precision=bf16-mixed"]
    plain, again = (ran(tmp_path / p, *sharded, f"train.recompute={p}") for p in ("none", "block"))
    assert repeatable(again) == repeatable(plain)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_two_devices_that_recompute_give_the_same_numbers(trainer: str, tiny: list[str], run_train: RunTrain) -> None:
    several = [*tiny, *RUN, f"trainer={trainer}", "trainer.accelerator=cpu", "trainer.devices=2"]
    plain, again = (run_train(*several, f"train.recompute={p}", **LOOPBACK) for p in ("none", "block"))
    assert (plain.code, again.code, again.err) == (0, 0, "")
    assert repeatable(again.run) == repeatable(plain.run)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", "fsdp"])
def test_a_compiled_run_recomputes_blocks(trainer: str, tiny: list[str], tmp_path: Path) -> None:
    common = [*tiny, *RUN, "model.dropout=0", f"trainer={trainer}", "trainer.accelerator=cpu"]
    plain = ran(tmp_path / "plain", *common)
    again = ran(tmp_path / "compiled", *common, "trainer.compile=true", "train.recompute=block")
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    for ours, theirs in zip(repeatable(again), repeatable(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_an_unknown_part_is_refused(tiny: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"train\.recompute=ffn: unknown; choose none \| attention \| block$"):
        planned(*tiny, "train.recompute=ffn")
