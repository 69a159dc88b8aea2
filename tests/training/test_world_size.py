"""One device, several, several nodes, sharded: the same global batch, the same curve, each validation window once."""

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_lab.data.data_module import open_data_module
from llama_lab.data.windows import ValWindows
from llama_lab.model.loss import IGNORE
from llama_lab.runs.stored import Summary
from llama_lab.training.profile import TRACE
from tests.conftest import TRAIN, Command, RunTrain, Start, last_of_each
from tests.data.test_data_module import on_device
from tests.processes import at_work_in, listening
from tests.selection import first
from tests.training.tiny import LOOPBACK, logged, on_pairs, pieces, repeatable, rows, trained

STEPS = 30
RUN = [
    "model.max_seq_len=28",
    f"train.tokens={STEPS * 8 * 28}",
    "train.micro_batch_size=2",
    "train.log_every=1",
    "train.evaluations=3",
    "train.ema=0.9",
    "ffn=moe",
    "model.ffn.n_experts=4",
    "model.ffn.balance_bias=0.01",
]
OBJECTIVES = [
    "objective=next_token",
    "objective=prefix",
    "objective=span family=encoder_decoder",
    "objective=masked family=encoder train.sample_tokens=0",
]


def assert_same_curve(ran: Path, one: Path) -> None:
    """Every training loss to 1e-5, every validation loss to 1e-6, and nothing more or less."""
    ours, theirs = repeatable(ran), repeatable(one)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert len(theirs) == STEPS + 3
    for row, other in zip(ours, theirs, strict=True):
        for key, value in row.items():
            limit = {"train/loss": 1e-5, "val/loss": 1e-6}.get(key, 1e-4 * abs(other[key]))
            assert value == pytest.approx(other[key], abs=limit, rel=0), f"{key} at step {row['step']}"


@pytest.mark.parametrize("objective", first(2, OBJECTIVES))
def test_two_devices_make_the_gradient_and_the_loss_of_one(objective: str, tiny: list[str], tmp_path: Path) -> None:
    """In one process: gradients are averaged over devices, as DDP does, and the sums of validation are added."""
    parts = pieces(*tiny, *RUN, *objective.split(), f"runs_dir={tmp_path}")
    module = parts.module
    assert len(ValWindows(parts.dataset.val, 28)) % 2, "the devices would share the windows evenly"

    def together(devices: int) -> tuple[torch.Tensor, float]:
        module.zero_grad()
        module._val_sums = []
        each = [on_device(open_data_module(parts.run.cfg, parts.dataset), rank, devices) for rank in range(devices)]
        batches = [batch for data in each for batch in next(iter(data.train_dataloader()))]
        predicted = torch.stack([(module.model.cut(*batch)[1] != IGNORE).sum() for batch in batches]).float().mean()
        for batch in batches:
            (module.loss(*batch, predicted=predicted)[1] / len(batches)).backward()
        for data in each:
            for i, batch in enumerate(data.val_dataloader()[0]):
                with torch.no_grad():
                    module.validation_step(batch, i)
        ((nll, count, *_),) = module._val_sums
        return torch.cat([p.grad.flatten() for p in module.model.parameters() if p.grad is not None]), nll / count

    (gradient, loss), (of_one, loss_of_one) = together(2), together(1)
    assert (gradient - of_one).norm() < 1e-5 * of_one.norm()
    assert loss == pytest.approx(loss_of_one, rel=1e-6)


@pytest.mark.slow
def test_two_devices_give_the_curve_of_one_and_nobody_else_can_reach_them(
    tiny: list[str], start: Start, tmp_path: Path
) -> None:
    """On pairs, of which the devices get unequal numbers of targets; also where the two recompute, and profile."""
    overrides = [*on_pairs(tiny, tmp_path), *RUN, "family=encoder_decoder"]
    two = ["trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "train.recompute=block"]
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    process = start(str(TRAIN), *last_of_each([*overrides, *two, "trainer.profile=true"]), cwd=cwd)
    addresses: set[str] = set()
    while process.poll() is None:
        addresses |= listening(at_work_in(cwd))
        time.sleep(0.3)
    out, err = process.out.read_text(), process.err.read_text()
    assert (process.wait(), err, addresses) == (0, "", {"127.0.0.1"})
    assert (out.count("│ parameters"), out.count("the profile is in")) == (1, 1), "each rank prints"
    (status,) = cwd.rglob("status.json")
    assert (status.parent / TRACE).exists()
    assert_same_curve(status.parent, trained(*overrides, f"runs_dir={tmp_path}"))


@pytest.mark.slow
def test_shards_on_two_nodes_of_torchrun_give_the_curve_of_one_device(
    tiny: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    """What torchrun has started is used without being told."""
    command = [str(TRAIN), *last_of_each([*tiny, *RUN, "trainer=fsdp", "trainer.accelerator=cpu"])]
    layout = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *layout]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(
            [*torchrun, f"--node-rank={node}", *command],
            cwd=tmp_path,
            env={**environment, **LOOPBACK},
            text=True,
            **pipes,
        )
        for node in range(2)
    ]
    shown = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], shown
    (status,) = tmp_path.rglob("status.json")
    assert_same_curve(status.parent, trained(*tiny, *RUN, f"runs_dir={tmp_path / 'one'}"))
    speeds = Summary.load(status.parent).metrics
    assert speeds["perf/tokens_per_second"] == pytest.approx(2 * speeds["perf/tokens_per_second_per_device"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
def test_two_shards_do_what_needs_whole_matrices_as_one_device_does(
    tiny: list[str], run_train: RunTrain, tmp_path: Path
) -> None:
    """They start from a source with more heads, update by Muon, and read telemetry of every layer."""
    source = trained(*tiny, "train.tokens=1280", f"runs_dir={tmp_path / 'source'}")
    settings = [*tiny, "optim=muon", "train.telemetry=true", "train.tokens=2560", "train.log_every=1"]
    settings += [f"init_from='{source}'", "attention=mqa"]
    alone = trained(*settings, f"runs_dir={tmp_path}")
    ran = run_train(*settings, "trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu", **LOOPBACK)
    assert (ran.code, ran.err) == (0, "")
    assert logged(ran.run, "val/loss") == pytest.approx(logged(alone, "val/loss"), abs=1e-4)
    for ours, theirs in zip(rows(ran.run), rows(alone), strict=True):
        for name, value in theirs.items():
            if name.startswith("telemetry/"):  # Muon rounds to bf16
                assert ours[name] == pytest.approx(value, rel=0.02), name


def test_an_optimizer_that_cannot_hold_shards_is_refused_before_training(tiny: list[str], command: Command) -> None:
    ran = command(*tiny, "optim=adafactor", "trainer=fsdp", "trainer.accelerator=cpu")
    assert ran.code == 2
    assert "error: optim=adafactor: " in ran.err
    assert "step" not in ran.out
