"""`auto` is what is there: what a launcher has started, or the GPUs that can share the batch."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from omegaconf import OmegaConf

from llama_lab.config.schema import check_kinds, flatten
from llama_lab.data.data_module import micro_batches_per_step
from llama_lab.devices.hardware import check_started, choose_hardware
from llama_lab.devices.strategy import DataParallel, FullySharded, make_plugins, make_strategy
from llama_lab.training.command import spare_devices
from llama_lab.training.prepare import check_devices
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config
from tests.conftest import Command
from tests.training.tiny import planned

TORCHRUN = {"TORCHELASTIC_RUN_ID": "run", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}
SRUN = {
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "1234",
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Below no launcher."""
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            del os.environ[name]
        yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with eight GPUs, as far as PyTorch tells."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    return 8


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (["train.batch_size=16"], 8),
        (["train.batch_size=16", "train.micro_batch_size=2"], 8),
        (["train.batch_size=16", "train.micro_batch_size=4"], 4),
        (["train.batch_size=12"], 6),
        (["train.batch_size=14", "train.micro_batch_size=2"], 7),
        (["train.batch_size=11"], 1),
        (["train.batch_size=2"], 2),
        (["train.batch_size=16", "trainer=gpu"], 8),
        (["train.batch_size=16", "trainer=fsdp"], 8),
        (["train.batch_size=16", "trainer=ddp"], 8),
        (["train.batch_size=16", "trainer.devices=2"], 2),
        (["train.batch_size=16", "trainer=cpu"], 1),
    ],
)
def test_auto_takes_as_many_gpus_as_can_share_the_batch(overrides: list[str], devices: int, gpus: int) -> None:
    run = planned(*overrides, "runs_dir=nowhere")
    assert (run.hardware.devices, run.hardware.num_nodes, run.hardware.world_size) == (devices, 1, devices)
    batch_size, micro_batch_size = run.cfg.train.batch_size, run.cfg.train.micro_batch_size
    accumulate = micro_batches_per_step(batch_size, micro_batch_size, run.hardware.world_size)
    assert run.hardware.world_size * accumulate * (micro_batch_size or 1) <= batch_size
    assert run.hardware.spare == (0 if any("devices" in o or "cpu" in o for o in overrides) else 8 - devices)


def test_gpus_that_are_left_alone_are_told_in_one_line(gpus: int) -> None:
    run = planned("train.batch_size=12", "train.micro_batch_size=2", "runs_dir=nowhere")
    assert spare_devices(run) == (
        "trainer.devices=auto: trains on 6 of 8 GPUs, since more cannot share train.batch_size=12 with "
        "train.micro_batch_size=2"
    )


def test_more_gpus_than_there_are_are_refused(gpus: int) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.devices=9: this machine has 8 gpu; choose 1 or more, -1 or auto"):
        planned("trainer.devices=9")


def test_without_gpus_auto_is_the_one_cpu() -> None:
    hardware = choose_hardware(compose_config("trainer=cpu").trainer, 16)
    assert (hardware.devices, hardware.num_nodes) == (1, 1)
    assert make_strategy(hardware) == "auto"


@pytest.mark.parametrize(
    ("variables", "devices", "nodes"), [(TORCHRUN, 4, 2), (SRUN, 2, 3), ({**SRUN, **TORCHRUN}, 4, 2)]
)
def test_below_a_launcher_auto_is_what_it_has_started(
    variables: dict[str, str], devices: int, nodes: int, gpus: int
) -> None:
    with patch.dict(os.environ, variables):
        for trainer in ("auto", "cpu", "ddp", "fsdp"):
            asked = ["trainer.devices=auto"] if trainer == "ddp" else []  # whose own default is all GPUs
            hardware = choose_hardware(compose_config(f"trainer={trainer}", *asked).trainer, 24)
            assert (hardware.devices, hardware.num_nodes, hardware.spare) == (devices, nodes, 0)
            check_started(hardware)
            assert type(make_strategy(hardware)) is (FullySharded if trainer == "fsdp" else DataParallel)


