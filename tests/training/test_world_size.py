"""One device, several, several nodes, sharded: the same global batch, the same curve, each validation window once."""

import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_lab.data.data_module import TokenDataModule
from llama_lab.data.windows import ValWindows
from llama_lab.runs.stored import Summary
from tests.conftest import TRAIN, Command, RunTrain, last_of_each
from tests.data.test_data_module import on_device
from tests.preloaded import PreloadedPython
from tests.processes import at_work_in, listening
from tests.training.tiny import LOOPBACK, logged, on_pairs, pieces, repeatable, trained

STEPS = 62
RUN = [
    "model.max_seq_len=28",
    f"train.tokens={STEPS * 8 * 28}",
    "train.micro_batch_size=2",
    "train.log_every=1",
    "train.evaluations=3",  # after steps 21, 42 and 62
    "train.ema=0.9",
    "ffn=moe",
    "model.ffn.n_experts=4",
    "model.ffn.balance_bias=0.01",
]


@pytest.fixture(scope="module")
def one(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one device."""
    return trained(*tiny, *RUN, f"runs_dir={tmp_path_factory.mktemp('one')}")


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
def test_devices_make_the_gradient_and_the_loss_of_one(devices: int, tiny: list[str], tmp_path: Path) -> None:
    """In one process: gradients are averaged over devices, as DDP does, and the sums of validation are added."""
    parts = pieces(*tiny, *RUN, f"runs_dir={tmp_path}")
    module = parts.module
    assert len(ValWindows(parts.dataset.val, 28)) % 2, "the devices would share the windows evenly"

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


WORLDS = {
    "2 devices": (0, 2, ["trainer=ddp", "trainer.devices=2"]),
    "2 shards": (0, 2, ["trainer=fsdp", "trainer.devices=2"]),
    "2 nodes of torchrun with 2 devices each": (2, 2, ["trainer=cpu"]),
    "4 shards of torchrun": (1, 4, ["trainer=fsdp"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_any_number_of_devices_gives_the_curve_of_one(
    world: str, one: Path, tiny: list[str], preloaded: PreloadedPython, environment: dict[str, str], tmp_path: Path
) -> None:
    """What torchrun has started is used without being told. Without it, nobody listens but on loopback."""
    nodes, devices, settings = WORLDS[world]
    commands = [[str(TRAIN), *last_of_each([*tiny, *RUN, *settings, "trainer.accelerator=cpu"])]]
    if nodes:
        layout = [f"--nnodes={nodes}", f"--nproc-per-node={devices}", f"--master-port={free_port()}"]
        torchrun = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", *layout]
        commands = [[*torchrun, f"--node-rank={node}", *commands[0]] for node in range(nodes)]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = {**environment, **(LOOPBACK if nodes else {})}
    started = [
        subprocess.Popen([preloaded.executable, *command], cwd=tmp_path, env=variables, text=True, **pipes)
        for command in commands
    ]
    addresses: set[str] = set()
    while any(process.poll() is None for process in started):
        addresses |= listening(at_work_in(tmp_path))
        time.sleep(0.3)
    out, err = map("".join, zip(*(process.communicate() for process in started), strict=True))
    assert {process.returncode for process in started} == {0}, err
    assert out.count("│ parameters") == 1, "each rank prints"
    (status,) = tmp_path.rglob("status.json")
    assert_same_curve(status.parent, one)
    speeds = Summary.load(status.parent).metrics
    all_of_one = speeds["perf/tokens_per_second_per_device"] * devices * max(nodes, 1)
    assert speeds["perf/tokens_per_second"] == pytest.approx(all_of_one)
    if not nodes:
        assert (err, addresses) == ("", {"127.0.0.1"})


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
def test_muon_on_shards_is_muon_on_one_device(tiny: list[str], run_train: RunTrain, tmp_path: Path) -> None:
    """Each update needs a whole matrix."""
    overrides = [*tiny, "optim=muon", "train.tokens=2560", "train.log_every=1"]
    alone = trained(*overrides, f"runs_dir={tmp_path}")
    ran = run_train(*overrides, "trainer=fsdp", "trainer.devices=2", "trainer.accelerator=cpu", **LOOPBACK)
    assert (ran.code, ran.err) == (0, "")
    assert logged(ran.run, "train/loss") == pytest.approx(logged(alone, "train/loss"), abs=1e-4)


OBJECTIVES = [
    "objective=prefix",
    "objective=span family=encoder_decoder",
    "objective=masked family=encoder train.sample_tokens=0",
]


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_devices_predict_the_same_of_each_window_and_weigh_it_alike(
    objective: str, tiny: list[str], run_train: RunTrain, tmp_path: Path
) -> None:
    overrides = [*tiny, *objective.split(), "train.tokens=2560", "train.log_every=1", "train.micro_batch_size=2"]
    alone = trained(*overrides, f"runs_dir={tmp_path}")
    ran = run_train(*overrides, "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", **LOOPBACK)
    assert (ran.code, ran.err) == (0, "")
    for metric in ("train/loss", "optim/grad_norm", "val/loss"):
        assert logged(ran.run, metric) == pytest.approx(logged(alone, metric), abs=1e-5)


@pytest.mark.slow
def test_two_devices_train_on_the_same_pairs_as_one(tiny: list[str], run_train: RunTrain, tmp_path: Path) -> None:
    overrides = [*on_pairs(tiny, tmp_path), "family=encoder_decoder", "train.tokens=2560", "train.log_every=1"]
    alone = trained(*overrides, f"runs_dir={tmp_path}")
    ran = run_train(*overrides, "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", **LOOPBACK)
    assert (ran.code, ran.err) == (0, "")
    for metric in ("train/loss", "optim/grad_norm", "val/loss", "val/exact_match"):
        assert logged(ran.run, metric) == pytest.approx(logged(alone, metric), abs=1e-5)


def test_an_optimizer_that_cannot_hold_shards_is_refused_before_training(tiny: list[str], command: Command) -> None:
    ran = command(*tiny, "optim=adafactor", "trainer=fsdp", "trainer.accelerator=cpu")
    told = "error: optim=adafactor: PyTorch's cannot hold sharded parameters; choose trainer=ddp"
    assert (ran.code, told in ran.err) == (2, True), ran.err
    assert "step" not in ran.out
