"""Slots of a machine, and the environment of a process in one; the GPUs are names."""

from typing import Any

import pytest

from llama_lab.launching.local_engine import make_slots, slot_environment, visible_gpus
from llama_lab.launching.settings import LocalSettings

FOUR = ["0", "1", "2", "3"]


def settings(slots_per_gpu: Any = 1, gpus_per_run: Any = 1, cpu_slots: Any = None) -> LocalSettings:
    return LocalSettings(slots_per_gpu, gpus_per_run, cpu_slots)


def devices(settings: LocalSettings, visible: list[str], environ: dict[str, str] | None = None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of every slot."""
    slots = make_slots(settings, "gpu", visible, cores=8)
    return [slot_environment(slot, 1, environ or {})["CUDA_VISIBLE_DEVICES"] for slot in slots]


def test_every_gpu_is_a_slot() -> None:
    assert devices(settings(), ["0", "1"]) == ["0", "1"]
    assert len(make_slots(settings(), "mps", [], 8)) == 1


def test_slots_that_share_a_gpu_fill_all_gpus_first() -> None:
    assert devices(settings(slots_per_gpu=2), ["0", "1"]) == ["0", "1", "0", "1"]
    assert len({slot.name for slot in make_slots(settings(slots_per_gpu=2), "gpu", ["0", "1"], 8)}) == 4


def test_a_run_on_two_gpus_has_two_of_its_own_and_a_rest_stays_idle() -> None:
    assert devices(settings(gpus_per_run=2), FOUR) == ["0,1", "2,3"]
    assert devices(settings(gpus_per_run=2), FOUR[:3]) == ["0,1"]


def test_the_gpus_that_the_launcher_was_given_are_shared_out_and_no_others() -> None:
    uuids = "GPU-8932f937, GPU-1d2a"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,5"}, 2) == ["3", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": uuids}, 2) == ["GPU-8932f937", "GPU-1d2a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,9,5"}, 1) == ["3"], "CUDA stops at the first that is not there"
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 0) == []
    assert visible_gpus({}, 2) == ["0", "1"]
    assert devices(settings(), ["3", "5"], {"CUDA_VISIBLE_DEVICES": "3,5"}) == ["3", "5"]


@pytest.mark.parametrize(
    ("count", "wanted", "cores", "slots", "threads"),
    [
        (None, None, 8, 4, 2),
        (None, None, 1, 1, 1),
        (4, None, 2, 4, 1),
        (None, 1, 8, 8, 1),
        (None, 8, 8, 1, 8),
        (None, 3, 8, 2, 3),
        (None, 4, 2, 1, 4),
        (2, 1, 8, 2, 4),
    ],
)
def test_cpu_slots_share_the_cores(count: int | None, wanted: int | None, cores: int, slots: int, threads: int) -> None:
    made = make_slots(settings(cpu_slots=count), "cpu", FOUR, cores, wanted)
    assert [(slot.gpus, slot.threads, slot.sharing) for slot in made] == [((), threads, slots)] * slots
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(made[0], 1, {})


def test_the_processes_of_a_run_share_its_threads_and_the_user_s_number_stays() -> None:
    (slot,) = make_slots(settings(cpu_slots=1), "cpu", [], 8)
    assert slot_environment(slot, 1, {})["OMP_NUM_THREADS"] == "8"
    assert slot_environment(slot, 2, {})["OMP_NUM_THREADS"] == "4"
    assert slot_environment(slot, 16, {})["OMP_NUM_THREADS"] == "1"
    assert slot_environment(slot, 1, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_process_does_not_take_itself_for_a_rank_of_another_run() -> None:
    (slot,) = make_slots(settings(cpu_slots=1), "cpu", [], 8)
    ranks = {"LOCAL_RANK": "1", "RANK": "1", "MASTER_PORT": "29500", "SLURM_NTASKS": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert slot_environment(slot, 1, {**ranks, "HOME": "/home"}) == {"HOME": "/home", "OMP_NUM_THREADS": "8"}
