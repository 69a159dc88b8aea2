"""Real runs through a real Ray, on clusters of this machine that nobody else can reach."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from llama_lab.runs.environment import RUNS_AT_ONCE
from tests.conftest import TRAIN, RunTrain
from tests.launching.conftest import TRAINING, Launcher, Sweep, ended, mark, saved, sessions, status
from tests.processes import at_work_in, listening, wait_until
from tests.training.tiny import identical, logged, repeatable, trained_state

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


# Fast tasks on a cluster that is there


def test_two_runs_go_on_at_a_time_on_a_cluster_that_is_there_and_stays(on_ray: Sweep, cluster: str) -> None:
    ran = on_ray(*ON_CPU, f"hydra.launcher.address={cluster}", "train.prompt=meet", "seed=1,2")
    assert (ran.code, ran.err) == (0, ""), "each waits for the other"
    assert f"2 runs on Ray at {cluster}: 2 CPUs, 2 GPUs" in ran.out
    assert len(re.findall(r"a/seed=[12]: begins on cpu of \S+\n", ran.out)) == 2
    assert len(re.findall(r"a/seed=[12]: done, val loss 1\.0000, in \d+ s", ran.out)) == 2
    seen = mark(ran.cwd, 1)
    assert seen["argv"] == sys.argv, "which environment.json records"
    assert (seen["environment"]["CUDA_VISIBLE_DEVICES"], seen["accelerator"]) == ("", "cpu")
    assert seen["environment"][RUNS_AT_ONCE] == "2", "which share the CPUs of the node"


@pytest.mark.parametrize(("gpus", "visible", "devices", "at_once"), [("2", {"0,1"}, 2, "1"), ("0.5", {"0"}, 1, "2")])
def test_runs_have_the_gpus_that_ray_sets_aside_for_them(
    gpus: str, visible: set[str], devices: int, at_once: str, on_ray: Sweep, cluster: str
) -> None:
    prompt = [] if gpus == "2" else ["train.prompt=meet"]
    launcher = ["hydra/launcher=ray", f"hydra.launcher.address={cluster}", f"hydra.launcher.gpus_per_run={gpus}"]
    ran = on_ray(*launcher, *prompt, "seed=1,2")
    assert (ran.code, ran.err) == (0, "")
    marks = [mark(ran.cwd, seed) for seed in (1, 2)]
    assert {each["environment"]["CUDA_VISIBLE_DEVICES"] for each in marks} == visible
    assert {each["environment"][RUNS_AT_ONCE] for each in marks} == {at_once}, "which share a GPU"
    assert [(each["accelerator"], each["devices"]) for each in marks] == [("gpu", devices)] * 2, "the cluster has some"


def test_threads_are_the_cpus_that_a_run_has(on_ray: Sweep, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ran = on_ray(*ON_CPU, f"hydra.launcher.address={cluster}", "hydra.launcher.cpus_per_run=2", "seed=1")
    assert mark(ran.cwd, 1)["environment"]["OMP_NUM_THREADS"] == "2"


def test_a_crash_is_reported_with_its_last_lines_and_not_tried_again(on_ray: Sweep, cluster: str) -> None:
    ran = on_ray(*ON_CPU, f"hydra.launcher.address={cluster}", "train.prompt=crash", "seed=1,2,3")
    assert ran.code == 1
    for seed, told in ((1, "RuntimeError: fire"), (3, "killed by SIGKILL")):
        assert re.search(rf"a/seed={seed}: failed, .*{told}; its output is in ", ran.out)
        assert ran.out.count(f"a/seed={seed}: begins") == 1
    assert "  the last words" in ran.out
    assert status(ran.cwd, 2) == "done"


def test_a_cluster_that_does_not_answer_is_reported_in_one_line(on_ray: Sweep) -> None:
    began = time.monotonic()
    ran = on_ray(*ON_CPU, "hydra.launcher.address=127.0.0.1:1", "seed=1")
    assert ran.code == 2
    told = "error: hydra.launcher.address=127.0.0.1:1: nothing answers at 127.0.0.1"
    assert ran.err.splitlines()[-1].startswith(told)
    assert not (ran.cwd / "runs").exists()
    assert time.monotonic() - began < 20


def test_without_ray_the_message_says_how_to_install_it(on_ray: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = on_ray(*ON_CPU, "seed=1")
    assert ran.code == 2
    assert ran.err == "error: hydra/launcher=ray: needs Ray; pip install 'llama-lab[ray]'\n"


# Kills, and real training


def kill_ray_worker() -> None:
    """Kill what has started the process of a run; then that ends, too."""
    named = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("ray::a/seed=1")]
    (worker,) = named
    worker.kill()


def test_a_run_is_resumed_max_retries_times(start: Callable[..., Launcher], cluster: str, tmp_path: Path) -> None:
    keys = (f"hydra.launcher.address={cluster}", "hydra.launcher.max_retries=1")
    launcher = start(*ON_CPU, *keys, "train.prompt='sleep 600'", "seed=1", **VARIABLES)
    for _ in range(2):
        wait_until((tmp_path / "mark1").exists)
        (tmp_path / "mark1").unlink()
        kill_ray_worker()
    code, shown = ended(launcher)
    assert code == 1
    assert shown.count("a/seed=1: begins on cpu of") == 2
    assert "a/seed=1: failed, WorkerCrashedError: " in shown
    assert "Traceback" not in shown


def test_a_run_whose_ray_worker_dies_resumes_to_the_same_metrics(
    start: Callable[..., Launcher], run_train: RunTrain, tiny: list[str], cluster: str, tmp_path: Path
) -> None:
    longer = ("train.tokens=60000", "train.checkpoint_every=10", "seed=1")
    alone = run_train(*tiny, "arm=a", "trainer=cpu", *longer).run
    keys = (f"hydra.launcher.address={cluster}", "++overwrite=true")
    launcher = start(*ON_CPU, *keys, *longer, program=TRAINING, **VARIABLES)
    run = tmp_path / "runs" / "llama" / "a" / "seed=1"
    wait_until((run / "checkpoints" / "last.ckpt").exists)
    kill_ray_worker()
    code, shown = ended(launcher)
    assert code == 0, shown
    assert shown.count("a/seed=1: begins on cpu of") == 2
    assert sessions(run) == 1, "overwrite=true does not start over what is its own"
    assert repeatable(run) == repeatable(alone)
    assert identical(trained_state(run), trained_state(alone))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_twice_ends_at_once_and_runs_die_with_a_launcher_that_is_killed(
    number: signal.Signals, start: Callable[..., Launcher], cluster: str, tmp_path: Path
) -> None:
    address = f"hydra.launcher.address={cluster}"
    launcher = start(*ON_CPU, address, "train.prompt=stubborn", "seed=1", **VARIABLES)
    wait_until((tmp_path / "mark1").exists)
    launcher.send_signal(number)
    if number == signal.SIGINT:
        wait_until((tmp_path / "heard").exists)
        assert launcher.poll() is None, "it waits for its run"
        launcher.send_signal(number)
    code, shown = ended(launcher)
    assert code == (130 if number == signal.SIGINT else -number), shown
    assert "Traceback" not in shown
    wait_until(lambda: not at_work_in(tmp_path))


def test_a_run_on_two_devices_is_two_processes_of_a_task(run_train: RunTrain, tiny: list[str], cluster: str) -> None:
    """Here on the CPU: Lightning starts the second rank from the worker, as it does without Ray."""
    two = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
    launcher = ("hydra/launcher=ray", f"hydra.launcher.address={cluster}", "hydra.launcher.cpus_per_run=2")
    alone = run_train(*tiny, "trainer=cpu")
    ran = run_train("--multirun", *tiny, "arm=a", "seed=1", *two, *launcher, **VARIABLES)
    assert (ran.code, ran.err) == (0, "")
    assert logged(ran.run, "val/loss") == pytest.approx(logged(alone.run, "val/loss"), rel=1e-3)
    assert trained_state(ran.run)["global_step"] == 78


STUDY = (
    *ON_CPU,
    "hydra.launcher.cpus_per_run=0.5",
    "study=ladder",
    "study.learning_rates=null",
    "study.axes=[norm]",
    "study.seeds=[1]",
    "name=climb",
    "train.tokens=150000",  # some seconds; one that ends before it hears that its launcher died is done
    "train.checkpoint_every=10",
)


def test_a_study_on_a_cluster_of_its_own_saves_at_ctrl_c_goes_on_to_its_report_and_dies_with_its_launcher(
    start: Callable[..., Launcher], run_train: RunTrain, tiny: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "climb"
    runs = [folder / arm / "seed=1" for arm in ("vanilla", "+rmsnorm")]
    for number in (signal.SIGKILL, signal.SIGINT):
        began, launcher = time.time(), start(*STUDY, program=(str(TRAIN),), **TOKEN)
        wait_until(lambda began=began: saved(runs, began) == 2)
        of_ray = psutil.Process(launcher.pid).children(recursive=True)
        assert listening(of_ray) == {"127.0.0.1"}
        if number == signal.SIGKILL:
            launcher.kill()
        else:
            os.killpg(launcher.pid, signal.SIGINT)  # Ray's own processes hear it too, as they do in a terminal
        code, shown = ended(launcher)
        wait_until(lambda: not at_work_in(tmp_path))
    assert code == 130, shown
    assert shown.count("interrupted, stopped by the user at step") == 2, shown
    assert not list(Path("/tmp").glob(f"llama-lab-ray-*/session_*_{launcher.pid}"))
    again = run_train(*tiny, *STUDY, cwd=tmp_path, **TOKEN)
    assert (again.code, again.err) == (0, "")
    assert "2 runs on Ray on this machine: " in again.out
    assert (folder / "report.html").exists()
    for run in runs:
        assert json.loads((run / "status.json").read_text())["status"] == "done"
        assert sessions(run) == 2
