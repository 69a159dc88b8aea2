"""One device, several, several nodes, sharded: the same global batch, the same curve, each validation window once."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from llama_lab.data.data_module import TokenDataModule
from llama_lab.data.open import open_dataset
from llama_lab.data.windows import ValWindows
from llama_lab.runs.checkpoint import model_weights
from llama_lab.runs.folder import RunFolder
from llama_lab.runs.stored import Summary
from llama_lab.training.command import train_run
from tests.composing import decoder
from tests.conftest import TRAIN, Ran, RunTrain, last_of_each
from tests.data.test_data_module import on_device
from tests.preloaded import PreloadedPython
from tests.training.tiny import nll_by_hand, pieces, planned, repeatable, rows

STEPS = 62
RUN = [
    "model.max_seq_len=28",
    f"train.tokens={STEPS * 8 * 28}",
    "train.micro_batch_size=2",
    "train.log_every=1",
    "train.evaluations=3",  # after steps 21, 42 and 62
    "train.ema=0.9",
]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def one(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one device."""
    run = planned(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('one')}")
    assert train_run(run) == "done"
    return run.folder.path


def assert_same_curve(ran: Path, one: Path) -> None:
    """Every training loss to 1e-5, every validation loss to 1e-6, and nothing more or less."""
    ours, theirs = repeatable(ran), repeatable(one)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert len(theirs) == STEPS + 3
    for row, other in zip(ours, theirs, strict=True):
        for key, value in row.items():
            limit = {"train/loss": 1e-5, "val/loss": 1e-6}.get(key, 1e-4 * abs(other[key]))
            assert value == pytest.approx(other[key], abs=limit, rel=0), f"{key} at step {row['step']}"


@pytest.mark.parametrize("devices", [2, 4])
def test_what_devices_read_makes_the_gradient_and_the_validation_loss_of_one(
    devices: int, tiny: list[str], tmp_path: Path
) -> None:
    """In one process: gradients are averaged over devices, as DDP does, and the sums of validation are added."""
    parts = pieces(*tiny, *RUN, f"runs_dir={tmp_path}")
    module = parts.module

    def together(devices: int) -> tuple[torch.Tensor, float]:
        module.zero_grad()
        module._val_sums = []
        for rank in range(devices):
            data = on_device(TokenDataModule(parts.dataset, 28, 8, 2, seed=1), rank, devices)
            micro_batches = next(iter(data.train_dataloader()))
            for inputs, targets in micro_batches:
                (module.loss(inputs, targets)[1] / len(micro_batches) / devices).backward()
            for i, batch in enumerate(data.val_dataloader()[0]):
                with torch.no_grad():
                    module.validation_step(batch, i)
        ((nll, count, *_),) = module._val_sums
        assert count == parts.dataset.index.val.tokens
        return torch.cat([p.grad.flatten() for p in module.model.parameters() if p.grad is not None]), nll / count

    (gradient, loss), (of_one, loss_of_one) = together(devices), together(1)
    assert (gradient - of_one).norm() < 1e-5 * of_one.norm()
    assert loss == pytest.approx(loss_of_one, rel=1e-6)


def torchrun(
    python: PreloadedPython, cwd: Path, environment: Mapping[str, str], nodes: int, per_node: int, overrides: list[str]
) -> Ran:
    """A run that torchrun starts in so many processes on each of the nodes that this machine plays."""
    layout = [f"--nnodes={nodes}", f"--nproc-per-node={per_node}", f"--master-port={free_port()}"]
    command = [python.executable, "-m", "torch.distributed.run", "--master-addr=127.0.0.1", *layout]
    started = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", str(TRAIN), *last_of_each(overrides)],
            cwd=cwd,
            env={**environment, **LOOPBACK},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(nodes)
    ]
    out, err = zip(*(process.communicate() for process in started), strict=True)
    return Ran(max(process.returncode for process in started), "".join(out), "".join(err), cwd)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


