"""How many threads the runs of a study have on a CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from llama_lab.devices.hardware import Hardware
from llama_lab.runs.stored import Environment
from llama_lab.study.design import threads
from llama_lab.study.design.threads import SMALL, threads_per_run

CPU = Hardware("cpu", 1, 1, "32-true", "cpu")
CONFIG = OmegaConf.create({"train": {"batch_size": 8, "micro_batch_size": 2}, "model": {"max_seq_len": 16}})


def plan(folder: Path, *flops: float, hardware: Hardware = CPU) -> Any:
    """A plan whose arms take so many training FLOPs per micro-batch, with a run each."""
    arms = []
    for i, each in enumerate(flops):
        run = SimpleNamespace(run=SimpleNamespace(hardware=hardware, folder=SimpleNamespace(path=folder / str(i))))
        cost = SimpleNamespace(train_flops_per_token=each / 32)
        arms.append(SimpleNamespace(cost=cost, draft=SimpleNamespace(cfg=CONFIG), runs=[run]))
    return SimpleNamespace(arms=arms, tuning=[], runs=[arm.runs[0] for arm in arms], dataset=None)


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of threads is set, and memory is enough."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "copies_fit", lambda run, dataset, copies: True)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)


def test_the_runs_of_small_models_have_one_thread_and_those_of_large_ones_all(tmp_path: Path) -> None:
    assert threads_per_run(plan(tmp_path, SMALL / 10, SMALL)) == 1
    assert threads_per_run(plan(tmp_path, SMALL / 10, 1.01 * SMALL)) == 8, "one arm decides for all"


def test_small_models_have_all_threads_where_copies_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = plan(tmp_path, SMALL / 10, SMALL)
    monkeypatch.setattr(
        threads, "copies_fit", lambda run, dataset, copies: (run, copies) != (few.arms[1].runs[0].run, 8)
    )
    assert threads_per_run(few) == 8


def test_a_users_number_of_threads_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 3)
    assert threads_per_run(plan(tmp_path, SMALL)) == 3


def test_a_study_goes_on_with_the_threads_that_its_runs_began_with(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    Environment(cpu_threads=2, versions={"llama-lab": "0.4.0"}).save(tmp_path / "1")
    assert threads_per_run(plan(tmp_path, SMALL, SMALL)) == 2


@pytest.mark.parametrize("hardware", [("gpu", 1, 1), ("cpu", 2, 1)])
def test_other_hardware_shares_no_cores(tmp_path: Path, hardware: tuple[str, int, int]) -> None:
    assert threads_per_run(plan(tmp_path, SMALL, hardware=Hardware(*hardware, "32-true", "it"))) is None
