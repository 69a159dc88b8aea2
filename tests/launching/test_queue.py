"""The queue with tasks that do not train: what goes on beside what, and what a crash leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from llama_lab.launching import launch, process
from llama_lab.runs.environment import RUNS_AT_ONCE
from llama_lab.runs.folder import write_yaml
from llama_lab.runs.stored import Environment
from llama_lab.util.version import __version__
from tests.composing import compose_config
from tests.conftest import TRAIN, Ran
from tests.launching.conftest import ON_CPU, Sweep, folder, mark, status
from tests.launching.tasks import PATIENCE, wait_for


def test_two_slots_run_two_jobs_at_the_same_time(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=2", "train.prompt=meet", "seed=1,2")
    assert (ran.code, ran.err) == (0, ""), "each waits for the other"
    assert "2 runs on 2 slots: cpu 1, cpu 2" in ran.out
    assert "a/seed=2: begins on cpu 2" in ran.out
    assert len(re.findall(r"a/seed=[12]: done, val loss 1\.0000, in \d+ s", ran.out)) == 2
    share = re.search(r"\n2 done, in \d+ s; its slots were at work ([0-9.]+)% of that\n", ran.out)
    assert share is not None
    assert 0 < float(share[1]) <= 100
    assert "\x1b" not in ran.out
    assert mark(ran, 1)["pid"] != mark(ran, 2)["pid"] != os.getpid()
    assert mark(ran, 1)["argv"] == sys.argv, "which environment.json records"


def test_runs_on_one_cpu_are_forks_of_one_server_which_others_are_not(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=3", "seed=1,2,3", "trainer.devices=1")
    assert ran.code == 0
    (server,) = {mark(ran, seed)["parent"] for seed in (1, 2, 3)}
    assert b"forkserver" in Path(f"/proc/{server}/cmdline").read_bytes()
    for seed in (1, 2, 3):
        environment = mark(ran, seed)["environment"]
        assert (environment["OMP_NUM_THREADS"], mark(ran, seed)["threads"]) == ("1", 1)
        assert environment[RUNS_AT_ONCE] == "3"
    ran = sweep(*ON_CPU, "trainer.devices=2", "seed=4")
    assert mark(ran, 4)["parent"] != server


def test_what_is_done_is_passed_over_without_a_process(sweep: Sweep) -> None:
    overrides = (*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1,2")
    first = sweep(*overrides)
    assert first.code == 0
    resolved(first, 1)
    (first.cwd / "mark1").unlink()
    again = sweep(*overrides, "train.log_every=3")
    assert again.code == 0
    assert not (first.cwd / "mark1").exists()
    assert "seed=1 train.log_every=3: done before, passed over" in again.out


def resolved(ran: Ran, seed: int) -> None:
    """Give a run the config and the environment that a real one would have left."""
    overrides = [o for o in sys.argv[2:] if not o.startswith(("hydra", "seed="))]
    write_yaml(
        OmegaConf.to_container(compose_config(*overrides, f"seed={seed}"), resolve=True),
        folder(ran, seed) / "resolved.yaml",
    )
    Environment(arm="a", seed=seed, versions={"llama-lab": __version__}).save(folder(ran, seed))


@pytest.mark.parametrize(
    ("crash", "expected"),
    [
        ("raise", "RuntimeError: fire"),
        ("kill", "killed by SIGKILL"),
        ("abort", "killed by SIGABRT"),
        ("exit", "its process exited with status 7"),
    ],
)
def test_a_crash_of_one_run_takes_nothing_else_down(crash: str, expected: str, sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=2", f"train.prompt='odd {crash}'", "seed=1,2,4")
    log = Path("runs/llama/a/seed=1/output.log")
    assert ran.code == 1
    assert f"a/seed=1: failed, {expected}; its output is in {log}" in ran.out
    assert "  the last words" in ran.out or crash == "raise"
    assert "the last words" in (ran.cwd / log).read_text()
    assert ran.err.splitlines()[-1] == f"error: {expected}; its output is in {log}"
    assert "Traceback" not in ran.err
    assert (status(ran, 2), status(ran, 4)) == ("done", "done")
    assert status(ran, 1) == ("running" if crash == "raise" else "failed"), "a run that raises writes its own status"


def test_a_program_that_cannot_be_imported_is_reported_in_one_line(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "program", lambda: [sys.executable, "-m", "nowhere"])
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1")
    assert ran.code == 1
    assert re.search(r"a/seed=1: failed, \S+: No module named nowhere; its output is in \S+/output\.log\n", ran.out)
    assert "Traceback" not in ran.err


def test_a_job_that_cannot_start_is_reported_and_the_others_go_on(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1", "train.batch_size=0,8")
    assert ran.code == 2
    assert "seed=1: train.batch_size=0: must be a positive whole number\n" in ran.err
    assert status(ran, 1) == "done"


def test_jobs_with_one_folder_follow_each_other(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=2", "train.prompt='sleep 1'", "seed=1", "train.log_every=1,2")
    assert ran.code == 0
    events = re.findall(r"a/seed=1: (begins|done)", ran.out)
    assert events == ["begins", "done", "begins", "done"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hydra.launcher.slots=2"], "hydra.launcher.slots=2: no such key"),
        (["hydra.launcher.gpus_per_run=2"], "hydra.launcher.gpus_per_run=2: the runs train on the CPU"),
        (["trainer.num_nodes=2"], "trainer.num_nodes=2: start it with torchrun or srun, or set it to 1"),
    ],
)
def test_bad_settings_are_reported_in_one_line(overrides: list[str], message: str, sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, *overrides, "seed=1")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith(f"error: {message}")
    assert not (ran.cwd / "runs").exists()


class NoProcess:
    """Stands for a worker that ends at once; remembers its environment."""

    started: list[dict[str, str]]

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        self.started.append(env)
        self.pid, self.returncode, self.stdin = 2**22 + 1, 7, open(os.devnull)  # noqa: SIM115

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def faked_gpus(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Two GPUs that PyTorch believes in, as far as planning goes. Returns the environments of the workers."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(NoProcess, "started", started, raising=False)
    monkeypatch.setattr(process.subprocess, "Popen", NoProcess)
    return started


GPUS = ("trainer=gpu", "trainer.compile=false", "hydra/launcher=local_gpus")


def test_workers_see_the_gpus_of_their_slot_alone(
    sweep: Sweep, faked_gpus: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("LOCAL_RANK", "0")
    ran = sweep(*GPUS, "hydra.launcher.slots_per_gpu=2", "seed=1,2,3,4")
    assert "4 runs on 4 slots: gpu 3 (1), gpu 5 (1), gpu 3 (2), gpu 5 (2)" in ran.out
    assert {env["CUDA_VISIBLE_DEVICES"] for env in faked_gpus} <= {"3", "5"}
    assert len(faked_gpus) == 4
    assert not any("LOCAL_RANK" in env for env in faked_gpus)


def test_a_run_on_two_gpus_uses_both(sweep: Sweep, faked_gpus: list[dict[str, str]]) -> None:
    ran = sweep(*GPUS, "trainer.devices=-1", "hydra.launcher.gpus_per_run=2", "seed=1")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in faked_gpus] == ["0,1"], ran.err
    refused = sweep(*GPUS, "trainer.devices=2", "seed=1,2")
    assert refused.code == 2
    assert (
        "trainer.devices=2: hydra/launcher=local_gpus gives each run hydra.launcher.gpus_per_run=1; set that"
        in refused.err
    )
    assert len(faked_gpus) == 1


def test_a_clock_that_jumps_back_makes_no_run_end_before_it_began(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = time.time(), iter(range(10**9))
    monkeypatch.setattr("llama_lab.launching.local_engine.time.time", lambda: now - 60 * next(calls))
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1,2")
    assert ran.code == 0
    assert re.findall(r"val loss 1.0000, in (\S+)", ran.out)
    assert "in -" not in ran.out


# Kills


def sleeping(cwd: Path, environment: dict[str, str], tiny: list[str], prompt: str) -> "subprocess.Popen[str]":
    """A sweep of two runs at a time, in a process group of its own."""
    overrides = [*tiny, "arm=a", *ON_CPU, "hydra.launcher.cpu_slots=2", f"train.prompt='{prompt}'", "seed=1,2"]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launching.tasks", "--multirun", *overrides],
        cwd=cwd,
        env={**environment, "PYTHONPATH": str(TRAIN.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def pids(cwd: Path) -> list[int]:
    """The workers, once both have begun."""
    for seed in (1, 2):
        wait_for(cwd / f"mark{seed}")
    return [int(json.loads((cwd / f"mark{seed}").read_text())["pid"]) for seed in (1, 2)]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_dead(workers: list[int]) -> None:
    until = time.monotonic() + PATIENCE
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < until, "orphans"
        time.sleep(0.05)


@pytest.mark.process
def test_runs_die_with_a_launcher_that_is_killed(tmp_path: Path, environment: dict[str, str], tiny: list[str]) -> None:
    launcher = sleeping(tmp_path, environment, tiny, "sleep 600")
    workers = pids(tmp_path)
    launcher.kill()
    launcher.communicate()
    wait_until_dead(workers)


@pytest.mark.process
def test_ctrl_c_reaches_every_run_once_and_exits_with_130(
    tmp_path: Path, environment: dict[str, str], tiny: list[str]
) -> None:
    launcher = sleeping(tmp_path, environment, tiny, "sleep 600")
    workers = pids(tmp_path)
    launcher.send_signal(signal.SIGINT)
    shown, _ = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130
    assert "press Ctrl-C again to stop at once" in shown
    assert shown.count("interrupted, ") == 2
    assert "Traceback" not in shown
    wait_until_dead(workers)


def test_a_job_returns_its_validation_loss_to_hydra_s_own_sweeper(sweep: Sweep, returned: list[Any]) -> None:
    for _ in range(2):
        assert sweep("seed=1,2", *ON_CPU).code == 0
    assert returned == [1.0] * 4, "also of runs that were there"
