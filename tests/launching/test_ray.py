"""Runs through a real Ray, on clusters of this machine that nobody else can reach."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from llama_lab.launching.process import starts_over
from llama_lab.runs.environment import RUNS_AT_ONCE
from tests.conftest import TRAIN
from tests.launching.conftest import TRAINING, Launch, Sweep, ended, folder, mark, sessions
from tests.processes import at_work_in, listening, wait_until
from tests.training.tiny import identical, repeatable, trained, trained_state

pytestmark = [
    pytest.mark.ray,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'llama-lab[ray]'"),
]

# A token, or else Ray leaves one in the user's home.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}
VARIABLES = {**TOKEN, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # and no address but the loopback
ON_CPU = ("trainer=cpu", "hydra/launcher=ray")


@pytest.fixture(scope="module")
def cluster(environment: dict[str, str]) -> Iterator[str]:
    """The address of a cluster with two CPUs, and two GPUs that are only names."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        options = [f"--port={address.partition(':')[2]}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
        options += ["--include-dashboard=false", "--num-cpus=2", "--num-gpus=2", "--object-store-memory=100000000"]
        with log.open("w") as stream:
            head = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
                env={**environment, **VARIABLES},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: "Ray runtime started" in log.read_text())
            yield address
        finally:
            head.terminate()
            try:
                head.wait(20)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)


@pytest.fixture
def on_ray(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """`sweep` over a Ray that is here alone."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return sweep


def test_two_runs_go_on_at_a_time_on_a_cluster_that_is_there_and_stays(on_ray: Sweep, cluster: str) -> None:
    """They share a GPU. One crashes, which is not tried again; a third kills its Ray worker, and is started again."""
    launcher = ("hydra/launcher=ray", f"hydra.launcher.address={cluster}", "hydra.launcher.gpus_per_run=0.5")
    ran = on_ray(
        *launcher, "hydra.launcher.max_retries=1", "train.prompt='meet, crash'", "seed=1,2,7", "overwrite=true"
    )
    assert ran.code == 1
    assert f"3 runs on Ray at {cluster}: 2 CPUs, 2 GPUs" in ran.out
    assert re.search(r"a/seed=1: failed, .*RuntimeError: fire; its output is in ", ran.out)
    assert "  RuntimeError: fire" in ran.out, "of the traceback"
    assert re.search(r"a/seed=2: done, val loss 1\.0000, in \d+ s", ran.out)
    assert "a/seed=7: failed, WorkerCrashedError: " in ran.out
    assert "Traceback" not in ran.err
    begun = re.findall(r"a/seed=(\d): begins on gpu \S+ of \S+\n", ran.out)
    assert sorted(begun) == ["1", "2", "7", "7"]
    for seed in (1, 2, 7):
        seen = mark(ran.cwd, seed)
        assert seen["typed"] == sys.argv, "which environment.json records"
        assert any(map(starts_over, seen["command"])) == (seed != 7), "what goes on does not start over"
        assert (seen["accelerator"], seen["devices"]) == ("gpu", 1), "the cluster has some"
        assert seen["environment"]["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert seen["environment"][RUNS_AT_ONCE] == "2", "which share a GPU"


def test_ctrl_c_twice_ends_at_once(launcher: Launch, cluster: str, tmp_path: Path) -> None:
    keys = (f"hydra.launcher.address={cluster}", "hydra.launcher.cpus_per_run=2")
    started = launcher(*ON_CPU, *keys, "train.prompt=stubborn", "seed=1", **VARIABLES)
    wait_until((tmp_path / "mark1").exists)
    variables = mark(tmp_path, 1)["environment"]
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables[RUNS_AT_ONCE] == "1", "which has the CPUs of the node"
    started.send_signal(signal.SIGINT)
    wait_until((tmp_path / "heard").exists)
    assert started.poll() is None, "it waits for its run"
    started.send_signal(signal.SIGINT)
    code, shown = ended(started)
    assert code == 130, shown
    assert "Traceback" not in shown
    wait_until(lambda: not at_work_in(tmp_path))


def test_a_launcher_with_a_cluster_of_its_own_takes_its_run_along_and_the_same_command_goes_on(
    launcher: Launch, tiny: list[str], tmp_path: Path
) -> None:
    settings = ("train.tokens=120000", "train.checkpoint_every=10", "seed=1")
    run = folder(tmp_path, 1)
    killed = launcher(*ON_CPU, *settings, program=TRAINING, **TOKEN)
    wait_until((run / "checkpoints" / "last.ckpt").exists)
    assert listening(psutil.Process(killed.pid).children(recursive=True)) == {"127.0.0.1"}
    (process,) = (process for process in at_work_in(tmp_path) if str(TRAIN) in process.cmdline())
    killed.send_signal(signal.SIGKILL)
    wait_until(lambda: process not in at_work_in(tmp_path))
    code, shown = ended(launcher(*ON_CPU, *settings, program=TRAINING, **TOKEN))
    assert code == 0, shown
    assert "1 runs on Ray on this machine: " in shown
    assert sessions(run) == 1
    alone = trained(*tiny, *settings, "trainer=cpu", f"runs_dir={tmp_path / 'alone'}")
    assert repeatable(run) == repeatable(alone)
    assert identical(trained_state(run), trained_state(alone))


def test_a_cluster_that_does_not_answer_is_reported_in_one_line(on_ray: Sweep) -> None:
    began = time.monotonic()
    ran = on_ray(*ON_CPU, "hydra.launcher.address=127.0.0.1:1", "seed=1")
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("error: hydra.launcher.address=127.0.0.1:1: ")
    assert not (ran.cwd / "runs").exists()
    assert time.monotonic() - began < 20


def test_without_ray_the_message_says_how_to_install_it(on_ray: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = on_ray(*ON_CPU, "seed=1")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("error: hydra/launcher=ray: ")
    assert "pip install 'llama-lab[ray]'" in ran.err
