"""The queue with tasks that do not train: what goes on beside what, and what a crash leaves."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llama_lab.launching import launch, process
from llama_lab.runs.environment import RUNS_AT_ONCE
from tests.launching.conftest import ON_CPU, Launch, Sweep, ended, mark, status
from tests.processes import at_work_in, wait_until


def test_two_slots_run_two_jobs_at_the_same_time(sweep: Sweep) -> None:
    """On one CPU each, they are forks of one server."""
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=2", "train.prompt=meet", "seed=1,2")
    assert (ran.code, ran.err) == (0, ""), "each waits for the other"
    assert "2 runs on 2 slots: cpu 1, cpu 2" in ran.out
    assert "a/seed=2: begins on cpu 2" in ran.out
    assert len(re.findall(r"a/seed=[12]: done, val loss 1\.0000, in \d+ s", ran.out)) == 2
    share = re.search(r"\n2 done, in \d+ s; its slots were at work ([0-9.]+)% of that\n", ran.out)
    assert 0 < float(share[1]) <= 100
    assert "\x1b" not in ran.out
    one, two = (mark(ran.cwd, seed) for seed in (1, 2))
    assert one["pid"] != two["pid"] != os.getpid()
    assert one["parent"] == two["parent"]
    assert "forkserver" in "".join(psutil.Process(one["parent"]).cmdline())
    assert one["typed"] == sys.argv, "which environment.json records"
    assert (one["environment"]["OMP_NUM_THREADS"], one["environment"][RUNS_AT_ONCE]) == ("1", "2")


CRASHES = {
    1: "RuntimeError: fire",
    3: "killed by SIGKILL",
    5: "its process exited with status 7",
}


def test_a_crash_of_one_run_takes_nothing_else_down(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=2", "train.prompt=crash", "seed=1,2,3,5")
    assert ran.code == 1
    for seed, told in CRASHES.items():
        log = Path(f"runs/llama/a/seed={seed}/output.log")
        assert f"a/seed={seed}: failed, {told}; its output is in {log}" in ran.out
        assert "the last words" in (ran.cwd / log).read_text()
        assert status(ran.cwd, seed) == ("running" if seed == 1 else "failed"), "which writes its own status"
    assert ran.out.count("  the last words") == 2
    assert ran.err.splitlines()[-1] == "error: RuntimeError: fire; its output is in runs/llama/a/seed=1/output.log"
    assert "Traceback" not in ran.err
    assert status(ran.cwd, 2) == "done"


def test_a_program_that_cannot_be_imported_is_one_line(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "program", lambda: [sys.executable, "-m", "nowhere"])
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1")
    assert ran.code == 1
    assert re.search(r"a/seed=1: failed, \S+: No module named nowhere; its output is in \S+/output\.log\n", ran.out)
    assert "Traceback" not in ran.err


def test_a_job_that_cannot_start_is_reported_and_the_others_go_on(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1", "train.batch_size=0,8")
    assert ran.code == 2
    assert "seed=1: train.batch_size=0: must be a positive whole number\n" in ran.err
    assert status(ran.cwd, 1) == "done"


def test_jobs_with_one_folder_follow_each_other(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=2", "train.prompt='sleep 0.3'", "seed=1", "train.log_every=1,2")
    assert ran.code == 0
    events = re.findall(r"a/seed=1: (begins|done)", ran.out)
    assert events == ["begins", "done", "begins", "done"]


def test_a_bad_setting_is_reported_in_one_line(sweep: Sweep) -> None:
    ran = sweep(*ON_CPU, "hydra.launcher.slots=2", "seed=1")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("error: hydra.launcher.slots=2: no such key")
    assert not (ran.cwd / "runs").exists()


@pytest.mark.usefixtures("gpus")
def test_workers_see_the_gpus_of_their_slot_alone(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def end_at_once(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        started.append(env)
        return SimpleNamespace(pid=2**22 + 1, poll=lambda: 7)

    on_gpus = ("trainer=gpu", "trainer.compile=false", "hydra/launcher=local_gpus")
    monkeypatch.setattr(process.subprocess, "Popen", end_at_once)
    sweep(*on_gpus, "trainer.devices=-1", "hydra.launcher.gpus_per_run=2", "seed=1")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["0,1"]
    refused = sweep(*on_gpus, "trainer.devices=2", "seed=1,2")
    assert refused.code == 2
    told = "trainer.devices=2: hydra/launcher=local_gpus gives each run hydra.launcher.gpus_per_run=1; set that"
    assert told in refused.err
    several = sweep(*on_gpus, "trainer.num_nodes=2", "seed=1")
    assert "trainer.num_nodes=2: hydra/launcher=local_gpus trains on one machine" in several.err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("LOCAL_RANK", "0")
    ran = sweep(*on_gpus, "hydra.launcher.slots_per_gpu=2", "seed=3,4,5,6")
    assert "4 runs on 4 slots: gpu 3 (1), gpu 5 (1), gpu 3 (2), gpu 5 (2)" in ran.out
    assert {env["CUDA_VISIBLE_DEVICES"] for env in started[1:]} <= {"3", "5"}
    assert len(started) == 5
    assert not any("LOCAL_RANK" in env for env in started)


def test_after_a_clock_s_jump_no_run_ends_before_it_began(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = time.time(), iter(range(10**9))
    monkeypatch.setattr("llama_lab.launching.local_engine.time.time", lambda: now - 60 * next(calls))
    ran = sweep(*ON_CPU, "hydra.launcher.cpu_slots=1", "seed=1,2")
    assert ran.code == 0
    assert re.findall(r"val loss 1.0000, in (\S+)", ran.out)
    assert "in -" not in ran.out


@pytest.mark.parametrize(("number", "devices"), [(signal.SIGKILL, 1), (signal.SIGINT, 2)])
def test_ctrl_c_reaches_every_run_once_and_runs_die_with_a_launcher_that_is_killed(
    number: signal.Signals, devices: int, launcher: Launch, tmp_path: Path
) -> None:
    """Runs on one CPU are forks, those on two are new processes."""
    slots = ("hydra.launcher.cpu_slots=2", f"trainer.devices={devices}")
    started = launcher(*ON_CPU, *slots, "train.prompt='sleep 600'", "seed=1,2")
    wait_until(lambda: (tmp_path / "mark1").exists() and (tmp_path / "mark2").exists())
    assert len(at_work_in(tmp_path)) > 2
    started.send_signal(number)
    code, shown = ended(started)
    if number == signal.SIGINT:
        assert code == 130
        assert "press Ctrl-C again to stop at once" in shown
        assert shown.count("interrupted, ") == 2
        assert "Traceback" not in shown
    wait_until(lambda: not at_work_in(tmp_path))