@pytest.mark.parametrize("key", ["devices=3", "num_nodes=5"])
@pytest.mark.parametrize(("launcher", "variables"), [("torchrun", TORCHRUN), ("srun", SRUN)])
def test_numbers_that_differ_from_what_was_started_are_refused(
    key: str, launcher: str, variables: dict[str, str]
) -> None:
    with patch.dict(os.environ, variables):
        hardware = choose_hardware(compose_config("trainer=cpu", f"trainer.{key}").trainer)
        name = key.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"trainer\.{key}: {launcher} has started .*; .* trainer\.{name}=auto"):
            check_started(hardware)


def test_a_run_below_a_launcher_that_it_does_not_match_is_refused_before_anything_is_written(
    command: Command, tiny: list[str]
) -> None:
    with patch.dict(os.environ, TORCHRUN):
        ran = command(*tiny, "trainer=cpu", "trainer.devices=1")
    assert (ran.code, ran.err) == (
        2,
        "error: trainer.devices=1: torchrun has started 4 processes on each of 2 nodes; start one per device, or set "
        "trainer.devices=auto\n",
    )
    assert not list(ran.cwd.iterdir())


def test_several_nodes_without_a_launcher_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=2: start it with torchrun or srun, or set it to 1"):
        choose_hardware(compose_config("trainer=cpu", "trainer.num_nodes=2").trainer)


def test_tasks_that_srun_spread_unevenly_are_refused() -> None:
    with (
        patch.dict(os.environ, {**SRUN, "SLURM_NTASKS": "5"}),
        pytest.raises(ConfigError, match=r"SLURM_NTASKS=5: .*--ntasks-per-node"),
    ):
        choose_hardware(compose_config("trainer=cpu").trainer)


def test_an_interactive_shell_of_slurms_is_no_launcher() -> None:
    with patch.dict(os.environ, {**SRUN, "SLURM_JOB_NAME": "interactive"}):
        assert choose_hardware(compose_config("trainer=cpu").trainer).devices == 1
        assert len(make_plugins()) == 1


def test_tasks_that_lightning_takes_for_shells_are_refused() -> None:
    """As those of `srun bash train.sh`, which is a job named bash."""
    hardware = choose_hardware(compose_config("trainer=cpu").trainer)
    with (
        patch.dict(os.environ, {**SRUN, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "6"}),
        pytest.raises(ConfigError, match=r"SLURM_JOB_NAME=bash: .*; give the job another name"),
    ):
        check_started(hardware)


def test_lightning_never_hands_a_job_of_slurms_in_again() -> None:
    with patch.dict(os.environ, SRUN):
        (environment,) = (plugin for plugin in make_plugins() if isinstance(plugin, SLURMEnvironment))
        assert not environment.auto_requeue
    assert not any(isinstance(plugin, SLURMEnvironment) for plugin in make_plugins())


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_in_a_sweep_inside_one_process_auto_is_one_device(launcher: str, gpus: int) -> None:
    cfg = compose_config("trainer=fsdp")
    check_devices(cfg, launcher)
    assert (cfg.trainer.devices, cfg.trainer.num_nodes) == (1, 1)
    with pytest.raises(ConfigError, match=r"trainer\.devices=-1: hydra/launcher=basic trains on one device"):
        check_devices(compose_config("trainer=ddp"), "basic")


@pytest.mark.parametrize("launcher", ["local_gpus", "slurm", "ray"])
def test_launchers_with_processes_of_their_own_keep_auto(launcher: str) -> None:
    cfg = compose_config()
    check_devices(cfg, launcher)
    assert (cfg.trainer.devices, cfg.trainer.num_nodes) == ("auto", "auto")


@pytest.mark.parametrize("key", ["devices", "num_nodes"])
def test_no_other_word_than_auto_is_a_number(key: str) -> None:
    defaults = flatten(OmegaConf.to_container(compose_config(), resolve=True))
    with pytest.raises(ConfigError, match=rf"trainer\.{key}=all: must be a whole number or auto"):
        check_kinds(compose_config(f"trainer.{key}=all"), defaults)
