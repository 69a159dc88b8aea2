"""What launchers refuse, by its key: settings that cannot be, and runs that their machines cannot serve; slots."""

from importlib.util import find_spec
from typing import Any

import pytest
from omegaconf import OmegaConf

from llama_lab.devices.site import Site
from llama_lab.launching.local_engine import make_slots, slot_environment, visible_gpus
from llama_lab.launching.ray_engine import RayEngine
from llama_lab.launching.settings import LocalSettings, RaySettings, SlurmSettings, seconds_of
from llama_lab.util.errors import ConfigError
from tests.composing import compose_config

FOUR = ["0", "1", "2", "3"]
COUNT = "must be a positive whole number"


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (LocalSettings, {"gpus_per_run": 1.5}, f"gpus_per_run=1.5: {COUNT}"),
        (LocalSettings, {"cpu_slots": "many"}, f"cpu_slots=many: {COUNT}"),
        (LocalSettings, {"slots_per_gpu": 2, "gpus_per_run": 2}, "slots_per_gpu=2: a GPU is shared or one of"),
        (SlurmSettings, {"time": "soon"}, "time=soon: must be minutes, or as Slurm writes it"),
        (SlurmSettings, {"time": 2}, "time=2: must be longer than hydra.launcher.signal_seconds"),
        (SlurmSettings, {"at_a_time": 0}, f"at_a_time=0: {COUNT}"),
        (SlurmSettings, {"sbatch": {"nodes": 2}}, "sbatch.nodes=2: that is trainer.num_nodes of the run"),
        (RaySettings, {"gpus_per_run": 1.5}, "gpus_per_run=1.5: must be a whole number, or a fraction"),
        (RaySettings, {"cpus_per_run": None}, "cpus_per_run=null: must be a positive number"),
        (RaySettings, {"max_retries": -1}, "max_retries=-1: must be a whole number, 0 for none"),
        (RaySettings, {"address": "ray://head:10001"}, "address=ray://head:10001: must be auto, or host:"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        kind(**values)
    assert str(error.value).startswith(f"hydra.launcher.{message}")


@pytest.mark.parametrize(
    ("values", "accelerator", "message"),
    [
        ({"gpus_per_run": 5}, "gpu", "gpus_per_run=5: this process sees 4 GPU"),
        ({"cpu_slots": 2}, "gpu", "cpu_slots=2: the runs train on GPUs; leave it out, or add"),
        ({"slots_per_gpu": 2}, "cpu", "slots_per_gpu=2: the runs train on the CPU; leave it out"),
    ],
)
def test_slots_that_are_not_there_are_refused(values: dict[str, Any], accelerator: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_slots(LocalSettings(**values), accelerator, FOUR, 8)
    assert str(error.value).startswith(f"hydra.launcher.{message}")


ON_GPUS = Site("ray", ("gpu",), gpus=1, elsewhere=True)
ON_CPUS = Site("ray", ("cpu",), gpus=1, elsewhere=True)
ON_SLURM = Site("slurm", ("cpu", "gpu"), elsewhere=True)


@pytest.mark.parametrize(
    ("site", "overrides", "message"),
    [
        (
            ON_GPUS,
            ["trainer.devices=2"],
            "trainer.devices=2: hydra/launcher=ray gives each run hydra.launcher.gpus",
        ),
        (ON_CPUS, ["trainer=cpu", "trainer.precision=fp8"], "trainer.precision=fp8: this cpu cannot train in it"),
        (ON_SLURM, ["trainer.devices=-1"], "trainer.devices=-1: hydra/launcher=slurm needs a number"),
        (ON_SLURM, ["trainer.accelerator=tpu"], "trainer.accelerator=tpu: hydra/launcher=slurm supports auto, gpu and"),
    ],
)
def test_hardware_that_a_launcher_cannot_give_a_run_is_refused(site: Site, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        site.hardware(compose_config(*overrides).trainer, 128, 1)
    assert str(error.value).startswith(message)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'llama-lab[ray]'")
@pytest.mark.parametrize(
    ("values", "wanted", "message"),
    [
        ({"cpus_per_run": 3}, "cpu", "cpus_per_run=3: no node that could has over 2 CPUs"),
        ({"gpus_per_run": 3}, "gpu", "gpus_per_run=3: no node of the cluster has over 2 GPUs"),
    ],
)
def test_what_no_node_of_a_ray_cluster_could_run_is_refused(
    values: dict[str, Any], wanted: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayEngine, "_nodes", [(2, 2)])
    config = OmegaConf.create({"trainer": {"accelerator": wanted}})
    with pytest.raises(ConfigError) as error:
        RayEngine(RaySettings(address="head:1", **values), config).open()
    assert str(error.value).startswith(f"hydra.launcher.{message}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 5400),
        ("2:30", 150),
        ("4:00:00", 14400),
        ("1-0:30", 88200),
        ("0-0:5:1", 301),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: int | str, seconds: int) -> None:
    assert seconds_of(text) == seconds


# Slots of a machine, and the environment of a process in one; the GPUs are names


def devices(settings: LocalSettings, visible: list[str], environ: dict[str, str] | None = None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of every slot."""
    slots = make_slots(settings, "gpu", visible, cores=8)
    assert len({slot.name for slot in slots}) == len(slots)
    return [slot_environment(slot, 1, environ or {})["CUDA_VISIBLE_DEVICES"] for slot in slots]


@pytest.mark.parametrize(
    ("settings", "visible", "expected"),
    [
        (LocalSettings(), FOUR[:2], ["0", "1"]),
        (LocalSettings(slots_per_gpu=2), FOUR[:2], ["0", "1", "0", "1"]),
        (LocalSettings(gpus_per_run=2), FOUR, ["0,1", "2,3"]),
    ],
)
def test_slots_fill_all_gpus_before_they_share(
    settings: LocalSettings, visible: list[str], expected: list[str]
) -> None:
    assert devices(settings, visible) == expected
    assert len(make_slots(LocalSettings(), "mps", [], 8)) == 1


def test_the_gpus_that_the_launcher_was_given_are_shared_out_and_no_others() -> None:
    uuids = "GPU-8932f937, GPU-1d2a"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}, 2) == ["3", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": uuids}, 2) == ["GPU-8932f937", "GPU-1d2a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,9,5"}, 1) == ["3"], "CUDA stops at the first that is not there"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 0) == []
    assert visible_gpus({}, 2) == ["0", "1"]
    assert devices(LocalSettings(), ["3", "5"], {"CUDA_VISIBLE_DEVICES": "3,5"}) == ["3", "5"]


@pytest.mark.parametrize(
    ("count", "wanted", "cores", "slots", "threads"),
    [
        (None, None, 8, 4, 2),
        (None, None, 1, 1, 1),
        (4, None, 2, 4, 1),
        (None, 1, 8, 8, 1),
        (2, 1, 8, 2, 4),
    ],
)
def test_cpu_slots_share_the_cores(count: int | None, wanted: int | None, cores: int, slots: int, threads: int) -> None:
    made = make_slots(LocalSettings(cpu_slots=count), "cpu", FOUR, cores, wanted)
    assert [(slot.gpus, slot.threads, slot.sharing) for slot in made] == [((), threads, slots)] * slots
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(made[0], 1, {})


def test_the_processes_of_a_run_share_its_threads_and_the_user_s_number_stays() -> None:
    (slot,) = make_slots(LocalSettings(cpu_slots=1), "cpu", [], 8)
    assert slot_environment(slot, 1, {})["OMP_NUM_THREADS"] == "8"
    assert slot_environment(slot, 2, {})["OMP_NUM_THREADS"] == "4"
    assert slot_environment(slot, 16, {})["OMP_NUM_THREADS"] == "1"
    assert slot_environment(slot, 1, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_process_does_not_take_itself_for_a_rank_of_another_run() -> None:
    (slot,) = make_slots(LocalSettings(cpu_slots=1), "cpu", [], 8)
    ranks = {"LOCAL_RANK": "1", "RANK": "1", "MASTER_PORT": "29500", "SLURM_NTASKS": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert slot_environment(slot, 1, {**ranks, "HOME": "/home"}) == {"HOME": "/home", "OMP_NUM_THREADS": "8"}