WORLDS = {
    "2 devices": ["trainer=ddp", "trainer.devices=2"],
    "4 devices": ["trainer=ddp", "trainer.devices=4"],
    "4 shards": ["trainer=fsdp", "trainer.devices=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_devices_gives_the_curve_of_one(
    world: str,
    one: Path,
    tiny: list[str],
    run_train: RunTrain,
    preloaded: PreloadedPython,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    overrides = [*tiny, *RUN, *WORLDS[world], "trainer.accelerator=cpu"]
    if world == "2 devices":
        ran = run_train(*overrides, **LOOPBACK)
    else:  # more than the cores that a machine may have, which only torchrun starts
        ran = torchrun(preloaded, tmp_path, environment, 1, 4, overrides)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("│ parameters") == 1, "each rank prints"
    assert_same_curve(ran.run, one)
    summary = Summary.load(ran.run).metrics
    devices = int(world[0])
    assert summary["perf/tokens_per_second"] == pytest.approx(devices * summary["perf/tokens_per_second_per_device"])


@pytest.mark.slow
def test_muon_on_shards_is_muon_on_one_device(tiny: list[str], run_train: RunTrain, tmp_path: Path) -> None:
    """Each update needs a whole matrix."""
    overrides = [*tiny, "optim=muon", "train.tokens=6000", "train.log_every=1"]
    alone = planned(*overrides, f"runs_dir={tmp_path}")
    assert train_run(alone) == "done"
    ran = run_train(*overrides, "trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu", **LOOPBACK)
    assert (ran.code, ran.err) == (0, "")
    losses = [
        [row["train/loss"] for row in repeatable(path) if "train/loss" in row] for path in (ran.run, alone.folder.path)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
def test_an_optimizer_that_cannot_hold_shards_is_refused_before_training(tiny: list[str], run_train: RunTrain) -> None:
    ran = run_train(
        *tiny, "optim=adafactor", "trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu", **LOOPBACK
    )
    assert ran.code == 2
    assert "error: optim=adafactor: PyTorch's cannot hold sharded parameters; choose trainer=ddp" in ran.err
    assert "step" not in ran.out


def listening(session: int) -> set[str]:
    """The addresses on which the processes of a session listen, as `ss` finds them."""
    pids = subprocess.run(["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True).stdout.split()
    found = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3] for line in found if any(f"pid={pid}," in line for pid in pids)}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("ss") is None, reason="ss is not installed")
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_the_processes_of_one_machine_listen_on_loopback_alone(
    trainer: str, tiny: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, str(TRAIN), *tiny, f"trainer={trainer}", "trainer.devices=2", "trainer.accelerator=cpu"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    addresses: set[str] = set()
    while process.poll() is None:
        addresses |= listening(process.pid)
        time.sleep(0.05)
    assert process.returncode == 0, (tmp_path / "out").read_text()
    assert addresses, "nothing was seen to listen, and this test shows nothing"
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses


@pytest.mark.slow
def test_the_validation_windows_divide_by_no_number_of_devices_and_each_is_read_once(one: Path) -> None:
    dataset = open_dataset(OmegaConf.load(one / "resolved.yaml"))  # type: ignore[arg-type]
    windows = len(ValWindows(dataset.val, 28))
    assert windows % 2, "the devices would share the windows evenly, and the test above would prove less"
    model = decoder("model.max_seq_len=28", vocab_size=257)
    model.load_state_dict(model_weights(torch.load(RunFolder(one).checkpoint, weights_only=True)))
    paid = nll_by_hand(model, dataset.val.tolist())
    assert len(paid) == len(dataset.val) - 1
    assert rows(one)[-1]["val/loss"] == pytest.approx(sum(paid) / len(paid), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node", "trainer"), [(1, 2, "fsdp"), (2, 1, "cpu")])
def test_what_torchrun_has_started_is_used_without_being_told(
    nodes: int,
    per_node: int,
    trainer: str,
    one: Path,
    tiny: list[str],
    preloaded: PreloadedPython,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    overrides = [*tiny, *RUN, f"trainer={trainer}", "trainer.accelerator=cpu"]
    ran = torchrun(preloaded, tmp_path, environment, nodes, per_node, overrides)
    assert ran.code == 0, ran.err
    assert ran.out.count("│ parameters") == 1, "each rank prints"
    assert_same_curve(ran.run, one)
