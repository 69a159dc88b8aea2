"""`auto` is what is there: what a launcher has started, or the GPUs that can share the batch."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from llama_lab.data.data_module import micro_batches_per_step
from llama_lab.devices.hardware import LEAST_WIDTH, check_started, choose_accelerator, choose_hardware, choose_precision
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


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ("batch_size=16", 8),
        ("batch_size=16 micro_batch_size=2", 8),
        ("batch_size=16 micro_batch_size=4", 4),
        ("batch_size=12", 6),
        ("batch_size=14 micro_batch_size=2", 7),
        ("batch_size=11", 1),
        ("batch_size=2", 2),
    ],
)
def test_auto_takes_as_many_gpus_as_can_share_the_batch(settings: str, devices: int) -> None:
    overrides = [f"train.{setting}" for setting in settings.split()]
    run = planned(*overrides, "runs_dir=nowhere")
    hardware, train = run.hardware, run.cfg.train
    assert (hardware.devices, hardware.num_nodes, hardware.world_size) == (devices, 1, devices)
    accumulate = micro_batches_per_step(train.batch_size, train.micro_batch_size, devices)
    assert devices * accumulate * (train.micro_batch_size or 1) <= train.batch_size
    assert hardware.spare == 8 - devices
    told = f"trainer.devices=auto: trains on {devices} of 8 GPUs, "
    assert not hardware.spare or spare_devices(run).startswith(told)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("trainer", "devices"), [("gpu", 8), ("fsdp", 8), ("ddp", 8), ("auto trainer.devices=2", 2), ("cpu", 1)]
)
def test_other_trainers_take_all_gpus_too_or_what_they_are_told(trainer: str, devices: int) -> None:
    hardware = choose_hardware(compose_config(*f"trainer={trainer}".split()).trainer, 128, 16)
    assert (hardware.devices, hardware.spare) == (devices, 0)


@pytest.mark.parametrize(
    ("variables", "devices", "nodes"), [(TORCHRUN, 4, 2), (SRUN, 2, 3), ({**SRUN, **TORCHRUN}, 4, 2)]
)
def test_auto_is_what_a_launcher_has_started(variables: dict[str, str], devices: int, nodes: int, gpus: None) -> None:
    with patch.dict(os.environ, variables):
        for trainer in ("auto", "cpu", "ddp", "fsdp"):
            asked = ["trainer.devices=auto"] if trainer == "ddp" else []  # whose own default is all GPUs
            hardware = choose_hardware(compose_config(f"trainer={trainer}", *asked).trainer, 128, 24)
            assert (hardware.devices, hardware.num_nodes, hardware.spare) == (devices, nodes, 0)
            check_started(hardware)
            assert type(make_strategy(hardware)) is (FullySharded if trainer == "fsdp" else DataParallel)


BASH = {**SRUN, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "6"}  # as in `srun bash train.sh`
REFUSED = [
    (TORCHRUN, "devices=3", r"trainer\.devices=3: torchrun has started .*; .* trainer\.devices=auto"),
    (TORCHRUN, "num_nodes=5", r"trainer\.num_nodes=5: torchrun has started .*; .* trainer\.num_nodes=auto"),
    (SRUN, "devices=3", r"trainer\.devices=3: srun has started .*; .* trainer\.devices=auto"),
    (SRUN, "num_nodes=5", r"trainer\.num_nodes=5: srun has started .*; .* trainer\.num_nodes=auto"),
    ({}, "num_nodes=2", r"trainer\.num_nodes=2: start it with torchrun or srun, or set it to 1"),
    ({}, "devices=9", r"trainer\.devices=9: this machine has 8 gpu; choose 1 or more, -1 or auto"),
    ({**SRUN, "SLURM_NTASKS": "5"}, "devices=auto", r"SLURM_NTASKS=5: .*--ntasks-per-node"),
    (BASH, "accelerator=cpu", r"SLURM_JOB_NAME=bash: .*; give the job another name"),
]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("variables", "override", "message"), REFUSED)
def test_devices_other_than_those_started_are_refused(variables: dict[str, str], override: str, message: str) -> None:
    with patch.dict(os.environ, variables), pytest.raises(ConfigError, match=message):
        check_started(choose_hardware(compose_config(f"trainer.{override}").trainer, 128))


def test_a_run_that_does_not_match_its_launcher_is_refused(command: Command, tiny: list[str]) -> None:
    with patch.dict(os.environ, TORCHRUN):
        ran = command(*tiny, "trainer=cpu", "trainer.devices=1")
    told = "torchrun has started 4 processes on each of 2 nodes; start one per device, or set trainer.devices=auto"
    assert (ran.code, ran.err) == (2, f"error: trainer.devices=1: {told}\n")
    assert not list(ran.cwd.iterdir())


def test_an_interactive_shell_of_slurms_is_no_launcher() -> None:
    with patch.dict(os.environ, {**SRUN, "SLURM_JOB_NAME": "interactive"}):
        assert choose_hardware(compose_config("trainer=cpu").trainer, 128).devices == 1
        assert len(make_plugins()) == 1


def test_lightning_never_hands_a_job_of_slurms_in_again() -> None:
    with patch.dict(os.environ, SRUN):
        (environment,) = (plugin for plugin in make_plugins() if isinstance(plugin, SLURMEnvironment))
        assert not environment.auto_requeue
    assert not any(isinstance(plugin, SLURMEnvironment) for plugin in make_plugins())


@pytest.mark.usefixtures("gpus")
def test_in_a_sweep_inside_one_process_auto_is_one_device_and_launchers_with_processes_of_their_own_keep_it() -> None:
    for launcher in ("basic", "joblib", "local_gpus", "slurm", "ray"):
        cfg = compose_config("trainer=fsdp")
        check_devices(cfg, launcher)
        expected = 1 if launcher in ("basic", "joblib") else "auto"
        assert (cfg.trainer.devices, cfg.trainer.num_nodes) == (expected, expected)
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=2: hydra/launcher=ray trains on one machine; set"):
        check_devices(compose_config("trainer.num_nodes=2"), "ray")
    with pytest.raises(ConfigError, match=r"trainer\.devices=-1: hydra/launcher=basic trains on one device"):
        check_devices(compose_config("trainer=ddp"), "basic")


@pytest.mark.parametrize(
    ("wanted", "accelerator", "has_bf16", "width", "precision", "told"),
    [
        ("auto", "gpu", False, 512, "32-true", ""),
        ("auto", "gpu", True, 16, "bf16-mixed", ""),
        ("auto", "cpu", True, LEAST_WIDTH, "bf16-mixed", "has native bf16"),
        ("auto", "cpu", True, LEAST_WIDTH - 1, "32-true", f"model.dim={LEAST_WIDTH}"),
        ("auto", "cpu", False, 512, "32-true", "no native bf16"),
        ("bf16-mixed", "cpu", False, 512, "bf16-mixed", "is slow"),
        ("32-true", "cpu", False, 512, "32-true", ""),
        ("auto", "mps", False, 512, "32-true", ""),
    ],
)
def test_auto_is_bf16_where_the_device_has_it_and_the_model_gains(
    wanted: str, accelerator: str, has_bf16: bool, width: int, precision: str, told: str
) -> None:
    chosen, why = choose_precision(wanted, accelerator, has_bf16, width)
    assert chosen == precision
    assert told in why
    assert bool(told) == bool(why)


def test_a_gpu_without_bf16_refuses_it_and_nothing_trains_in_fp16() -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.precision=bf16-mixed: "):
        choose_precision("bf16-mixed", "gpu", False, 512)
    with pytest.raises(ConfigError, match=r"^trainer\.precision=16-mixed: .*did you mean bf16-mixed"):
        choose_precision("16-mixed", "cpu", True, 512)


def test_the_best_accelerator_is_taken_and_a_missing_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cuda, mps, best in ((True, False, "gpu"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda mps=mps: mps)
        assert choose_accelerator("auto") == best
        assert choose_accelerator("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"^trainer\.accelerator=gpu: not on this machine; choose auto or cpu$"):
        choose_accelerator("gpu")
